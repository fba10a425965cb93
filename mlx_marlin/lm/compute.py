"""The values of `optimize(compute=...)`, which parsers of options need without MLX."""

COMPUTE = ("float16",)
"""Dtypes in which a model in bfloat16 can compute."""
