"""Finds the Metal or CUDA text of a plan's kernels.

The files under `shaders/` are ordinary Metal; nothing is pasted into them. A kernel is
the body `kernels/NAME.metal` with what it uses of the `lib` files as its header,
configured by template arguments alone. Both are stripped
(`shader_text`). Those of CUDA stand in `cuda/` and include `lib` files, behind
`cuda/prelude.cuh`, which says Metal's words in CUDA.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlx_marlin.backends.cuda import declarations
from mlx_marlin.backends.cuda.experts_plan import CudaGatherPlan
from mlx_marlin.backends.metal import shader_text
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

OPERANDS = ("x", "w", "scales", "biases")
NUMBERS = ("shape", "schedule")
SECTION = 7
"""Numbers of each but the last of those, where CUDA has all of them in one array."""
WEIGHT = ("work", "decode", "words", "values", "lane")
"""The files of `lib` that read a weight, each leaning on those before it."""
LEANING = {"gemm_staged": ("gemm_register", "staging")}
"""Further files that a kernel's own leans on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text of one kernel, as `mx.fast.metal_kernel` or `cuda_kernel` takes it.

    Attributes:
        name: Of the kernel.
        input_names: Of the buffers that it reads, in order.
        output_names: Of the buffers that it writes, in order.
        header: Functions.
        source: The body.
        atomic: Whether it adds to its output instead of writing it.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str
    source: str
    atomic: bool = False


@cache
def shader_folder() -> Path:
    """Returns the folder of the shaders: of the installed package or the checkout."""
    package = Path(__file__).parents[1]
    candidates = (package / "shaders", package.parent / "shaders")
    for folder in candidates:
        if (folder / "kernels").is_dir():
            return folder
    raise FileNotFoundError(f"no shaders in {candidates[0]} or {candidates[1]}")


def of_product(plan: Plan) -> Source:
    """Returns the text of a plan's first kernel."""
    if plan.on_cuda:
        return cuda_product_source(plan)
    fused = plan.problem.epilogue != PLAIN and not plan.is_split
    return product_source(plan.kernel, fused, plan.reduction == "atomic")


def of_reduce(plan: Plan) -> Source:
    """Returns the text of the kernel that adds a plan's splits."""
    if plan.on_cuda:
        return sums_source(plan)
    return reduce_source(plan.problem.epilogue != PLAIN)


def of_dense(problem: Problem, on_cuda: bool) -> Source:
    """Returns the text of the kernel that decodes a block of a weight."""
    return decoding_source(problem) if on_cuda else dequantize_source()


@cache
def product_source(kernel: str, fused: bool = False, atomic: bool = False) -> Source:
    """Returns the text of the kernel "gemv", "gemm_register" or "gemm_staged".

    Args:
        kernel: Its name.
        fused: Whether it applies an epilogue, for which it reads four arrays more.
        atomic: Whether it adds to its output.
    """
    body = f"{kernel}_fused" if fused else kernel
    inputs = (*OPERANDS, *NUMBERS, *(declarations.FINISH if fused else ()))
    files = (*WEIGHT, "epilogue", *LEANING.get(kernel, ()), kernel)
    return _of_metal(body, inputs, files, atomic)


def cuda_product_source(plan: Plan) -> Source:
    """Returns the text of the CUDA kernel of a plan, which has a block's size in it.

    MLX has no place for that in the signature.
    """
    leaning = "staged_product" if plan.has_staged_x else "product"
    header = f"#define THREADS {plan.threads}\n{_included(f'cuda/{leaning}.cuh')}"
    declared = declarations.of_product(plan)
    return _of_cuda(plan.kernel, header, OPERANDS, NUMBERS, plan.problem, declared)


@cache
def gather_source() -> Source:
    """Returns the text of the kernel for experts' products."""
    inputs = (*OPERANDS, "sources", "experts", "shape")
    files = (*WEIGHT, "epilogue", "gemm_register", "gemv", "gather")
    return _of_metal("gather", inputs, files)


def cuda_gather_source(plan: CudaGatherPlan) -> Source:
    """Returns the text of the CUDA kernel for experts' products."""
    header = f"#define THREADS {plan.threads}\n{_included('cuda/gathered.cuh')}"
    named = () if plan.each else ("sources",)
    second = declarations.SECOND if plan.gate else ()
    operands = (*OPERANDS, *second, "experts", *named)
    declared = declarations.of_experts(plan)
    return _of_cuda("gather", header, operands, NUMBERS[:1], plan.problem, declared)


