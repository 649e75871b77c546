"""Shards: files of hidden states, each sample encoded by itself, in safetensors or Parquet behind one interface.

In both formats a sample's stored bytes are one range of the file, so a read needs no more than a receipt.
"""

from storage.shards.checksum import states_checksum
from storage.shards.reader import ShardReader, open_shard_reader
from storage.shards.writer import SHARD_FORMATS, EncodedSample, ShardWriter, encode_sample, open_shard_writer

__all__ = [
    "SHARD_FORMATS",
    "EncodedSample",
    "ShardReader",
    "ShardWriter",
    "encode_sample",
    "open_shard_reader",
    "open_shard_writer",
    "states_checksum",
]
