"""CUDA source of the kernels.

The source of a kernel is a body of `shaders/cuda`, preceded by declarations. Its header
includes files of `lib` after `cuda/prelude.cuh`, which maps Metal's names to CUDA.
"""

from functools import cache
from typing import NamedTuple

from mlx_marlin.backends import source
from mlx_marlin.backends.cuda.plan import CudaGatherPlan, CudaPlan
from mlx_marlin.backends.source import (
    EPILOGUE_INPUTS,
    EPILOGUE_OPERANDS,
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
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

ABSENT = {
    "biases": "const auto* biases = scales;\n",
    **{name: f"const T* {name} = nullptr;\n" for name in EPILOGUE_OPERANDS},
}
"""Declarations of arrays that a kernel does not read. An input array would cost MLX
0.3 us per call (measured, docs/lab)."""


class Declared(NamedTuple):
    """Declarations of an epilogue or of the access to rows, before a kernel's body."""

    suffix: str = ""  # Suffix of the kernel's name
    arrays: tuple[str, ...] = ()  # Arrays that the kernel may read for them
    numbers: tuple[str, ...] = ()  # Numbers of a plan that the kernel reads for them
    declaration: str = ""  # The declaration of `epilogue` or `rows`

    def combined(self, other: "Declared") -> "Declared":
        """Returns the declarations of both."""
        return Declared(
            self.suffix + other.suffix,
            self.arrays + other.arrays,
            self.numbers + other.numbers,
            self.declaration + other.declaration,
        )


NOTHING = Declared()
NO_SOURCES = Declared(declaration="const uint32_t* sources = nullptr;\n")
AS_IT_IS = Declared(declaration="const marlin::Plain epilogue{};\n")
NO_SECOND = Declared(
    declaration="const uint32_t* second = nullptr;\n"
    "const auto* second_scales = scales;\n"
)
BIASED = Declared(
    "_biased",
    EXPERT_BIASES[:1],
    declaration="const marlin::Biased<T> epilogue{expert_bias};\n",
)
FUSED = Declared(
    "_fused",
    EPILOGUE_OPERANDS,
    EPILOGUE_INPUTS[-1:],
    "const marlin::Epilogue<T, BIAS, ACTIVATION, MULTIPLY, RESIDUAL, PARTS> epilogue{\n"
    "    bias, multiplier, residual, parts};\n",
)
GATED = Declared(
    "_gated",
    declaration="const marlin::Paired<marlin::Gated<ACTIVATION>> epilogue{};\n",
)
GATED_BIASED = Declared(
    "_gated_biased",
    EXPERT_BIASES,
    declaration="using Biases = marlin::Biases<T>;\n"
    "const marlin::Paired<marlin::Gated<ACTIVATION, Biases>> epilogue{\n"
    "    {{expert_bias, second_bias}}};\n",
)
ROTATED = Declared(
    "_rotated",
    ("bias", *ROTATION),
    EPILOGUE_INPUTS[-1:],
    "using Heads = marlin::Rotated<T, BIAS, PARTS, FEATURES, ROTATED, EACH, FACTOR>;\n"
    "const marlin::Paired<Heads> epilogue{\n"
    "    {{bias, nullptr, nullptr, parts}, positions, freqs, {}}};\n",
)
ROTATED_NORMS = Declared(
    "_rotated_norms",
    ("bias", *ROTATION, *HEAD_NORMS),
    EPILOGUE_INPUTS[-1:],
    "using Norms = marlin::Normalized<T, HEAD_EPSILON, QUERIES, FEATURES>;\n"
    "using Heads =\n"
    "    marlin::Rotated<T, BIAS, PARTS, FEATURES, ROTATED, EACH, FACTOR, Norms>;\n"
    "const marlin::Paired<Heads> epilogue{\n"
    "    {{bias, nullptr, nullptr, parts}, positions, freqs, {q_norm, k_norm}}};\n",
)
PLAIN_ROWS = Declared(declaration="const auto rows = marlin::plain_rows(x);\n")
NORMED = Declared(
    "_normed",
    NORM,
    declaration="const auto rows = marlin::normed<EPSILON>(x, norm);\n",
)
"""The declarations of `rows` for "mma"; the other kernels read x directly."""


def declared_of_epilogue(epilogue: Epilogue) -> Declared:
    """Returns the declarations of the epilogue of a product."""
    if epilogue.gated:
        return GATED
    if epilogue.rotation is not None:
        return ROTATED if epilogue.rotation.norm is None else ROTATED_NORMS
    return AS_IT_IS if epilogue == PLAIN else FUSED


def declared_of_product(plan: Plan) -> Declared:
    """Returns the declarations of the epilogue and rows of a plan's first kernel."""
    declared = (
        AS_IT_IS if plan.is_split else declared_of_epilogue(plan.problem.epilogue)
    )
    if plan.kernel != "mma":
        return declared
    return declared.combined(PLAIN_ROWS if plan.problem.norm is None else NORMED)


def declared_of_experts(plan: CudaGatherPlan) -> Declared:
    """Returns the declarations of the epilogue and absent arrays of a gather plan."""
    if plan.gather.gate:
        declared = GATED_BIASED if plan.gather.bias else GATED
    else:
        declared = NO_SECOND.combined(BIASED if plan.gather.bias else AS_IT_IS)
    return declared.combined(NO_SOURCES) if plan.pairs_per_row else declared


SECTION = 7
"""Offset of the sections of CUDA's only array of numbers; the last may be longer."""


def of_product(plan: CudaPlan) -> Source:
    """Returns the source of a plan's first kernel.

    It contains the block size, which cannot be passed through MLX's signature.
    """
    file = "staged_decls" if plan.is_pipelined else "product_decls"
    header = f"#define THREADS {plan.threads}\n{_included(f'cuda/{file}.cuh')}"
    declared = declared_of_product(plan)
    return _of_cuda(plan.kernel, header, OPERANDS, NUMBERS, plan.problem, declared)


def gather_source(plan: CudaGatherPlan) -> Source:
    """Returns the source of the gather kernel, for products of experts."""
    header = f"#define THREADS {plan.threads}\n{_included('cuda/gather_decls.cuh')}"
    named = () if plan.pairs_per_row else ("sources",)
    second = SECOND if plan.gather.gate else ()
    operands = (*OPERANDS, *second, "experts", *named)
    declared = declared_of_experts(plan)
    return _of_cuda("gather", header, operands, NUMBERS[:1], plan.problem, declared)


ROUTING = {
    "route": (("logits",), ("experts", "scores")),
    "combine": (("results", "scores", "residual"), ("out",)),
}
"""Inputs and outputs of the kernels that precede and follow products of experts."""


@cache
def routing_source(body: str) -> Source:
    """Returns the source of the kernel "route" or "combine"."""
    inputs, outputs = ROUTING[body]
    return Source(
        name=f"marlin_{body}",
        input_names=inputs,
        output_names=outputs,
        header=_included("cuda/routing_decls.cuh"),
        source=read(f"cuda/{body}.cu"),
    )


def of_dequantize(problem: Problem) -> Source:
    """Returns the source of the kernel that decodes a block of a weight."""
    header = _included("cuda/dequantize_decls.cuh")
    return _of_cuda("dequantize", header, OPERANDS[1:], NUMBERS[:1], problem)


def of_reduce(plan: CudaPlan) -> Source:
    """Returns the source of the kernel that adds the splits of each tile."""
    header = _included("cuda/reduce_decls.cuh")
    declared = declared_of_epilogue(plan.problem.epilogue)
    return _of_cuda("reduce", header, ("partials",), NUMBERS, plan.problem, declared)


def _of_cuda(
    body: str,
    header: str,
    operands: tuple[str, ...],
    numbers: tuple[str, ...],
    problem: Problem,
    declared: Declared = NOTHING,
) -> Source:
    """Returns the source of a CUDA kernel, without inputs that it does not read.

    The body uses the names of all possible arrays and of the plan's numbers. The text
    before it declares absent arrays, the sections of the array of numbers, the epilogue
    and the access to rows of x. The outputs of `parts` are separate arrays.
    """
    arrays = (*operands, *declared.arrays)
    present = tuple(name for name in arrays if _is_read(name, problem))
    lines = [ABSENT[name] for name in arrays if name not in present]
    for i, name in enumerate((*numbers, *declared.numbers)):
        lines.append(f"const int* {name} = numbers + {SECTION * i};\n")
    lines.append(declared.declaration)
    parts = problem.epilogue.parts if declared.numbers else ()
    outputs = tuple(f"out{i}" for i in range(len(parts))) or ("out",)
    if parts:
        results = f"{{{{{', '.join(outputs)}}}, parts, shape[0]}}"
        lines.append(f"const marlin::SplitOutput<T, PARTS> out = {results};\n")
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
    # Packed biases are interleaved with the scales; a global scale replaces them.
    separate = problem.layout == "mlx" and problem.format.parameters > 1
    present = {
        "biases": separate or problem.global_scale,
        "bias": epilogue.bias,
        "multiplier": epilogue.multiply,
        "residual": epilogue.residual,
    }
    return present.get(name, True)


@cache
def _included(file: str) -> str:
    """Returns a header that includes a file of `shaders` instead of containing it.

    MLX copies and hashes a kernel's text in every call: 50 KB cost 20 us (measured,
    docs/lab). Compiled kernels are found by the text, so the header has a digest of all
    files that may be included.
    """
    path = (source.shader_folder() / file).as_posix()
    return f'// {source.digest_of_shaders()}\n#include "{path}"\n'
