"""The prompts that come with the project, written for it: `train.jsonl` and `heldout.jsonl`."""
