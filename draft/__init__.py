"""The draft model's contract: one configuration, every file format derived from it, the checks that hold them together.

`config` is the single source; `formats`, `weights` and `checkpoint` derive from it; `export`, `importing`, `compare`
and `validate` move drafts in and out and tell whether they are what they claim to be.
"""
