"""Runs plans of experts' products, and what stands around them: calls their kernels.

It decides nothing.
"""

from collections.abc import Callable
from math import gcd, prod

import mlx.core as mx

from mlx_marlin.backends import kernels
from mlx_marlin.backends.cuda import arguments as cuda_arguments
from mlx_marlin.backends.cuda import source as cuda_source
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.cuda.source import declarations
from mlx_marlin.backends.kernels import lazily, readable
from mlx_marlin.backends.metal import arguments, source
from mlx_marlin.backends.metal.experts.plan import GatherPlan
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.weights import dtypes

COMBINING_THREADS = 128
"""At most, of a block: a few rows of few columns fill many multiprocessors so."""


def gather_product(plan: GatherPlan) -> Callable[..., mx.array]:
    """Builds the call that multiplies rows by the experts that they chose.

    Returns:
        A function from x [rows, k] in the problem's dtype, codes, scales and biases
        [experts, n, ...], the row of x and the expert of each pair (uint32 [pairs]) to
        y [pairs, n] in the problem's dtype.
    """
    problem = plan.problem
    kernel = kernels.kernel(source.gather_source())
    template = kernels.template(arguments.gather_template(plan))
    shape = mx.array((problem.m, problem.n, problem.k), mx.int32)
    grid = (plan.num_threadgroups * plan.threads, 1, 1)

    def multiply(*arrays: mx.array) -> mx.array:
        return kernel(
            inputs=(*map(readable, arrays), shape),
            template=template,
            grid=grid,
            threadgroup=(plan.threads, 1, 1),
            output_shapes=((problem.m, problem.n),),
            output_dtypes=(dtypes.dtype(problem.dtype),),
        )[0]

    return multiply


def cuda_gather_product(plan: CudaGatherPlan) -> Callable[..., mx.array]:
    """Builds the call that does so on a CUDA device.

    Returns:
        A function from x [..., k] in the problem's dtype, codes, scales and biases
        [experts, n, ...], codes and scales of the second weights if one product gates
        the other, a bias [experts, n] for each weight if they have one, the expert of
        each pair (uint32 [...]) and, if the plan asks for it, the row of x of each pair
        (uint32), to y [..., 1, n] in the problem's dtype: before its last two
        dimensions it is shaped as the experts of pairs.
    """
    problem = plan.problem
    text = cuda_source.cuda_gather_source(plan)
    kernel = lazily(text, plan.threadgroup_bytes)
    template = kernels.template(cuda_arguments.cuda_gather_template(plan))
    numbers = {"numbers": mx.array((problem.m, problem.n, problem.k), mx.int32)}
    biases = declarations.EXPERT_BIASES if plan.gate else declarations.EXPERT_BIASES[:1]
    second = declarations.SECOND if plan.gate else ()
    weights = (*source.OPERANDS, *second, *(biases if plan.bias else ()))
    names = (*weights, "experts", "sources")
    inputs = kernels.inputs_of(text, names, numbers)
    dtype = dtypes.dtype(problem.dtype)

    def multiply(*arrays: mx.array) -> mx.array:
        experts = arrays[len(weights)]
        return kernel(
            inputs=inputs(*arrays),
            template=template,
            grid=(plan.num_threadgroups * plan.threads, 1, 1),
            threadgroup=(plan.threads, 1, 1),
            output_shapes=((*experts.shape, 1, problem.n),),
            output_dtypes=(dtype,),
        )[0]

    return multiply


def route(
    logits: mx.array, choices: int, of_all: bool, last: bool
) -> tuple[mx.array, mx.array]:
    """Calls the CUDA kernel that chooses experts.

    Args:
        logits: Of each row [..., experts].
        choices: Experts of a row.
        of_all: Whether scores are the softmax over all experts, not over the chosen.
        last: Whether of equal logits the last are chosen, not the first.

    Returns:
        Indices, uint32 [..., choices], and scores in float32.
    """
    *rows, experts = logits.shape
    shape = (*rows, choices)
    chosen, scores = _routing("route")(
        inputs=(logits,),
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
    """Calls the CUDA kernel that adds experts' results, times their scores.

    Args:
        results: Of each row's choices [..., choices, 1, n].
        scores: In float32 [..., choices].
        residual: Summands [..., n], in the dtype of `results`.

    Returns:
        The sums [..., n].
    """
    *_, choices, _, n = results.shape
    threads = gcd(residual.size, COMBINING_THREADS)
    (total,) = _routing("combine")(
        inputs=(results, scores, residual),
        template=(("T", results.dtype), ("N", n), ("EACH", choices)),
        grid=(residual.size, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=(residual.shape,),
        output_dtypes=(results.dtype,),
    )
    return total


def _routing(body: str) -> kernels.KernelCall:
    return lazily(cuda_source.routing_source(body), 0)
