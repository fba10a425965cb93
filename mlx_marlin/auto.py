"""Converts every model that mlx-lm or mlx-vlm loads from now on, with `optimize`.

Importing this module is enough. mlx-lm's loading functions then also read the
checkpoints that `mlx_marlin.load` reads. `MLX_MARLIN_OPTIONS`, such as
"layout=marlin,join=true", sets options of `optimize`.

Raises:
    ImportError: If mlx-lm is not installed.
    ValueError: If `MLX_MARLIN_OPTIONS` is malformed.
"""

from mlx_marlin.lm.auto import install

install()
