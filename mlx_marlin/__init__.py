"""Marlin-style quantized matrix products for MLX, for 1 to 64 rows.

Names are imported at their first use: planning does not need MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_marlin.backends.metal.instances import variants
    from mlx_marlin.backends.planner import plan
    from mlx_marlin.checkpoints.reading import read_checkpoint
    from mlx_marlin.layers.linear import MarlinLinear
    from mlx_marlin.lm.checkpoints.head_source import load_heads
    from mlx_marlin.lm.checkpoints.loading import load
    from mlx_marlin.lm.checkpoints.saving import save
    from mlx_marlin.lm.drafts.stream import stream_generate
    from mlx_marlin.lm.optimize import optimize, restore
    from mlx_marlin.lm.report.model_report import report
    from mlx_marlin.lm.verification.gate import verify
    from mlx_marlin.products.experts import gather_qmm
    from mlx_marlin.products.exporting import exporting
    from mlx_marlin.products.linear import linear, linears
    from mlx_marlin.products.matmul import quantized_matmul, why_not
    from mlx_marlin.products.packing import pack, quantize, unpack
    from mlx_marlin.products.reference.weight import dequantize
    from mlx_marlin.weights.packed_weight import PackedWeight

__all__ = [
    "MarlinLinear",
    "PackedWeight",
    "dequantize",
    "exporting",
    "gather_qmm",
    "linear",
    "linears",
    "load",
    "load_heads",
    "optimize",
    "pack",
    "plan",
    "quantize",
    "quantized_matmul",
    "read_checkpoint",
    "report",
    "restore",
    "save",
    "stream_generate",
    "unpack",
    "variants",
    "verify",
    "why_not",
]

_MODULES = {
    "MarlinLinear": "layers.linear",
    "PackedWeight": "weights.packed_weight",
    "dequantize": "products.reference.weight",
    "exporting": "products.exporting",
    "gather_qmm": "products.experts",
    "linear": "products.linear",
    "linears": "products.linear",
    "load": "lm.checkpoints.loading",
    "load_heads": "lm.checkpoints.head_source",
    "optimize": "lm.optimize",
    "plan": "backends.planner",
    "pack": "products.packing",
    "quantize": "products.packing",
    "quantized_matmul": "products.matmul",
    "read_checkpoint": "checkpoints.reading",
    "report": "lm.report.model_report",
    "restore": "lm.optimize",
    "save": "lm.checkpoints.saving",
    "stream_generate": "lm.drafts.stream",
    "unpack": "products.packing",
    "variants": "backends.metal.instances",
    "verify": "lm.verification.gate",
    "why_not": "products.matmul",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
