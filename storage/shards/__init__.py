"""Shards: files of hidden states, each sample encoded by itself, in safetensors or Parquet behind one interface.

In both formats a sample's stored bytes are one range of the file, so a read needs no more than a receipt.
"""

from storage.shards.checksum import file_digest, states_checksum
from storage.shards.reader import ShardReader, open_shard_reader
from storage.shards.writer import SHARD_FORMATS, ShardWriter, open_shard_writer

__all__ = [
    "SHARD_FORMATS",
    "ShardReader",
    "ShardWriter",
    "file_digest",
    "open_shard_reader",
    "open_shard_writer",
    "states_checksum",
]
