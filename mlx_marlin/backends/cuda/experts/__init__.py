"""Experts' products on NVIDIA GPUs: plans and their choice."""
