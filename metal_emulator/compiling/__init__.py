"""Compilation of kernels and of the runtime."""
