"""Decoder blocks of mlx-lm as cached graphs."""
