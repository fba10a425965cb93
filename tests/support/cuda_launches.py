"""Small plans of CUDA kernels, their operands, and a model to convert."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_marlin.backends import planner
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

H200 = CudaDevice.named("NVIDIA H200")

N, K = 96, 512

FUSED = Epilogue(bias=True, activation="silu", residual=True)


def plan_of(**options: Any) -> Plan:
    """Returns a plan of "mma" of a small product with any options."""
    fields = {"m": 9, "n": N, "k": K}
    problem = Problem(
        **fields | {name: options.pop(name) for name in list(options) if name in NAMES}
    )
    return planner.make(problem, device=H200, **{"kernel": "mma"} | options)


NAMES = set(Problem.__dataclass_fields__)

SPLIT = {"strategy": "split_k", "k_parallel": 2, "simdgroups_n": 2, "simdgroups_k": 4}

WHOLE = {"strategy": "data_parallel", "simdgroups_n": 3, "simdgroups_k": 2}


def blanks(plan: Plan, arrays: int = 4) -> list[mx.array]:
    """Makes as many arguments of a product as wanted, of the right dtypes."""
    problem = plan.problem
    dtype, scale_dtype = (
        getattr(mx, name) for name in (problem.dtype, problem.scale_dtype)
    )
    words, scales = mx.zeros((4,), mx.uint32), mx.zeros((2,), scale_dtype)
    x = mx.zeros((problem.m, problem.k), dtype)
    return [x, words, scales, scales, *[mx.zeros((3,), dtype)] * (arrays - 4)]


RING = {"kernel": "wgmma", "strategy": "data_parallel", "simdgroups_n": 3}
RING |= {"simdgroups_k": 2, "buffers": 4, "layout": "marlin"}


class Model(nn.Module):
    """A model with a layer of each kind that `optimize` looks at."""

    def __init__(self, dtype: mx.Dtype = mx.float16) -> None:
        super().__init__()
        self.linear = nn.QuantizedLinear(K, N)
        self.embedding = nn.QuantizedEmbedding(N, K)
        self.experts = SwitchLinear(K, N, 4, bias=False).to_quantized()
        self.set_dtype(dtype)
