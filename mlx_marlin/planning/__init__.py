"""Problems and plans as values, without a device, MLX or NumPy."""
