"""Fusions of traced blocks whose kernels run on Metal, here in the emulator."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_marlin import guard
from mlx_marlin.backends import graph
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RoutePlan,
)
from mlx_marlin.planning.gather_plan import GatherPlan
from support.decoder_models import (
    ALL_CACHES,
    Caches,
    assert_close,
    assert_equal,
    decoded,
    many_streams,
    one_stream,
    tiny,
    traced,
)
from support.profiles import sampled
from support.trace_mode import needs_kernels

pytestmark = needs_kernels

NAMES = {
    HeadsPlan: "rotate_heads",
    AddNormPlan: "add_norm",
    RoutePlan: "route",
    CombinePlan: "combine",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that were launched."""
    found: set[str] = set()
    own = graph.call

    def listed(plan: Any) -> Callable[..., Any]:
        found.add(NAMES[type(plan)])
        return own(plan)

    monkeypatch.setattr(graph, "call", listed)
    return found


CASES = {
    "llama": {"rotate_heads", "add_norm"},
    "qwen3": {"rotate_heads", "add_norm"},
    "qwen3_moe": {"rotate_heads", "add_norm", "route", "combine"},
    "mixtral": {"rotate_heads", "add_norm", "route", "combine"},
    "olmo2": set(),  # norms of all heads together, and of results
    "glm": {"add_norm"},  # rotates half of each head
}


@sampled(1, 4)
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(
    "make", [*ALL_CACHES, many_streams], ids=lambda make: make.__name__
)
def test_a_model_answers_as_mlx_lms(
    family: str, make: Callable[[nn.Module], Caches], launched: set[str]
) -> None:
    model = traced(tiny(family), join=True, fuse=("rope", "add_norm", "experts"))
    outputs = decoded(model, make, prompt=3)
    assert_close(outputs, decoded(tiny(family), make, prompt=3), 2e-4)
    assert launched == CASES[family]


@sampled(1)
@pytest.mark.parametrize(
    ("family", "gate"),
    [("qwen3_moe", "silu"), ("mixtral", "silu"), ("gpt_oss", "swiglu_oai")],
)
def test_packed_experts_gate_in_one_launch(
    family: str, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[GatherPlan] = []
    own = graph.gather_product

    def listed(plan: GatherPlan) -> Callable[..., mx.array]:
        plans.append(plan)
        return own(plan)

    monkeypatch.setattr(graph, "gather_product", listed)
    expected = decoded(tiny(family), one_stream, prompt=3)

    model = traced(tiny(family), layout="marlin", join=True, fuse=("experts",))
    outputs = decoded(model, one_stream, prompt=3)

    assert_close(outputs, expected, 5e-4)
    assert {plan.gather.gate for plan in plans} == {gate, None}
    assert {plan.gather.bias for plan in plans} == {family == "gpt_oss"}


def one_token(model: nn.Module) -> mx.array:
    y: mx.array = model(mx.array([[3]]), cache=one_stream(model))
    mx.eval(y)
    return y


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"fuse": ()}),
        ("qwen3_moe", {"fuse": ("residual",)}),
        ("qwen3_moe", {"fuse": ("gate", "norm")}),
        ("qwen3_moe", {"fuse": (*FUSIONS,), "invariant": True}),
        # The sum stays in the product that takes it.
        ("llama", {"fuse": ("residual", "add_norm")}),
    ],
    ids=str,
)
def test_no_kernel_runs_that_is_not_asked_for(
    family: str, options: dict[str, Any], launched: set[str]
) -> None:
    one_token(traced(tiny(family), join=True, **options))
    assert not launched


@sampled(3)
@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize("fuse", [(), ("experts",), ("gate",)], ids=str)
def test_a_shared_expert_is_fused_on_request(
    fuse: tuple[str, ...], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def gated(layer: MarlinLinear, x: mx.array) -> mx.array:
        seen.append(True)
        gate, up = layer.halves(x)
        return nn.silu(gate) * up

    monkeypatch.setattr(MarlinLinear, "gated", gated)
    model = traced(tiny(family), join=True, fuse=fuse)
    assert_close([one_token(model)], [one_token(tiny(family))], 2e-4)
    assert bool(seen) == ("gate" in fuse)


def test_a_kernel_that_failed_its_check_is_not_used(
    launched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "remembered_fault", lambda _: "it failed")
    fuse = ("rope", "add_norm", "experts")
    y = one_token(traced(tiny("qwen3_moe"), join=True, fuse=fuse))
    assert not launched
    assert_equal([y], [one_token(traced(tiny("qwen3_moe"), join=True, fuse=()))])


@pytest.mark.usefixtures("as_on_metal")
def test_blocks_have_the_gradients_of_mlx(launched: set[str]) -> None:
    fuse = ("rope", "add_norm", "experts")
    model = traced(tiny("qwen3_moe"), join=True, fuse=fuse)
    x = mx.random.normal((2, 1, 128), key=mx.random.key(1))

    def gradient(model: nn.Module) -> mx.array:
        block, cache = model.layers[0], one_stream(model)[0]
        return mx.grad(lambda x: (block(x, None, cache) ** 2).sum())(x)

    expected = gradient(tiny("qwen3_moe"))
    assert mx.allclose(gradient(model), expected, rtol=1e-3, atol=1e-3)
    assert "rotate_heads" in launched
