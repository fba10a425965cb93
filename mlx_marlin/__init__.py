"""Marlin-style quantized matrix products for MLX on Apple GPUs, for 1 to 64 rows.

Planning needs no MLX, so names that do are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Eager: a later import of the submodule `mlx_marlin.plan` would take the name back.
from mlx_marlin.scheduler import plan

if TYPE_CHECKING:
    from mlx_marlin.gather import gather_qmm
    from mlx_marlin.instances import variants
    from mlx_marlin.integrations.mlx_lm import optimize, restore
    from mlx_marlin.nn import MarlinLinear
    from mlx_marlin.ops import linear, linears, quantized_matmul, why_not
    from mlx_marlin.packing import PackedWeight, pack, quantize, unpack

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
