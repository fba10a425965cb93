"""Measures plans and stock MLX for a problem, and says which to use."""
