"""Prompt sources: rows of JSON lines or of any data set become prompts or recorded bad rows.

`read_prompts` streams them; `order.py` fixes the order and the digest that a data set's identity records.
"""

from gen.prompts.order import SourceDigest, shuffled
from gen.prompts.reader import read_prompts
from gen.prompts.types import BadRow, Mode, Prompt, Reason, RowError

__all__ = ["BadRow", "Mode", "Prompt", "Reason", "RowError", "SourceDigest", "read_prompts", "shuffled"]
