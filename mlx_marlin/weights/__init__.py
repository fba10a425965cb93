"""Quantized weights: formats, the packed layout, and conversion between layouts."""