ROUTING = {
    "route": (("logits",), ("experts", "scores")),
    "combine": (("results", "scores", "residual"), ("out",)),
}
"""What the kernels around experts' products read and write."""


@cache
def routing_source(body: str) -> Source:
    """Returns the text of the CUDA kernel "route" or "combine"."""
    read, written = ROUTING[body]
    return Source(
        name=f"marlin_{body}",
        input_names=read,
        output_names=written,
        header=_included("cuda/routing.cuh"),
        source=_read(f"cuda/{body}.cu"),
    )


@cache
def dequantize_source() -> Source:
    """Returns the text of the kernel that decodes a block of a weight."""
    inputs = (*OPERANDS[1:], "shape")
    return _of_metal("dequantize", inputs, (*WEIGHT, "dequantize"))


def decoding_source(problem: Problem) -> Source:
    """Returns the text of the CUDA kernel that decodes a block of a weight."""
    header = _included("cuda/decoding.cuh")
    return _of_cuda("dequantize", header, OPERANDS[1:], NUMBERS[:1], problem)


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
    inputs = ("partials", *NUMBERS, *(declarations.FINISH if fused else ()))
    return _of_metal(body, inputs, ("work", "epilogue", "reduce"))


def sums_source(plan: Plan) -> Source:
    """Returns the text of the CUDA kernel that adds the splits of each tile."""
    header = _included("cuda/sums.cuh")
    declared = declarations.of_epilogue(plan.problem.epilogue)
    return _of_cuda("reduce", header, ("partials",), NUMBERS, plan.problem, declared)


def _of_cuda(
    body: str,
    header: str,
    operands: tuple[str, ...],
    numbers: tuple[str, ...],
    problem: Problem,
    declared: declarations.Declared = declarations.NOTHING,
) -> Source:
    """Returns the text of a CUDA kernel, which has no input that it does not read.

    The body names all arrays that there may be, and a plan's numbers as Metal has them.
    Before it stands what takes the place of arrays that it does not read, where in one
    array the numbers lie, the epilogue and the rows. Parts are arrays of their own, in
    one object.
    """
    arrays = (*operands, *declared.arrays)
    read = tuple(name for name in arrays if _is_read(name, problem))
    lines = [declarations.ABSENT[name] for name in arrays if name not in read]
    for i, name in enumerate((*numbers, *declared.numbers)):
        lines.append(f"const int* {name} = numbers + {SECTION * i};\n")
    lines.append(declared.declaration)
    several = problem.epilogue.parts if declared.numbers else ()
    outputs = tuple(f"out{i}" for i in range(len(several))) or ("out",)
    if several:
        results = f"{{{{{', '.join(outputs)}}}, parts, shape[0]}}"
        lines.append(f"const marlin::Apart<T, PARTS> out = {results};\n")
    return Source(
        name=f"marlin_{body}{declared.suffix}",
        input_names=(*read, "numbers"),
        output_names=outputs,
        header=header,
        source="".join(lines) + _read(f"cuda/{body}.cu"),
    )


def _is_read(name: str, problem: Problem) -> bool:
    """Returns whether a CUDA kernel reads an array that its body names."""
    epilogue = problem.epilogue
    # Packed, biases lie between the scales; a global scale stands in their place.
    apart = problem.layout == "mlx" and problem.format.parameters > 1
    there = {
        "biases": apart or problem.global_scale,
        "bias": epilogue.bias,
        "multiplier": epilogue.multiply,
        "residual": epilogue.residual,
    }
    return there.get(name, True)


@cache
def _included(file: str) -> str:
    """Returns a header that names a file of CUDA instead of holding its text.

    MLX copies and hashes a kernel's text in every call: 50 KB cost 20 us (measured,
    docs/lab). What it compiled it finds by that hash, also on disk, so the name
    comes with a digest of all that the file may include.
    """
    files = [*sorted(shader_folder().glob("lib/*")), *sorted(_cuda_folder().iterdir())]
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.read_bytes())
    path = (shader_folder() / file).as_posix()
    return f'// {digest.hexdigest()[:16]}\n#include "{path}"\n'


def _cuda_folder() -> Path:
    return shader_folder() / "cuda"


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
    text = _read(f"kernels/{body}.metal")
    return Source(
        name=f"marlin_{body}" + "_atomic" * atomic,
        input_names=inputs,
        output_names=("out",),
        header=header(files, text),
        source=shader_text.stripped(text),
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
    text = shader_text.lean([_read(f"lib/{name}.metal") for name in names], body)
    return f"namespace marlin {{\n{text}}}\n"


def _read(file: str) -> str:
    return (shader_folder() / file).read_text(encoding="ascii")
