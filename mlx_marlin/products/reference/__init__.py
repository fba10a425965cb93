"""Products and epilogues in the operations of stock MLX."""
