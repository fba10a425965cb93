"""Experts' products on Apple GPUs: plans and their choice."""
