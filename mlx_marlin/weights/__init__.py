"""Quantized weights: formats, the packed layout, the values that hold them."""
