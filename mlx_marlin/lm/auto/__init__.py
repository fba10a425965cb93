"""Converts every model that mlx-lm loads: what `import mlx_marlin.auto` installs."""
