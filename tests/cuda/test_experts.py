"""Products of experts on CUDA: kernels on the CPU, plans, calls and layers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchLinear

import mlx_marlin
from mlx_marlin.backends import graph, planner
from mlx_marlin.backends.cuda.plan import CudaGatherPlan
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.lm.tracing.experts import GatedExperts
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import dispatch, serving
from mlx_marlin.products.packing import pack
from mlx_marlin.weights.formats import TILE_N
from support import cuda_cases, cuda_experts, format_cases, oracles
from support.choose import Choose
from support.gather_calls import Call, kind
from support.oracles import exact
from support.profiles import sampled

H200 = cuda_cases.h200()
AFFINE = ("affine", 4, 64)
LONG = {"x_shape": (5, 1, 1, 1024), "n": 2**20, "k": 1024, "experts": 16}
UNEVEN = [*cuda_experts.UNEVEN]


def assert_right(y: mx.array, call: Call) -> None:
    rows = exact(call.x)[call.sources, 0]
    expected = np.einsum("pk,pnk->pn", rows, call.decoded[call.chosen])
    assert y.shape == (len(call.chosen), 1, call.n)
    assert oracles.error(y.squeeze(1), expected) < oracles.TOLERANCES[call.dtype]


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("form", "layout", "dtype", "chosen"),
    [
        (AFFINE, "marlin", "float16", UNEVEN),  # blocks of experts
        (AFFINE, "marlin", "float16", [4]),  # of pairs
        (AFFINE, "mlx", "bfloat16", [2, 5, 2]),
        (("mxfp4", 4, 32), "marlin", "bfloat16", UNEVEN),
        (("affine", 3, 32), "marlin", "float16", [1, 1, 0]),
        (("symmetric", 8, 128), "marlin", "float16", [5, 4, 5, 5]),
        (("nvfp4", 4, 16), "mlx", "float16", [0, 5]),
    ],
    ids=str,
)
def test_every_pair_is_the_product_that_it_names(
    form: tuple[str, int, int], layout: str, dtype: str, chosen: list[int]
) -> None:
    call = Call(form, layout, 6, 70, 256, 5, chosen, dtype, seed=1)
    y = call.run()
    assert_right(y, call)
    assert mx.array_equal(y, call.run())


@sampled(3)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", cuda_experts.CALLS)
def test_blocks_of_every_shape(name: str) -> None:
    cuda_experts.CALLS[name].check()


@pytest.mark.usefixtures("on_cpu")
def test_arrays_may_begin_anywhere() -> None:
    call = cuda_experts.CALLS["blocks of experts"]
    y = call.run(cuda_cases.moved)()
    assert oracles.error(y, call.expected) < oracles.TOLERANCES["float16"]
    call = cuda_experts.CALLS["gate and up"]
    y = call.run(second=cuda_cases.moved)()
    assert oracles.error(y, call.expected) < oracles.TOLERANCES["float16"]


@pytest.mark.usefixtures("on_cpu")
def test_an_expert_may_have_more_pairs_than_shared_memory_has_places() -> None:
    own = cuda_experts.CALLS["blocks of pairs"].case[:-2]
    call = cuda_experts.Call((*own, 3, cuda_experts.block(1, 1)), (2,) * 700)
    call.check()


@pytest.fixture
def on_cuda(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    backend("cuda")


@pytest.mark.usefixtures("on_cuda")
def test_a_call_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    monkeypatch.setattr(dispatch, "traced_call", traced.append)
    dispatch.prepare(kind(on_cpu=False))
    dispatch.prepare(kind(on_cpu=False, layout="marlin", n=64, gate="silu"))
    assert len(traced) == 2


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({"x_shape": (5, 1, 1, 128), "pairs": (5, 2)}, 2),
        ({"x_shape": (5, 1, 128), "pairs": (5,)}, 1),
        ({"x_shape": (1, 1, 128), "pairs": (16,)}, 16),
        ({"x_shape": (1, 1, 128), "pairs": (17,)}, 17),
        ({"x_shape": (5, 1, 128), "pairs": (5, 2)}, 0),
        ({"x_shape": (5, 1, 1, 128), "pairs": (5, 2), "rows_are_named": True}, 0),
    ],
    ids=str,
)
def test_rows_that_are_in_turn(changes: dict[str, Any], each: int) -> None:
    request = kind(**changes)
    assert request.experts is not None
    assert request.experts.pairs_per_row(request.x_shape) == each


@sampled(3)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "pairs", "shape"),
    [
        ((5, 1), (5, 2), (5, 2)),
        ((6,), (6,), (6,)),
        ((2, 3, 1), (2, 3, 2), (2, 3, 2)),
        ((3,), (2, 1), (2, 3)),  # not in turn: they are numbered
    ],
    ids=str,
)
def test_rows_need_no_indices(
    rows: tuple[int, ...], pairs: tuple[int, ...], shape: tuple[int, ...], packed: bool
) -> None:
    native, experts = weights_of(4, 40)
    x = mx.random.normal((*rows, 1, 128), key=mx.random.key(2)).astype(mx.float16)
    chosen = mx.random.randint(0, 4, pairs, key=mx.random.key(3))
    stored = (pack(*native),) if packed else native

    y = mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen)

    given = np.broadcast_to(exact(x)[..., 0, :], (*shape, 128))
    weights = experts[np.broadcast_to(np.array(chosen), shape)]
    expected = np.einsum("...k,...nk->...n", given, weights)
    assert y.shape == (*shape, 1, 40)
    assert oracles.error(y.squeeze(-2), expected) < oracles.TOLERANCES["float16"]


def weights_of(experts: int, n: int) -> tuple[tuple[mx.array, ...], oracles.Floats]:
    """Returns experts in MLX's layout, and as they are decoded."""
    drawn = format_cases.any_weight(*AFFINE, experts * n, 128, dtype="float16", seed=1)
    native = tuple(each.reshape(experts, n, -1) for each in drawn.native)
    return native, drawn.decoded.reshape(experts, n, 128)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("how", ["in turn", "two in turn", "named"])
