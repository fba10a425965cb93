"""Launches the kernels for experts: their products, their choice and the final sum.

It decides nothing.
"""

from collections.abc import Callable
from math import gcd, prod

import mlx.core as mx

from mlx_marlin.backends import kernels, registry, selection, source
from mlx_marlin.backends.base import KernelCall
from mlx_marlin.backends.kernels import readable
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.weights import dtypes

STAND_INS = {
    "second": "w",
    "second_scales": "scales",
    "expert_bias": "x",
    "second_bias": "x",
    "sources": "experts",
}
"""Arrays of the same types as operands that a product does not have."""
MAX_COMBINE_THREADS = 128
"""Limit of the threads of a block: a few short rows then fill many multiprocessors."""


def gather_product(plan: GatherPlan) -> Callable[..., mx.array]:
    """Builds the call that multiplies rows by the experts that they chose.

    Returns:
        A function from x [..., k] in the problem's dtype, codes, scales and biases
        [experts, n, ...] to y [..., 1, n] in the problem's dtype. After the biases it
        takes, in this order:

        - codes and scales of the second weights, if the problem has a gate;
        - the bias [experts, n] of each weight, if the problem has biases;
        - the expert of each pair, uint32 [...], whose shape y begins with;
        - the row of x of each pair (uint32), if the plan has no `pairs_per_row`.
    """
    problem, gather = plan.problem, plan.gather
    backend = registry.of_plan(plan)
    text = backend.gather.source(plan)
    kernel = backend.kernel(text, plan.threadgroup_bytes)
    template = kernels.template(backend.gather.template(plan))
    sizes = mx.array((problem.m, problem.n, problem.k, plan.pairs_per_row), mx.int32)
    second = source.SECOND if gather.gate else ()
    biases = source.EXPERT_BIASES[: 2 if gather.gate else 1] if gather.bias else ()
    weights = (*source.OPERANDS, *second, *biases)
    names = (*weights, "experts", *(() if plan.pairs_per_row else ("sources",)))
    numbers = {"shape": sizes, "numbers": sizes}
    inputs = kernels.inputs_of(text, names, numbers, STAND_INS)
    grid = (plan.num_threadgroups * plan.threads, 1, 1)
    threadgroup = (plan.threads, 1, 1)
    dtype = dtypes.dtype(problem.dtype)

    def multiply(*arrays: mx.array) -> mx.array:
        experts = arrays[len(weights)]
        return kernel(
            inputs=inputs(*map(readable, arrays)),
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=((*experts.shape, 1, problem.n),),
            output_dtypes=(dtype,),
        )[0]

    return multiply


def route(
    logits: mx.array, choices: int, of_all: bool, last: bool
) -> tuple[mx.array, mx.array]:
    """Launches the kernel that chooses experts.

    Args:
        logits: Logits of each row [..., experts].
        choices: Experts of a row.
        of_all: Whether scores are the softmax over all experts, not over the chosen.
        last: Whether the last of equal logits are chosen, not the first.

    Returns:
        Indices, uint32 [..., choices], and scores in float32.
    """
    *rows, experts = logits.shape
    shape = (*rows, choices)
    chosen, scores = _routing_kernel("route")(
        inputs=(readable(logits),),
        template=(
            ("T", logits.dtype),
            ("EXPERTS", experts),
            ("EACH", choices),
            ("OF_ALL", of_all),
            ("LAST", last),
        ),
        grid=(prod(rows) * SIMD_WIDTH, 1, 1),
        threadgroup=(SIMD_WIDTH, 1, 1),
        output_shapes=(shape, shape),
        output_dtypes=(mx.uint32, mx.float32),
    )
    return chosen, scores


def combine(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Launches the kernel that adds weighted results of experts to a residual.

    Args:
        results: Results of each row's choices [..., choices, 1, n].
        scores: Scores in float32 [..., choices].
        residual: Summands [..., n], in the dtype of `results`.

    Returns:
        The sums [..., n].
    """
    *_, choices, _, n = results.shape
    threads = gcd(residual.size, MAX_COMBINE_THREADS)
    (total,) = _routing_kernel("combine")(
        inputs=(results, scores, residual),
        template=(("T", results.dtype), ("N", n), ("EACH", choices)),
        grid=(residual.size, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=(residual.shape,),
        output_dtypes=(results.dtype,),
    )
    return total


def routing_source(kernel: str) -> source.Source:
    """Returns the text of the active back end's kernel "route" or "combine".

    Raises:
        ValueError: If the back end has no such kernels.
    """
    backend = selection.active()
    if backend.routing is None:
        raise ValueError(f"the back end {backend.name!r} has no kernel {kernel!r}")
    return backend.routing.source(kernel)


def _routing_kernel(kernel: str) -> KernelCall:
    return selection.active().kernel(routing_source(kernel), 0)
