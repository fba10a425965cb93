"""The cost model of the Metal kernels."""