def test_gradients_are_those_of_mlx(how: str) -> None:
    native, _ = weights_of(4, 40)
    packed = pack(*native)
    before = (2, 1, 1) if how == "two in turn" else (4, 1)
    x = mx.random.normal((*before, 128), key=mx.random.key(2)).astype(mx.float16)
    chosen = mx.array([1, 0, 1, 3]).reshape(2, -1)
    chosen = chosen if how == "two in turn" else chosen.flatten()
    rows = mx.array([3, 1, 0, 2]) if how == "named" else None

    def ours(x: mx.array) -> mx.array:
        y = mlx_marlin.gather_qmm(x, packed, lhs_indices=rows, rhs_indices=chosen)
        return (y * y).sum()

    def stock(x: mx.array) -> mx.array:
        wide = [a if a.dtype == mx.uint32 else a.astype(x.dtype) for a in native]
        y = mx.gather_qmm(x, *wide, lhs_indices=rows, rhs_indices=chosen)
        return (y * y).sum()

    wide = mx.grad(stock)(x.astype(mx.float32))
    assert_as_good(mx.grad(ours)(x), mx.grad(stock)(x), wide)


def assert_as_good(ours: mx.array, own: mx.array, wide: mx.array) -> None:
    """Compares errors of ours and of MLX's own in float16, by the same in float32."""
    assert wide.dtype == mx.float32
    assert oracles.error(ours, exact(wide)) < 2 * oracles.error(own, exact(wide))


def network(
    activation: nn.Module | None = None, bias: bool = False
) -> tuple[SwitchGLU, SwitchGLU]:
    """Returns mlx-lm's experts of a gated network, and those of traced graphs."""
    mx.random.seed(4)
    activation = SwiGLU() if activation is None else activation
    own = SwitchGLU(128, 64, 4, activation=activation, bias=bias)
    own.set_dtype(mx.float16)
    nn.quantize(own, group_size=64, bits=4)
    for each in (own.gate_proj, own.up_proj, own.down_proj) if bias else ():
        each.bias = 4 * mx.random.normal(each.bias.shape).astype(mx.float16)
    ours = GatedExperts.__new__(GatedExperts)
    nn.Module.__init__(ours)
    ours.activation = activation
    for name in ("gate_proj", "up_proj", "down_proj"):
        ours[name] = MarlinSwitchLinear.from_quantized(own[name], layout="marlin")
    return own, ours


def chosen_by(rows: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((rows, 1, 128), key=mx.random.key(5)).astype(mx.float16)
    drawn = mx.random.uniform(shape=(rows, 1, 4), key=mx.random.key(6))
    return x, mx.argsort(drawn, axis=-1)[..., :2]


@sampled(1)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rows", [1, 3, 40])  # of 32 on mlx-lm sorts
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [SwiGLU(), SwigluOAI()], ids=repr)
def test_gate_and_up_are_one_product(
    activation: nn.Module, bias: bool, rows: int, gathered: list[CudaGatherPlan]
) -> None:
    own, ours = network(activation, bias)
    x, chosen = chosen_by(rows)

    y = ours(x, chosen)

    gate = "silu" if type(activation) is SwiGLU else "swiglu_oai"
    assert [(plan.gather.gate, plan.gather.bias) for plan in gathered] == [
        (gate, bias),
        (None, bias),
    ]
    assert y.shape == (rows, 1, 2, 128)
    assert_near(y, own, x, chosen)


