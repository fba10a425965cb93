"""Readers of the layers in folders of safetensors files, one for each method."""
