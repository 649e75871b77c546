"""Verifier in, tokens and hidden states out: prompts, chat templates, layer ids, replicas and capture.

May import `storage`; nothing here knows of Ray or of training.
"""
