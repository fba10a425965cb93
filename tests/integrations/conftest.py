"""Stand-ins for kernels that traced blocks launch, and lists of what ran."""

from collections.abc import Callable
from itertools import compress
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU

from mlx_marlin import state
from mlx_marlin.backends import graph
from mlx_marlin.backends.cuda.plan import CudaGatherPlan
from mlx_marlin.lm.tracing import fusion
from mlx_marlin.lm.tracing.experts import stock_sum
from mlx_marlin.lm.tracing.model_families import Routing
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import unpack
from mlx_marlin.products.reference.epilogue import with_epilogue, with_norm
from mlx_marlin.products.reference.weight import plain
from mlx_marlin.weights.packed_weight import PackedWeight
from support.choose import Choose
from support.cuda_experts import choice_of_mlx


@pytest.fixture
def gathered() -> list[CudaGatherPlan]:
    """The plans of experts' products, in call order."""
    return []


@pytest.fixture
def choices() -> list[Routing]:
    """The routing rules of the routing kernel's calls, in order."""
    return []


@pytest.fixture
def cuda(
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    gathered: list[CudaGatherPlan],
    choices: list[Routing],
) -> list[Plan]:
    """Replaces CUDA's kernels by MLX operations, and lists their plans.

    The operations can be traced, and round once.
    """
    plans: list[Plan] = []

    def decoded(problem: Problem, w: mx.array, scales: mx.array) -> mx.array:
        sizes = {"n": problem.n, "k": problem.k, "group_size": problem.group_size}
        return plain(PackedWeight(words=w, scales=scales, **sizes), mx.float32)

    def dequantized_product(plan: DequantizePlan) -> graph.Product:
        def run(x: mx.array, w: mx.array, scales: mx.array, _: mx.array) -> mx.array:
            y = x.astype(mx.float32) @ decoded(plan.problem, w, scales)
            return y.astype(x.dtype)

        assert not plan.transposed
        return run

    def product(plan: Plan) -> graph.Product:
        problem, epilogue = plan.problem, plan.problem.epilogue

        def wide(x: mx.array, w: mx.array, scales: mx.array, _: mx.array) -> mx.array:
            return x.astype(mx.float32) @ decoded(problem, w, scales).T

        finished = with_epilogue(wide, epilogue)
        if problem.norm is not None:
            finished = with_norm(finished, problem.norm)

        def run(x: mx.array, *given: mx.array) -> Any:
            plans.append(plan)
            weight, operands, others = given[:3], given[3:6], given[6:]
            given_operands = epilogue.bias, epilogue.multiply, epilogue.residual
            y = finished(x, *weight, *compress(operands, given_operands), *others)
            # To MLX a kernel is opaque.
            return tree_map(lambda each: mx.stop_gradient(each.astype(x.dtype)), y)

        return run

    def of_experts(plan: CudaGatherPlan) -> graph.Product:
        gathered.append(plan)
        problem = plan.problem
        sizes = {"n": problem.n, "k": problem.k, "group_size": problem.group_size}

        def times(
            x: mx.array,
            experts: mx.array,
            w: mx.array,
            scales: mx.array,
            bias: mx.array | None = None,
        ) -> mx.array:
            native = unpack(PackedWeight(words=w, scales=scales, **sizes))
            weights = mx.dequantize(*native, group_size=problem.group_size)
            rows = mx.repeat(x.reshape(-1, problem.k), plan.pairs_per_row, axis=0)
            chosen = weights[experts.flatten()].astype(mx.float32)
            y = rows[:, None].astype(mx.float32) @ chosen.swapaxes(1, 2)
            return y if bias is None else y + bias[experts.flatten(), None]

        def run(
            x: mx.array, w: mx.array, scales: mx.array, _: mx.array, *given: mx.array
        ) -> mx.array:
            *others, experts = given
            second = others[: 2 if plan.gather.gate else 0]
            biases = others[len(second) :]
            y = times(x, experts, w, scales, *biases[:1])
            if plan.gather.gate:
                activation = SwiGLU() if plan.gather.gate == "silu" else SwigluOAI()
                y = activation(times(x, experts, *second, *biases[1:]), y)
            y = mx.stop_gradient(y.astype(x.dtype))
            return y.reshape(*experts.shape, 1, problem.n)

        return run

    def call(plan: RoutePlan | CombinePlan) -> Callable[..., Any]:
        if isinstance(plan, CombinePlan):
            return lambda *given: mx.stop_gradient(stock_sum(*given))
        how = plan.choices, plan.of_all, plan.last

        def route(logits: mx.array) -> tuple[mx.array, ...]:
            choices.append(Routing(*how))
            return tuple(map(mx.stop_gradient, choice_of_mlx(logits, *how)))

        return route

    backend("cuda")
    monkeypatch.setattr(graph, "gather_product", of_experts)
    monkeypatch.setattr(graph, "call", call)
    monkeypatch.setattr(graph, "product", product)
    monkeypatch.setattr(graph, "dequantized_product", dequantized_product)
    return plans


@pytest.fixture
def as_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses `freqs` in MLX's rope.

    On a GPU it has derivatives of x alone, and raises for its `freqs`.
    """
    own = mx.fast.rope

    def rope(*arguments: Any, freqs: Any = None, **options: Any) -> mx.array:
        assert freqs is None
        return own(*arguments, **options)

    monkeypatch.setattr(mx.fast, "rope", rope)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists Python's runs of the code of graphs: one for each trace."""
    found: list[str] = []

    def listed(name: str) -> None:
        own = getattr(fusion, name)

        def region(*arguments: Any) -> Any:
            found.append(name)
            return own(*arguments)

        monkeypatch.setattr(fusion, name, region)

    listed("_before")
    listed("_after")
    state.reset()
    return found
