"""Marlin-style quantized matrix products for MLX on Apple GPUs, for 1 to 64 rows.

Planning needs no MLX, and a program that imports the package may never plan: names are
imported when they are first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_marlin.gather import gather_qmm
    from mlx_marlin.instances import variants
    from mlx_marlin.integrations.mlx_lm import optimize, restore
    from mlx_marlin.nn import MarlinLinear
    from mlx_marlin.ops import linear, linears, quantized_matmul, why_not
    from mlx_marlin.packing import PackedWeight, pack, quantize, unpack
    from mlx_marlin.scheduler import plan

__all__ = [
    "MarlinLinear",
    "PackedWeight",
    "gather_qmm",
    "linear",
    "linears",
    "optimize",
    "pack",
    "plan",
    "quantize",
    "quantized_matmul",
    "restore",
    "unpack",
    "variants",
    "why_not",
]

_HOMES = {
    "MarlinLinear": "nn",
    "PackedWeight": "packing",
    "gather_qmm": "gather",
    "linear": "ops",
    "linears": "ops",
    "optimize": "integrations.mlx_lm",
    "pack": "packing",
    "quantize": "packing",
    "quantized_matmul": "ops",
    "restore": "integrations.mlx_lm",
    "unpack": "packing",
    "variants": "instances",
    "why_not": "ops",
}


class _Package(ModuleType):
    """Keeps `plan` the function, also after an import of the submodule of that name."""

    @property
    def plan(self) -> Any:
        """The function `mlx_marlin.scheduler.plan`."""
        return import_module(f"{__name__}.scheduler").plan

    @plan.setter
    def plan(self, submodule: ModuleType) -> None:
        """Ignores the submodule that Python's import sets as an attribute."""


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