def assert_near(y: mx.array, own: SwitchGLU, x: mx.array, chosen: mx.array) -> None:
    """Compares with mlx-lm's own layers in float32, whose weights are the same."""
    own.set_dtype(mx.float32)
    expected = own(x.astype(mx.float32), chosen)
    assert expected.dtype == mx.float32
    assert oracles.error(y, exact(expected)) < oracles.TOLERANCES["float16"]


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[CudaGatherPlan]:
    """Lists the plans of experts' products."""
    plans: list[CudaGatherPlan] = []
    own = graph.gather_product

    def listed(plan: CudaGatherPlan) -> Any:
        plans.append(plan)
        return own(plan)

    monkeypatch.setattr(graph, "gather_product", listed)
    return plans


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "how",
    ["activation", "limit", "bias", "dtype", "formats", "layout", "scales", "stock"],
)
def test_gate_and_up_are_two_where_kernels_have_no_gate(
    how: str, gathered: list[CudaGatherPlan]
) -> None:
    activations = {"activation": DoubledSwiGLU(), "limit": SwigluOAI(limit=1)}
    own, ours = network(activations.get(how), how in ("bias", "dtype"))
    if how == "bias":  # gate has none
        ours.gate_proj.pop("bias")
        own.gate_proj.bias = mx.zeros_like(own.gate_proj.bias)
    if how == "dtype":
        ours.up_proj.bias = ours.up_proj.bias.astype(mx.float32)
    if how == "formats":
        own.up_proj = SwitchLinear(128, 64, 4, bias=False).to_quantized(32, 4)
        own.up_proj.set_dtype(mx.float16)
        ours.up_proj = MarlinSwitchLinear.from_quantized(own.up_proj, layout="marlin")
    if how == "layout":
        ours.gate_proj = MarlinSwitchLinear.from_quantized(own.gate_proj)
    if how == "scales":
        own.up_proj.set_dtype(mx.bfloat16)
        ours.up_proj = MarlinSwitchLinear.from_quantized(own.up_proj, layout="marlin")
    if how == "stock":
        ours.gate_proj = own.gate_proj
    x, chosen = chosen_by(3)

    y, stock = ours(x, chosen), own(x, chosen)
    mx.eval(y, stock)

    assert not any(plan.gather.gate for plan in gathered)
    if how == "stock":  # of which one product is MLX's
        own.set_dtype(mx.float32)
        assert_as_good(y, stock, own(x.astype(mx.float32), chosen))
    else:
        assert_near(y, own, x, chosen)


