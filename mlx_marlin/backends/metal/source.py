"""Metal source of the kernels.

The source of a kernel is the body `kernels/NAME.metal`; its header consists of the
files of `lib` that the body uses. Template arguments are its only configuration.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.source import (
    EPILOGUE_INPUTS,
    EXPERT_BIASES,
    HEAD_NORMS,
    NORM,
    NUMBERS,
    OPERANDS,
    ROTATION,
    SECOND,
    Source,
    read,
)
from mlx_marlin.planning.epilogue import PLAIN


class KernelBody(NamedTuple):
    """What the body of a kernel declares."""

    inputs: tuple[str, ...]  # Names of the input buffers
    # Files of `lib` that the body uses, in the order of their dependencies
    files: tuple[str, ...]
    outputs: tuple[str, ...] = ("out",)  # Names of the output buffers


WEIGHT = ("work", "decode", "words", "values", "lane", "weight_tile")
"""The files of `lib` that read a weight, in the order of their dependencies."""
_PRODUCT = (*OPERANDS, *NUMBERS)
_FILES = {
    kernel: (*WEIGHT, "epilogue", "tiling", *own, kernel)
    for kernel, own in {
        "gemv": (),
        "gemm_register": ("fragments",),
        "gemm_staged": ("fragments", "staging"),
        "gemm_tensor": ("tensor_fragments",),
    }.items()
}
"""The files of `lib` that a product's kernel uses."""
_GATED = ("gate", "gated")
_NORMED = (*_FILES["gemv"], *_GATED, "normed")
_GATHER = (*_FILES["gemm_register"], "gemv", "gather")
_PAIRS = ("sources", "experts", "shape")
_REDUCE = ("work", "epilogue", "reduce")
_PROBE = KernelBody(("unused",), (*WEIGHT[:-1], "tensor_fragments", "tensor_probe"))
_OPERAND_PROBE = (*_FILES["gemm_register"][:-1], "operand_probe")
_REPACK = KernelBody(("w", "shape"), ("work", "repack"))
BODIES = {
    **{kernel: KernelBody(_PRODUCT, files) for kernel, files in _FILES.items()},
    **{
        f"{kernel}_fused": KernelBody((*_PRODUCT, *EPILOGUE_INPUTS), files)
        for kernel, files in _FILES.items()
    },
    **{
        f"{kernel}_gated": KernelBody(_PRODUCT, (*_FILES[kernel], *_GATED))
        for kernel in ("gemv", "gemm_register")
    },
    "gemv_normed": KernelBody((*_PRODUCT, *EPILOGUE_INPUTS, *NORM), _NORMED),
    "gemv_normed_gated": KernelBody((*_PRODUCT, *NORM), _NORMED),
    "reduce": KernelBody(("partials", *NUMBERS), _REDUCE),
    "reduce_fused": KernelBody(("partials", *NUMBERS, *EPILOGUE_INPUTS), _REDUCE),
    "gather": KernelBody((*OPERANDS, *_PAIRS), _GATHER),
    "gather_fused": KernelBody(
        (*OPERANDS, *SECOND, *EXPERT_BIASES, *_PAIRS),
        (*_GATHER, *_GATED, "expert_epilogue"),
    ),
    "dequantize": KernelBody((*OPERANDS[1:], "shape"), (*WEIGHT, "dequantize")),
    "route": KernelBody(("logits",), ("work", "routing"), ("experts", "scores")),
    "combine": KernelBody(("results", "scores", "residual"), ("work", "routing")),
    "rotate_heads": KernelBody(
        ("qkv", *ROTATION, *HEAD_NORMS), ("work", "heads"), ("q", "k")
    ),
    "add_norm": KernelBody(("x", "y", "weight"), ("work", "add_norm"), ("sum", "out")),
    "pack": _REPACK,
    "unpack": _REPACK,
    "operand_probe": KernelBody(("unused",), _OPERAND_PROBE),
    "tensor_probe": _PROBE,
    "tensor_layout": _PROBE,
}
"""All kernels, by the names of their files in `kernels`."""
SPACE_OF_PUNCTUATION = re.compile(r"(?<=\w) (?=[^\w\s])|(?<=[^\w\s]) (?=\w)")
"""A space that no two tokens need between them."""
TENSOR_HEADER = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
"""Declares tensor operations; macOS has it from 26 on."""


def of_product(plan: MetalPlan) -> Source:
    """Returns the source of a plan's first kernel."""
    epilogue = plan.problem.epilogue
    body = plan.kernel
    if plan.problem.norm is not None:
        body += "_normed"
    if epilogue.gated:
        body += "_gated"
    elif epilogue != PLAIN and plan.problem.norm is None and not plan.is_split:
        body += "_fused"
    return kernel_source(body, plan.reduction == "atomic")


def of_reduce(plan: MetalPlan) -> Source:
    """Returns the source of the reduce kernel of a split plan."""
    fused = plan.problem.epilogue != PLAIN
    return kernel_source("reduce_fused" if fused else "reduce")


@cache
def kernel_source(body: str, atomic: bool = False) -> Source:
    """Returns the source of a kernel."""
    inputs, files, outputs = BODIES[body]
    # `store` is called with arguments of MLX's types, so it must be declared before.
    files = (("atomic",) if atomic else ()) + files
    included = TENSOR_HEADER if "tensor_fragments" in files else ""
    return Source(
        name=f"marlin_{body}" + "_atomic" * atomic,
        input_names=inputs,
        output_names=outputs,
        header=included + header(files),
        source=stripped(read(f"kernels/{body}.metal")),
        atomic=atomic,
    )


def header(names: Sequence[str]) -> str:
    """Returns files of `lib`, stripped, in a namespace.

    The namespace prevents conflicts with names of Metal's headers. The files have none
    themselves, because the CUDA sources include them inside one.
    """
    text = "\n".join([stripped(read(f"lib/{name}.metal")) for name in names])
    return f"namespace marlin {{\n{text}}}\n"


def stripped(text: str) -> str:
    """Returns Metal text without comments and without most spaces.

    MLX concatenates the text of a kernel in each call and hashes it in each evaluation.
    Line breaks stay, so every token keeps its line. Strings contain no comments.
    """
    lines = re.sub(r"^[ \t]+|[ \t]*//.*", "", text, flags=re.MULTILINE).split("\n")
    # A space in a directive may end the name of a macro.
    return "\n".join(
        line if line.startswith("#") else SPACE_OF_PUNCTUATION.sub("", line)
        for line in lines
    )
