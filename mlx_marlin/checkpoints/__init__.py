"""Checkpoints: reading weights of other formats, and writing ours."""
