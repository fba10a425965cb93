"""Tuning: measures plans and stock MLX, and stores the fastest for each problem."""