class DoubledSwiGLU(SwiGLU):
    """What a model of its own may have."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        doubled: mx.array = 2 * super().__call__(x, gate)
        return doubled


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("shape", [(4, 1), (4, 63), (64,)])
def test_biases_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    _, ours = network(bias=True)
    with pytest.raises(ValueError, match=r"bias of a packed .* shape \(4, 64\)"):
        ours.up_proj.bias = mx.ones(shape, mx.float16)


@pytest.mark.usefixtures("on_cpu")
def test_biases_are_added_where_stock_mlx_multiplies() -> None:
    own, ours = network(bias=True)
    own.set_dtype(mx.float32)
    for name in ("gate_proj", "up_proj", "down_proj"):
        ours[name] = MarlinSwitchLinear.from_quantized(own[name], layout="marlin")
    x, chosen = chosen_by(3)
    x = x.astype(mx.float32)
    assert_near(ours(x, chosen), own, x, chosen)


@pytest.mark.usefixtures("on_cpu")
def test_experts_that_must_not_vary_are_refused() -> None:
    own, ours = network()
    ours.up_proj = MarlinSwitchLinear.from_quantized(
        own.up_proj, layout="marlin", invariant=True
    )
    with pytest.raises(ValueError, match="invariant=True"):
        ours(*chosen_by(3))


@sampled(1)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [SwiGLU(), SwigluOAI()], ids=repr)
def test_gradients_go_through_gate_and_up(
    activation: nn.Module, bias: bool, gathered: list[CudaGatherPlan]
) -> None:
    own, ours = network(activation, bias)
    x, chosen = chosen_by(3)

    def gradients(of: SwitchGLU, x: mx.array) -> list[mx.array]:
        layers = [of.gate_proj, of.up_proj, of.down_proj] if bias else []

        def total(x: mx.array, *biases: mx.array) -> mx.array:
            for layer, each in zip(layers, biases, strict=True):
                layer.bias = each
            return (of(x, chosen) ** 2).sum()

        given = [x, *(layer.bias for layer in layers)]
        found = mx.grad(total, argnums=[*range(len(given))])(*given)
        for layer, each in zip(layers, given[1:], strict=True):
            layer.bias = each
        return [*found]

    found, stock = gradients(ours, x), gradients(own, x)
    own.set_dtype(mx.float32)
    wide = gradients(own, x.astype(mx.float32))

    assert gathered[0].gather.gate
    for each in zip(found, stock, wide, strict=True):
        assert_as_good(*each)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    "changes",
    [{"layout": "mlx"}, {"n": 40}, {"pairs": (5, 17)}, {"n": 2**27 - 32}],
    ids=str,
)
def test_no_kernel_gates_other_experts(changes: dict[str, Any]) -> None:
    fields = {"on_cpu": False, "layout": "marlin", "n": 64, "gate": "silu"}
    assert dispatch.prepare(kind(**fields)).reason is None
    assert dispatch.prepare(kind(**fields | changes)).reason is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"invariant": True}, "no experts with invariant=True"),
        ({"dtype": mx.float32, "scale_dtype": mx.float32}, "float32"),
        ({"scale_dtype": mx.float32}, "scales in float32"),
        (LONG, "MLX's words in 32 bits"),
        (LONG | {"bits": 3, "experts": 11}, "MLX's words in 32 bits"),
    ],
)
@pytest.mark.usefixtures("on_cuda")
def test_what_stock_serves_has_a_reason(changes: dict[str, Any], words: str) -> None:
    assert words in str(serving.serve(kind(on_cpu=False, **changes), serving.here()))
    assert isinstance(serving.serve(kind(on_cpu=False), serving.here()), CudaGatherPlan)


@given(
    pairs=st.integers(1, 5000),
    experts=st.integers(1, 300),
    n=st.integers(1, 5000),
    k=st.sampled_from([64, 768, 4096]),
    gated=st.booleans(),
)
def test_a_plan_fits_the_device_and_says_itself(
    pairs: int, experts: int, n: int, k: int, gated: bool
) -> None:
    n = TILE_N * -(-n // TILE_N) if gated else n
    problem = problem_of(pairs, n, k, layout="marlin")
    gate = "silu" if gated else None
    gather = GatherProblem(problem=problem, experts=experts, gate=gate)

    plan = planner.choose_gather(gather, H200)

    assert plan.threads <= 1024
    assert plan.threadgroup_bytes <= H200.shared_bytes
    assert plan.by_pair == (pairs < experts)
    assert plan.simdgroups_n % (1 + gated) == 0
    columns = 32 * plan.simdgroups_n * plan.num_threadgroups
    assert columns >= (1 + gated) * n * min(pairs, experts)
    assert f"{pairs} pairs over {experts} experts" in plan.explain()
    assert plan.explain().endswith(", silu(gate, up)") == gated


@pytest.mark.parametrize(
    ("n", "k", "bits", "experts"), [(16384, 16384, 4, 64), (16384, 8192, 5, 128)]
)
def test_large_experts_are_planned(n: int, k: int, bits: int, experts: int) -> None:
    problem = problem_of(800, n, k, bits=bits, layout="marlin")
    plan = planner.choose_gather(GatherProblem(problem=problem, experts=experts), H200)
    assert plan.num_threadgroups >= experts * n / 32 / 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gate": "silu"}, "whole tiles and an even"),
        ({"bias": True}, "bias=True needs packed weights"),
        ({"gate": "gelu"}, "gate='gelu' is not None or one of"),
        ({"experts": 0}, "experts=0"),
        ({"fragments_m": 5}, "fragments_m=5"),
        ({"simdgroups_n": 9}, "simdgroups_n=9"),
        ({"simdgroups_n": 8, "simdgroups_k": 5}, "more than"),
        ({"pairs_per_row": 2}, "pairs_per_row=2 does not divide 9 pairs"),
        ({"pairs_per_row": -1}, "pairs_per_row=-1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, int], words: str) -> None:
    gather = {"problem": Problem(m=9, n=40, k=64), "experts": 4}
    block = {"fragments_m": 1, "simdgroups_n": 2, "simdgroups_k": 2}
    changed = block | fields
    gather |= {name: changed.pop(name) for name in fields.keys() - block.keys()}

    with pytest.raises(ValueError, match=words):
        CudaGatherPlan(gather=GatherProblem(**gather), **changed)
