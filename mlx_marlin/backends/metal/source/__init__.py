"""Finds the Metal text of a plan's kernels.

A kernel is the body `kernels/NAME.metal` with what it uses of the `lib` files as its
header, configured by template arguments alone. Both are stripped (`shader_text`).
"""

from collections.abc import Sequence
from functools import cache

from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.metal.source import compaction
from mlx_marlin.backends.source import FINISH, NUMBERS, OPERANDS, Source, read
from mlx_marlin.planning.epilogue import PLAIN

WEIGHT = ("work", "decode", "words", "values", "lane")
"""The files of `lib` that read a weight, each leaning on those before it."""
LEANING = {"gemm_staged": ("gemm_register", "staging")}
"""Further files that a kernel's own leans on."""


def of_product(plan: MetalPlan) -> Source:
    """Returns the text of a plan's first kernel."""
    fused = plan.problem.epilogue != PLAIN and not plan.is_split
    return product_source(plan.kernel, fused, plan.reduction == "atomic")


def of_reduce(plan: MetalPlan) -> Source:
    """Returns the text of the kernel that adds a plan's splits."""
    return reduce_source(plan.problem.epilogue != PLAIN)


@cache
def product_source(kernel: str, fused: bool = False, atomic: bool = False) -> Source:
    """Returns the text of the kernel "gemv", "gemm_register" or "gemm_staged".

    Args:
        kernel: Its name.
        fused: Whether it applies an epilogue, for which it reads four arrays more.
        atomic: Whether it adds to its output.
    """
    body = f"{kernel}_fused" if fused else kernel
    inputs = (*OPERANDS, *NUMBERS, *(FINISH if fused else ()))
    files = (*WEIGHT, "epilogue", *LEANING.get(kernel, ()), kernel)
    return _of_metal(body, inputs, files, atomic)


@cache
def gather_source() -> Source:
    """Returns the text of the kernel for experts' products."""
    inputs = (*OPERANDS, "sources", "experts", "shape")
    files = (*WEIGHT, "epilogue", "gemm_register", "gemv", "gather")
    return _of_metal("gather", inputs, files)


@cache
def dequantize_source() -> Source:
    """Returns the text of the kernel that decodes a block of a weight."""
    inputs = (*OPERANDS[1:], "shape")
    return _of_metal("dequantize", inputs, (*WEIGHT, "dequantize"))


@cache
def repack_source(layout: str) -> Source:
    """Returns the text of the kernel that moves codes to a layout from the other."""
    body = "pack" if layout == "marlin" else "unpack"
    return _of_metal(body, ("w", "shape"), ("work", "repack"))


@cache
def reduce_source(fused: bool = False) -> Source:
    """Returns the text of the kernel that adds the splits of each tile.

    Args:
        fused: Whether it applies an epilogue.
    """
    body = "reduce_fused" if fused else "reduce"
    inputs = ("partials", *NUMBERS, *(FINISH if fused else ()))
    return _of_metal(body, inputs, ("work", "epilogue", "reduce"))


def _of_metal(
    body: str, inputs: tuple[str, ...], files: Sequence[str], atomic: bool = False
) -> Source:
    """Returns the text of a Metal kernel.

    Args:
        body: The file of its body.
        inputs: The buffers that it reads.
        files: The files of `lib` that it uses, in the order of their dependencies.
        atomic: Whether it adds to its output.
    """
    text = read(f"kernels/{body}.metal")
    return Source(
        name=f"marlin_{body}" + "_atomic" * atomic,
        input_names=inputs,
        output_names=("out",),
        header=header(files, text),
        source=compaction.stripped(text),
        atomic=atomic,
    )


def header(names: Sequence[str], body: str) -> str:
    """Returns what a body uses of files of `lib`, in a namespace.

    Metal's own headers may gain any name. The files themselves have no namespace,
    because those of CUDA include them inside one.

    Args:
        names: The files, without their suffix, in the order of their dependencies.
        body: Metal text that uses them.
    """
    text = compaction.lean([read(f"lib/{name}.metal") for name in names], body)
    return f"namespace marlin {{\n{text}}}\n"
