"""The former name of the package `metal_emulator`, for one release."""

import warnings

from metal_emulator import *  # noqa: F403

warnings.warn(
    "mlx_marlin.emulator is now the package metal_emulator: import metal_emulator",
    DeprecationWarning,
    stacklevel=2,
)
