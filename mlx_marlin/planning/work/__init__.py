"""The work of a product: its ranges and splits, and the ways to divide it."""
