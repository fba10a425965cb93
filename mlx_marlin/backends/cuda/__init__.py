"""The CUDA back end, for NVIDIA GPUs."""
