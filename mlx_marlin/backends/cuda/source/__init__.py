"""Finds the CUDA text of a plan's kernels.

A kernel is a body of `shaders/cuda`, which includes files of `lib` behind
`cuda/prelude.cuh`, where Metal's words are said in CUDA.
"""

import hashlib
from functools import cache
from pathlib import Path

from mlx_marlin.backends import source
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.backends.cuda.source import declarations
from mlx_marlin.backends.source import NUMBERS, OPERANDS, SECOND, Source, read
from mlx_marlin.planning.problem import Problem

SECTION = 7
"""Numbers of each but the last of those, where CUDA has all of them in one array."""


def of_product(plan: CudaPlan) -> Source:
    """Returns the text of the CUDA kernel of a plan, which has a block's size in it.

    MLX has no place for that in the signature.
    """
    leaning = "staged_product" if plan.is_pipelined else "product"
    header = f"#define THREADS {plan.threads}\n{_included(f'cuda/{leaning}.cuh')}"
    declared = declarations.of_product(plan)
    return _of_cuda(plan.kernel, header, OPERANDS, NUMBERS, plan.problem, declared)


def gather_source(plan: CudaGatherPlan) -> Source:
    """Returns the text of the CUDA kernel for experts' products."""
    header = f"#define THREADS {plan.threads}\n{_included('cuda/gathered.cuh')}"
    named = () if plan.pairs_per_row else ("sources",)
    second = SECOND if plan.gather.gate else ()
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
    inputs, outputs = ROUTING[body]
    return Source(
        name=f"marlin_{body}",
        input_names=inputs,
        output_names=outputs,
        header=_included("cuda/routing.cuh"),
        source=read(f"cuda/{body}.cu"),
    )


def of_dense(problem: Problem) -> Source:
    """Returns the text of the CUDA kernel that decodes a block of a weight."""
    header = _included("cuda/decoding.cuh")
    return _of_cuda("dequantize", header, OPERANDS[1:], NUMBERS[:1], problem)


def of_reduce(plan: CudaPlan) -> Source:
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
    present = tuple(name for name in arrays if _is_read(name, problem))
    lines = [declarations.ABSENT[name] for name in arrays if name not in present]
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
        input_names=(*present, "numbers"),
        output_names=outputs,
        header=header,
        source="".join(lines) + read(f"cuda/{body}.cu"),
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
    files = [
        *sorted(source.shader_folder().glob("lib/*")),
        *sorted(_cuda_folder().iterdir()),
    ]
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.read_bytes())
    path = (source.shader_folder() / file).as_posix()
    return f'// {digest.hexdigest()[:16]}\n#include "{path}"\n'


def _cuda_folder() -> Path:
    return source.shader_folder() / "cuda"
