"""Files of MLX's graphs with our kernels, for another GPU: `exporting`."""
