"""Finds the Metal text of a plan's kernels and names their template arguments.

The files under `shaders/` are ordinary Metal; nothing is pasted into them. A kernel is
the body `kernels/NAME.metal` with the joined `lib` files as its header, configured by
template arguments alone.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlx_marlin.plan import Plan

TemplateValue = str | int | bool
"""A dtype's name, a number or a flag."""

LIB = ("work", "lane", "epilogue")
INPUTS = ("x", "w", "scales", "biases", "params")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text of one kernel, as `mx.fast.metal_kernel` takes it.

    Attributes:
        name: Of the kernel.
        input_names: Of the buffers that it reads, in order.
        output_names: Of the buffers that it writes, in order.
        header: Functions.
        source: The body.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str
    source: str


@cache
def shader_folder() -> Path:
    """Returns the folder of the shaders: of the installed package or the checkout."""
    package = Path(__file__).parent
    candidates = (package / "shaders", package.parent / "shaders")
    for folder in candidates:
        if (folder / "kernels").is_dir():
            return folder
    raise FileNotFoundError(f"no shaders in {candidates[0]} or {candidates[1]}")


@cache
def product_source(kernel: str) -> Source:
    """Returns the text of the kernel "gemv" or "gemm_register"."""
    return Source(
        name=f"marlin_{kernel}",
        input_names=INPUTS,
        output_names=("out",),
        header="\n".join(_read(f"lib/{name}") for name in (*LIB, kernel)),
        source=_read(f"kernels/{kernel}"),
    )


@cache
def reduce_source() -> Source:
    """Returns the text of the kernel that adds the slices of k."""
    return Source(
        name="marlin_reduce",
        input_names=("partials", "params"),
        output_names=("out",),
        header="",
        source=_read("kernels/reduce"),
    )


def product_template(plan: Plan) -> dict[str, TemplateValue]:
    """Returns the template arguments of a plan's first kernel."""
    problem = plan.problem
    shared: dict[str, TemplateValue] = {
        "SIMDGROUPS_K": plan.simdgroups_k,
        "GROUP": problem.group_size,
        "PACKED": problem.layout == "marlin",
        "SUBTRACT": plan.subtract,
    }
    if plan.kernel == "gemv":
        return {"ROWS": plan.tile.m, **shared}
    return {
        "FRAGMENTS_M": plan.fragments_m,
        "SIMDGROUPS_M": plan.simdgroups_m,
        **shared,
        "WIDEN": problem.dtype != "float16",
    }


def reduce_template(plan: Plan) -> dict[str, TemplateValue]:
    """Returns the template arguments of the reduce that follows a split plan."""
    return {"T": plan.problem.dtype}


def params(plan: Plan) -> tuple[int, ...]:
    """Returns what `read_work` in `lib/work.metal` reads: fewer than eight int32.

    MLX hands over an input of fewer than eight elements in Metal's `constant` address
    space, where a value that all threads share belongs.
    """
    problem = plan.problem
    by_ceil = int(plan.partition == "ceil")
    return problem.m, problem.n, problem.k, plan.k_parallel, by_ceil


def _read(name: str) -> str:
    return (shader_folder() / f"{name}.metal").read_text(encoding="ascii")
