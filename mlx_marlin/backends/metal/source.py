"""Metal source of the kernels.

The source of a kernel is the body `kernels/NAME.metal`; its header consists of the
files of `lib` that the body uses. Template arguments are its only configuration.
"""

import re
from collections.abc import Sequence
from functools import cache

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

WEIGHT = ("work", "decode", "words", "values", "lane", "weight_tile")
"""The files of `lib` that read a weight, in the order of their dependencies."""
DEPENDENCIES = {
    "gemm_register": ("fragments",),
    "gemm_staged": ("fragments", "staging"),
    "gemm_tensor": ("tensor_fragments",),
}
"""Further files of `lib` that a kernel's own file depends on."""
SPACE_OF_PUNCTUATION = re.compile(r"(?<=\w) (?=[^\w\s])|(?<=[^\w\s]) (?=\w)")
"""A space that no two tokens need between them."""
TENSOR_HEADER = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
"""Declares tensor operations; macOS has it from 26 on."""


def of_product(plan: MetalPlan) -> Source:
    """Returns the source of a plan's first kernel."""
    gated = plan.problem.epilogue.gated
    if plan.problem.norm is not None:
        return normed_source(gated)
    if gated:
        return gated_source(plan.kernel)
    fused = plan.problem.epilogue != PLAIN and not plan.is_split
    return product_source(plan.kernel, fused, plan.reduction == "atomic")


def of_reduce(plan: MetalPlan) -> Source:
    """Returns the source of the reduce kernel of a split plan."""
    return reduce_source(plan.problem.epilogue != PLAIN)


@cache
def product_source(kernel: str, fused: bool = False, atomic: bool = False) -> Source:
    """Returns the source of a kernel that computes products.

    Args:
        kernel: Name of the kernel, one of `limits.KERNELS`.
        fused: Whether the kernel applies an epilogue and has its operands.
        atomic: Whether the kernel adds to its output.
    """
    body = f"{kernel}_fused" if fused else kernel
    inputs = (*OPERANDS, *NUMBERS, *(EPILOGUE_INPUTS if fused else ()))
    # `store` is called with arguments of MLX's types, so it must be declared before.
    files = (("atomic",) if atomic else ()) + _files(kernel)
    return _of_metal(body, inputs, files, atomic)


@cache
def gated_source(kernel: str) -> Source:
    """Returns the source of "gemv" or "gemm_register" with a gated epilogue."""
    files = (*_files(kernel), "gate", "gated")
    return _of_metal(f"{kernel}_gated", (*OPERANDS, *NUMBERS), files)


@cache
def normed_source(gated: bool) -> Source:
    """Returns the source of "gemv" with an RMSNorm before it.

    Args:
        gated: Whether its epilogue is gated.
    """
    body = "gemv_normed_gated" if gated else "gemv_normed"
    inputs = (*OPERANDS, *NUMBERS, *(() if gated else EPILOGUE_INPUTS), *NORM)
    return _of_metal(body, inputs, (*_files("gemv"), "gate", "gated", "normed"))


def _files(kernel: str) -> tuple[str, ...]:
    """Returns the files of `lib` that a product's kernel uses."""
    return (*WEIGHT, "epilogue", "tiling", *DEPENDENCIES.get(kernel, ()), kernel)


@cache
def probe_source(name: str) -> Source:
    """Returns the source of "tensor_probe" or "tensor_layout", which have no inputs."""
    files = (*WEIGHT[:-1], "tensor_fragments", "tensor_probe")
    return _of_metal(name, ("unused",), files)


@cache
def gather_source(fused: bool = False) -> Source:
    """Returns the source of the gather kernel, for products of experts.

    Args:
        fused: Whether the kernel adds biases or gates, and has operands for both.
    """
    operands = (*OPERANDS, *((*SECOND, *EXPERT_BIASES) if fused else ()))
    inputs = (*operands, "sources", "experts", "shape")
    files = (*_files("gemm_register"), "gemv", "gather")
    epilogue = ("gate", "gated", "expert_epilogue") if fused else ()
    return _of_metal("gather_fused" if fused else "gather", inputs, files + epilogue)


@cache
def routing_source(kernel: str) -> Source:
    """Returns the source of the kernel "route" or "combine", for experts."""
    if kernel == "route":
        outputs = ("experts", "scores")
        return _of_metal(kernel, ("logits",), ("work", "routing"), outputs=outputs)
    inputs = ("results", "scores", "residual")
    return _of_metal(kernel, inputs, ("work", "routing"))


@cache
def block_source(kernel: str) -> Source:
    """Returns the source of the kernel "rotate_heads" or "add_norm"."""
    if kernel == "rotate_heads":
        heads = ("qkv", *ROTATION, *HEAD_NORMS)
        return _of_metal(kernel, heads, ("work", "heads"), outputs=("q", "k"))
    rows = ("x", "y", "weight")
    return _of_metal(kernel, rows, ("work", "add_norm"), outputs=("sum", "out"))


@cache
def dequantize_source() -> Source:
    """Returns the source of the kernel that decodes a block of a weight."""
    inputs = (*OPERANDS[1:], "shape")
    return _of_metal("dequantize", inputs, (*WEIGHT, "dequantize"))


@cache
def repack_source(layout: str) -> Source:
    """Returns the source of the kernel that converts codes to a layout."""
    body = "pack" if layout == "marlin" else "unpack"
    return _of_metal(body, ("w", "shape"), ("work", "repack"))


@cache
def reduce_source(fused: bool = False) -> Source:
    """Returns the source of the kernel that adds the splits of each tile.

    Args:
        fused: Whether the kernel applies an epilogue.
    """
    body = "reduce_fused" if fused else "reduce"
    inputs = ("partials", *NUMBERS, *(EPILOGUE_INPUTS if fused else ()))
    return _of_metal(body, inputs, ("work", "epilogue", "reduce"))


def _of_metal(
    body: str,
    inputs: tuple[str, ...],
    files: Sequence[str],
    atomic: bool = False,
    outputs: tuple[str, ...] = ("out",),
) -> Source:
    """Returns the source of a Metal kernel.

    Args:
        body: File name of the body.
        inputs: Names of the input buffers.
        files: Files of `lib` that the body uses, in the order of their dependencies.
        atomic: Whether the kernel adds to its output.
        outputs: Names of the output buffers.
    """
    text = read(f"kernels/{body}.metal")
    included = TENSOR_HEADER if "tensor_fragments" in files else ""
    return Source(
        name=f"marlin_{body}" + "_atomic" * atomic,
        input_names=inputs,
        output_names=outputs,
        header=included + header(files),
        source=stripped(text),
        atomic=atomic,
    )


def header(names: Sequence[str]) -> str:
    """Returns files of `lib`, stripped, in a namespace.

    The namespace prevents conflicts with names of Metal's headers. The files have none
    themselves, because the CUDA sources include them inside one.

    Args:
        names: Files without suffix, in the order of their dependencies.
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
