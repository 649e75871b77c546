"""Capture of hidden states inside vLLM: a worker subclass that copies each step's rows to the host and writes shards.

`config` gives the engine arguments of a mode, `client` is what a replica talks to; everything else runs in the worker.
"""
