"""Declarations before the body of a CUDA kernel: epilogue, rows and absent arrays.

The body of a kernel is the same for all plans. What it calls `epilogue`, `rows`, and
the arrays that a kernel does not read are declared before it.
"""

from typing import NamedTuple

from mlx_marlin.backends.cuda.plan import CudaGatherPlan
from mlx_marlin.backends.source import (
    EPILOGUE_INPUTS,
    EPILOGUE_OPERANDS,
    EXPERT_BIASES,
    HEAD_NORMS,
    NORM,
    ROTATION,
)
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan

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


def of_epilogue(epilogue: Epilogue) -> Declared:
    """Returns the declarations of the epilogue of a product."""
    if epilogue.gated:
        return GATED
    if epilogue.rotation is not None:
        return ROTATED if epilogue.rotation.norm is None else ROTATED_NORMS
    return AS_IT_IS if epilogue == PLAIN else FUSED


def of_product(plan: Plan) -> Declared:
    """Returns the declarations of the epilogue and rows of a plan's first kernel."""
    declared = AS_IT_IS if plan.is_split else of_epilogue(plan.problem.epilogue)
    if plan.kernel != "mma":
        return declared
    return declared.combined(PLAIN_ROWS if plan.problem.norm is None else NORMED)


def of_experts(plan: CudaGatherPlan) -> Declared:
    """Returns the declarations of the epilogue and absent arrays of a gather plan."""
    if plan.gather.gate:
        declared = GATED_BIASED if plan.gather.bias else GATED
    else:
        declared = NO_SECOND.combined(BIASED if plan.gather.bias else AS_IT_IS)
    return declared.combined(NO_SOURCES) if plan.pairs_per_row else declared
