"""Products with chosen weights: as `mx.gather_qmm`, each weight read once at most."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.backends import experts_launch, planner, selection
from mlx_marlin.backends.metal.cost import memory_seconds
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import (
    chosen_experts,
    expected_tiles,
    gather_seconds,
)
from mlx_marlin.backends.metal.experts_plan import GatherPlan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.experts.dispatch import why_not_gather
from mlx_marlin.products.experts.request import Kind
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.products.stock_weight import as_mlx
from mlx_marlin.weights.formats import format_of
from support import format_cases, oracles, strategies
from support.format_cases import Weight
from support.grids import drawn

Choose = Callable[[str | None], None]

FORMATS = [
    ("affine", 4, 64),
    ("affine", 4, 32),
    ("affine", 1, 32),
    ("affine", 3, 64),
    ("affine", 8, 128),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
    ("symmetric", 6, 64),
    ("zero_point", 5, 32),
]
K = 128
M1, M3 = Device.named("Apple M1"), Device.named("Apple M3")
DEVICES = st.sampled_from([M1, M3])


def weights(
    experts: int, n: int, mode: str, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[mx.array, ...]:
    w = mx.random.normal((experts, n, K), key=mx.random.key(n)).astype(dtype)
    return mx.quantize(w, group_size=group_size, bits=bits, mode=mode)


@dataclass(frozen=True)
class Call:
    """A product of rows with experts: few rows or many, experts chosen or not.

    Attributes:
        form: Mode, bits and group size.
        layout: "mlx" or "marlin".
        experts: How many weights there are.
        n: Rows of a weight.
        k: Columns of a weight.
        rows: Rows of x.
        chosen: The expert of each pair.
        dtype: Of activations and scales.
        seed: Of everything random.
    """

    form: tuple[str, int, int]
    layout: str
    experts: int
    n: int
    k: int
    rows: int
    chosen: list[int]
    dtype: str
    seed: int

    @cached_property
    def weight(self) -> Weight:
        """All experts' rows below each other, in MLX's layout."""
        shape = self.experts * self.n, self.k
        dtype = self.dtype
        return format_cases.any_weight(*self.form, *shape, dtype=dtype, seed=self.seed)

    @property
    def decoded(self) -> oracles.Floats:
        """The weights [experts, n, k] in float64."""
        return self.weight.decoded.reshape(self.experts, self.n, self.k)

    @property
    def x(self) -> mx.array:
        """Activations [rows, 1, k]."""
        x = format_cases.activations(
            self.rows, self.k, dtype=self.dtype, seed=self.seed
        )
        return x[:, None]

    @property
    def sources(self) -> list[int]:
        """The row of x of each pair."""
        random = np.random.default_rng(self.seed)
        drawn: list[int] = random.integers(0, self.rows, len(self.chosen)).tolist()
        return drawn

    def stored(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The weights as `gather_qmm` takes them, and the options with them."""
        shape = self.experts, self.n, -1
        native = tuple(each.reshape(shape) for each in self.weight.native)
        options = self.weight.options
        if self.layout == "marlin":
            return (pack(*native, **options),), {}
        return native, options

    def run(self, **more: Any) -> mx.array:
        """The products [pairs, 1, n]."""
        weights, options = self.stored()
        return mlx_marlin.gather_qmm(
            self.x,
            *weights,
            lhs_indices=mx.array(self.sources, mx.uint32),
            rhs_indices=mx.array(self.chosen),
            **options,
            **more,
        )


@st.composite
def calls(draw: st.DrawFn) -> Call:
    mode, bits, group_size = draw(st.sampled_from(FORMATS))
    experts = draw(st.integers(1, 6))
    chosen = draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=90))
    step = 64 if mode == "nvfp4" else group_size
    return Call(
        form=(mode, bits, group_size),
        layout=draw(st.sampled_from(format_of(mode, bits).layouts)),
        experts=experts,
        n=draw(st.sampled_from([8, 32, 41, 70])),
        k=step * draw(st.integers(1, 256 // step)),
        rows=draw(st.integers(1, 12)),
        chosen=sorted(chosen) if draw(st.booleans()) else chosen,
        dtype=draw(strategies.DTYPES),
        seed=draw(st.integers(0, 99)),
    )


LIMITS = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-5}


@pytest.mark.usefixtures("kernels")
@drawn(16, 80, call=calls(), invariant=st.booleans())
def test_every_pair_is_the_product_that_it_names(call: Call, invariant: bool) -> None:
    is_sorted = call.chosen == sorted(call.chosen)

    y = call.run(sorted_indices=is_sorted, invariant=invariant)

    dtype = getattr(mx, call.dtype)
    assert (y.shape, y.dtype) == ((len(call.chosen), 1, call.n), dtype)
    rows = oracles.exact(call.x)[call.sources, 0]
    expected = np.einsum("pk,pnk->pn", rows, call.decoded[call.chosen])
    assert oracles.error(y.squeeze(1), expected) < LIMITS[call.dtype]


@pytest.mark.skipif(
    selection.backend() != "emulator", reason="the emulator does not run here"
)
@drawn(3, 12, call=calls(), seed=st.integers(0, 99))
def test_no_call_races_or_strays(call: Call, seed: int) -> None:
    from mlx_marlin import emulator

    with emulator.emulated(seed=seed, trace=True):
        mx.eval(call.run())


@pytest.mark.skipif(
    selection.backend() != "emulator", reason="the emulator does not run here"
)
@pytest.mark.parametrize("dot_rows", [0, 2])
def test_an_expert_of_several_tiles_lists_its_rows_without_a_race(
    dot_rows: int,
) -> None:
    """Its second list is written where simdgroups may still read the first."""
    from mlx_marlin import emulator

    native = weights(2, 40, "affine", 4, 64, mx.float32)
    plan = GatherPlan(
        problem=Problem(m=20, n=40, k=K, dtype="float32", scale_dtype="float32"),
        experts=2,
        fragments_m=1,
        simdgroups_m=1,
        simdgroups_k=2,
        dot_rows=dot_rows,
        subtract=True,
    )
    x = mx.random.normal((20, K))
    # Expert 0 has three tiles, of eight rows, eight and one; expert 1 one of three.
    chosen = mx.array([1 if pair % 8 == 3 else 0 for pair in range(20)], mx.uint32)
    pairs = mx.arange(20, dtype=mx.uint32), chosen

    for seed in range(3):
        with emulator.emulated(seed=seed, trace=True):
            mx.eval(experts_launch.gather_product(plan)(x, *native, *pairs))


@pytest.mark.usefixtures("kernels")
@drawn(5, 40, call=calls(), seed=st.integers(0, 99))
def test_an_invariant_row_has_the_same_bits_in_any_company(
    call: Call, seed: int
) -> None:
    """Among all pairs, among some of them, alone, and among many of its expert."""
    whole = call.run(invariant=True)

    random = np.random.default_rng(seed)
    size = random.integers(1, len(call.chosen) + 1)
    some = random.permutation(len(call.chosen))[:size]
    one = some[:1]
    weights, options = call.stored()
    for pairs in (some, one, np.repeat(one, 150)):
        y = mlx_marlin.gather_qmm(
            call.x,
            *weights,
            lhs_indices=mx.array(np.array(call.sources)[pairs].astype(np.uint32)),
            rhs_indices=mx.array(np.array(call.chosen)[pairs]),
            invariant=True,
            **options,
        )
        assert mx.array_equal(y, whole[mx.array(pairs)])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_halves_keep_their_bits_with_one_fragment_and_with_more(layout: str) -> None:
    """Where the offset of codes would show if it were subtracted here and not there."""
    call = Call(("affine", 4, 64), layout, 1, 512, 256, 40, [0] * 40, "float16", 1)
    few = replace(call, chosen=[0] * 4)
    assert few.sources == call.sources[:4]

    y = few.run(invariant=True)

    assert mx.array_equal(y, call.run(invariant=True)[:4])
    if selection.backend() == "emulator":  # of others' matrices we do not know
        assert not mx.array_equal(y, few.run())


@given(
    pairs=st.integers(1, 5000),
    experts=st.integers(1, 300),
    dtype=strategies.DTYPES,
    bits=st.sampled_from([3, 4]),
    device=DEVICES,
)
def test_an_invariant_sum_is_cut_alike_for_any_pairs(
    pairs: int, experts: int, dtype: str, bits: int, device: Device
) -> None:
    def planned(pairs: int) -> GatherPlan:
        problem = Problem(m=pairs, n=70, k=256, bits=bits, dtype=dtype, invariant=True)
        return planner.choose_gather(problem, experts, device)

    one, several = planned(1), planned(pairs)

    assert one.simdgroups_k == several.simdgroups_k
    assert one.subtract
    assert several.subtract
    for fields in ({"subtract": False}, {"dot_rows": 1}):
        with pytest.raises(ValueError, match="invariant=True needs subtract=True"):
            replace(several, **fields)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(5, 2), (2, 3, 2), (1, 1, 8)])
def test_without_rows_named_each_takes_its_own_as_in_mlx(
    shape: tuple[int, ...],
) -> None:
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    x = mx.random.normal((*shape[:-1], 1, 1, K))
    chosen = mx.random.randint(0, 4, shape)

    y = mlx_marlin.gather_qmm(x, *native, rhs_indices=chosen)

    expected = mx.gather_qmm(x, *native, rhs_indices=chosen)
    assert y.shape == expected.shape
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("packed", [False, True])
def test_the_same_bits_every_time(packed: bool) -> None:
    native = weights(3, 64, "affine", 4, 64, mx.float16)
    stored = (pack(*native),) if packed else native
    x = mx.random.normal((30, 1, 1, K)).astype(mx.float16)
    chosen = mx.arange(30)[:, None] % 3

    y = mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen)

    assert mx.array_equal(y, mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen))


@pytest.mark.usefixtures("kernels")
def test_packed_weights_without_indices_are_chosen_in_turn() -> None:
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    x = mx.random.normal((3, 1, 1, K))

    y = mlx_marlin.gather_qmm(x, pack(*native), lhs_indices=mx.array([[0], [2]]))

    expected = mx.gather_qmm(x, *native, lhs_indices=mx.array([[0], [2]]))
    assert y.shape == expected.shape == (2, 4, 1, 40)
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_rows_and_scales_of_two_dtypes_meet_as_in_mlx(
    dtype: mx.Dtype, packed: bool
) -> None:
    native = weights(4, 40, "affine", 4, 64, mx.bfloat16)
    stored = (pack(*native),) if packed else native
    x = mx.random.normal((5, 1, 1, K)).astype(dtype)
    chosen = mx.random.randint(0, 4, (5, 2))

    y = mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen)

    expected = mx.gather_qmm(x, *native, rhs_indices=chosen)
    assert y.dtype == expected.dtype == mx.float32
    assert mx.allclose(y, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("mode", "packed"),
    [
        ("affine", False),
        ("affine", True),
        ("mxfp4", False),
        ("mxfp4", True),
        ("symmetric", True),
        ("zero_point", True),
    ],
)
def test_gradients_are_those_of_mlx(mode: str, packed: bool) -> None:
    group_size = 32 if mode == "mxfp4" else 64
    made = format_cases.any_weight(
        mode, 4, group_size, 4 * 40, K, dtype="float32", seed=3
    )
    native = tuple(each.reshape(4, 40, -1) for each in made.native)
    weight = pack(*native, **made.options)
    theirs_too = as_mlx(weight)
    stored, options = ((weight,), {}) if packed else (native, made.options)
    x = mx.random.normal((5, 1, 1, K))
    chosen = mx.random.randint(0, 4, (5, 2))

    def ours(x: mx.array) -> mx.array:
        y = mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen, **options)
        return y.square().sum()

    def theirs(x: mx.array) -> mx.array:
        known = mode if mode == "mxfp4" else "affine"
        form = {"group_size": group_size, "bits": 4, "mode": known}
        y = mx.gather_qmm(x, *theirs_too, rhs_indices=chosen, **form)
        return y.square().sum()

    expected = mx.grad(theirs)(x)
    assert mx.allclose(mx.grad(ours)(x), expected, rtol=1e-3, atol=1e-4)
    assert mx.abs(expected).max() > 0.1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("kernels")
def test_gradients_of_codes_and_indices_raise(packed: bool) -> None:
    w, scales, biases = weights(4, 40, "affine", 4, 64, mx.float32)
    whole = pack(w, scales, biases)
    x, chosen = mx.random.normal((5, 1, 1, K)), mx.random.randint(0, 4, (5, 2))

    def of(x: mx.array, codes: mx.array, indices: mx.array) -> mx.array:
        stored = (replace(whole, words=codes),) if packed else (codes, scales, biases)
        return mlx_marlin.gather_qmm(x, *stored, rhs_indices=indices).sum()

    arrays = x, whole.words if packed else w, chosen
    for argnum in (1, 2):
        with pytest.raises(ValueError, match="cannot be broadcast"):
            mx.grad(of, argnums=argnum)(*arrays)
    assert mx.abs(mx.grad(of)(*arrays)).max() > 0.1


@pytest.mark.usefixtures("kernels")
def test_the_scales_of_packed_weights_have_gradients_too() -> None:
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    packed = pack(*native)
    x = mx.random.normal((5, 1, 1, K))
    chosen = mx.random.randint(0, 4, (5, 2))

    def ours(scales: mx.array) -> mx.array:
        y = mlx_marlin.gather_qmm(x, replace(packed, scales=scales), rhs_indices=chosen)
        return y.square().sum()

    def theirs(scales: mx.array, biases: mx.array) -> mx.array:
        y = mx.gather_qmm(x, native[0], scales, biases, rhs_indices=chosen)
        return y.square().sum()

    gradient = replace(packed, scales=mx.grad(ours)(packed.scales))

    expected = mx.grad(theirs, argnums=(0, 1))(*native[1:])
    for actual, wanted in zip(unpack(gradient)[1:], expected, strict=True):
        assert mx.allclose(actual, wanted, rtol=1e-3, atol=1e-2)


def kind(**changes: Any) -> Kind:
    fields: dict[str, Any] = {
        "x_shape": (5, 1, 1, K),
        "dtype": mx.float16,
        "experts": 4,
        "n": 40,
        "k": K,
        "scale_dtype": mx.float16,
        "pairs": (5, 2),
        "rows_are_named": False,
        "transpose": True,
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "layout": "mlx",
        "is_sorted": False,
        "invariant": False,
        "has_global_scale": False,
        "on_cpu": True,
    }
    return Kind(**(fields | changes))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transpose": False}, "single rows times transposed"),
        ({"x_shape": (5, 1, 3, K)}, "single rows times transposed"),
        ({"bits": 7}, "affine 7-bit is not one"),
        ({"has_global_scale": True}, "take no global scale"),
        (
            {
                "mode": "nvfp4",
                "group_size": 16,
                "x_shape": (5, 1, 1, 48),
                "k": 48,
            },
            "k=48 is not a multiple of 64",
        ),
        ({"pairs": (0, 2)}, "nothing to add up"),
        ({"dtype": mx.complex64}, "do not compute in complex64"),
    ],
)
def test_what_stock_serves_has_a_reason(changes: dict[str, Any], words: str) -> None:
    assert words in str(why_not_gather(kind(**changes)))
    assert why_not_gather(kind()) is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_calls_of_other_kinds_are_mlxs(packed: bool, transpose: bool) -> None:
    native = weights(4, 64, "affine", 4, 64, mx.float32)
    stored = (pack(*native),) if packed else native
    x = mx.random.normal((5, 1, 3, K if transpose else 64))
    chosen = mx.array([0, 3, 1, 1, 2])[:, None]

    y = mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen, transpose=transpose)

    expected = mx.gather_qmm(x, *native, rhs_indices=chosen, transpose=transpose)
    assert mx.array_equal(y, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_without_kernels_stock_serves(backend: Choose, packed: bool) -> None:
    backend("stock")
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    stored = (pack(*native),) if packed else native
    x, chosen = mx.random.normal((5, 1, 1, K)), mx.array([[0], [1], [2], [3], [0]])

    y = mlx_marlin.gather_qmm(x, *stored, rhs_indices=chosen)

    assert mx.array_equal(y, mx.gather_qmm(x, *native, rhs_indices=chosen))


EXPERTS = weights(4, 40, "affine", 4, 64, mx.float32)
PACKED = pack(*EXPERTS)
CHOSEN = mx.array([[0], [3]])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((PACKED, EXPERTS[1]), {}, "carries its scales"),
        ((PACKED,), {"group_size": 32}, "do not fit the packed weight"),
        ((PACKED,), {"global_scale": mx.ones(4)}, "global_scale"),
        ((pack(*(each[0] for each in EXPERTS)),), {}, "expected a batch [experts, n"),
        ((pack(*(each[None] for each in EXPERTS)),), {}, "shape (1, 4, 40, 128)"),
        ((PACKED,), {"transpose": False}, "[gather_qmm]"),
        ((PACKED,), {"rhs_indices": mx.ones((2, 1))}, "[gather_qmm]"),
    ],
)
def test_what_is_wrong_with_a_packed_call_is_said(
    arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    x = mx.random.normal((2, 1, 1, K))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        mlx_marlin.gather_qmm(x, *arguments, **({"rhs_indices": CHOSEN} | options))

    assert words in str(error.value)


def test_only_packed_weights_carry_their_scales() -> None:
    with pytest.raises(TypeError, match="scales is None"):
        mlx_marlin.gather_qmm(mx.zeros((2, 1, 1, K)), EXPERTS[0], rhs_indices=CHOSEN)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("packed", [False, True])
def test_what_stock_would_serve_cannot_be_invariant(packed: bool) -> None:
    stored = (PACKED,) if packed else EXPERTS
    options: dict[str, Any] = {"rhs_indices": CHOSEN, "invariant": True}

    with pytest.raises(ValueError, match=r"invariant=True cannot .* single rows"):
        mlx_marlin.gather_qmm(mx.zeros((2, 1, 3, K)), *stored, **options)
    with pytest.raises(ValueError, match=r"invariant=True cannot .* and indices"):
        mlx_marlin.gather_qmm(mx.zeros((4, 1, K)), *EXPERTS, invariant=True)


@pytest.mark.parametrize("chip", ["Apple M1 Max", "Apple M3 Max"])
def test_the_model_leaves_stock_where_rows_share_experts(chip: str) -> None:
    device = Device.named(chip)

    def reason(pairs: int) -> str | None:
        problem = Problem(m=pairs, n=768, k=2048)
        return planner.gather_reason(problem, 128, False, device)

    assert "times stock MLX's speed" in str(reason(8))
    assert reason(256) is None


@given(
    pairs=st.integers(1, 5000), experts=st.integers(1, 300), most=st.integers(1, 128)
)
def test_expected_tiles_hold_all_pairs_of_the_chosen_experts(
    pairs: int, experts: int, most: int
) -> None:
    tiles = expected_tiles(pairs, experts, most)
    of_experts = expected_tiles(pairs, experts, pairs)

    assert max(tiles) <= most
    assert sum(r * c for r, c in tiles.items()) == pytest.approx(pairs, rel=1e-6)
    chosen = chosen_experts(pairs, experts)
    assert sum(of_experts.values()) == pytest.approx(chosen, rel=1e-6)


def test_expected_tiles_are_those_of_many_draws() -> None:
    random = np.random.default_rng(0)
    draws = random.integers(0, 16, (20_000, 40))
    counts = np.stack([(draws == each).sum(axis=1) for each in range(16)])

    tiles = expected_tiles(40, 16, 3)

    whole, rest = counts // 3, counts % 3
    drawn = {3: whole + 0.0, 1: rest == 1, 2: rest == 2}
    for rows, found in drawn.items():
        assert tiles[rows] == pytest.approx(found.sum(axis=0).mean(), rel=0.02)


def test_experts_of_few_rows_are_priced_as_dot_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One row each: with matrices the same experts would be bound by their slots.
    problem = Problem(m=128, n=768, k=2048)
    device = Device.named("Apple M1 Max")
    stock, ours = gather_seconds(problem, 128, True, device)

    monkeypatch.setattr("mlx_marlin.backends.metal.experts.MOST_DOT_ROWS", 0)
    planner.choose_gather.cache_clear()
    with_matrices = gather_seconds(problem, 128, True, device)
    planner.choose_gather.cache_clear()

    assert with_matrices[0] == stock
    assert with_matrices[1] > 1.2 * ours


def leaves(chip: str, pairs: int, k: int = 2048, **form: Any) -> bool:
    """Whether a product of unsorted pairs over 128 experts leaves stock MLX."""
    problem = Problem(m=pairs, n=768, k=k, **form)
    return not planner.gather_reason(problem, 128, False, Device.named(chip))


@pytest.mark.parametrize(
    ("chip", "form", "least"),
    [
        ("Apple M3 Max", {}, 1.1),
        ("Apple M4 Pro", {"dtype": "bfloat16", "scale_dtype": "bfloat16"}, 1.1),
        ("Apple M4 Pro", {"bits": 6}, 1.3),
        ("Apple M1 Max", {}, 1.3),
    ],
)
def test_the_margin_is_small_where_times_of_one_row_were_fitted(
    chip: str, form: dict[str, Any], least: float
) -> None:
    def ratio(pairs: int) -> float:
        problem = Problem(m=pairs, n=768, k=2048, **form)
        stock, ours = gather_seconds(problem, 128, False, Device.named(chip))
        return stock / ours

    for pairs in range(8, 129, 8):
        assert leaves(chip, pairs, **form) == (ratio(pairs) >= least)
    assert ratio(8) < 1.1 < ratio(64) < 1.3 < ratio(128)


@given(pairs=st.integers(1, 512), k=st.sampled_from([64, 128, 256, 768, 2048]))
@settings(max_examples=60)
def test_where_the_margin_is_small_caches_would_not_make_stock_win(
    pairs: int, k: int
) -> None:
    chip = "Apple M4 Pro"
    problem, device = Problem(m=pairs, n=768, k=k), Device.named(chip)
    stock, ours = gather_seconds(problem, 128, False, device)

    if leaves(chip, pairs, k) and stock / ours < 1.3:
        once = chosen_experts(pairs, 128) * problem.weight_bytes
        assert ours <= 1.01 * memory_seconds(round(once), device)


def test_few_k_are_not_left_to_the_small_margin() -> None:
    # What surrounds the main loop counts more than reading the weights.
    problem, device = Problem(m=64, n=768, k=256), Device.named("Apple M4 Pro")
    stock, ours = gather_seconds(problem, 128, False, device)

    assert 1.1 < stock / ours < 1.3
    assert not leaves("Apple M4 Pro", 64, 256)


@given(
    pairs=st.integers(1, 5000),
    experts=st.integers(1, 300),
    n=st.integers(1, 5000),
    device=DEVICES,
)
@settings(max_examples=200)
def test_a_plan_fits_the_hardware_and_says_itself(
    pairs: int, experts: int, n: int, device: Device
) -> None:
    plan = planner.choose_gather(Problem(m=pairs, n=n, k=64), experts, device)

    assert plan.threads <= 256
    assert plan.threadgroup_bytes <= 32768
    assert plan.num_threadgroups == experts * -(-n // 32)
    assert f"{pairs} pairs over {experts} experts" in plan.explain()


@pytest.mark.parametrize("pairs", [64, 512, 4096])
@pytest.mark.parametrize("chip", ["Apple M1", "Apple M1 Max"])
def test_dot_products_and_two_fragments_of_native_codes_are_too_much_code_for_an_m1(
    chip: str, pairs: int
) -> None:
    problem, m1 = Problem(m=pairs, n=768, k=2048), Device.named(chip)

    assert planner.choose_gather(problem, 8, m1).fragments_m == 1
    assert planner.choose_gather(problem, 8, M3).fragments_m == 2
    for other in (
        replace(problem, layout="marlin"),
        replace(problem, invariant=True),
    ):
        assert planner.choose_gather(other, 8, m1).fragments_m == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": 0}, "experts=0"),
        ({"dot_rows": 3}, "dot_rows=3"),
        ({"fragments_m": 3}, "fragments_m=3"),
        ({"simdgroups_m": 4, "simdgroups_k": 4}, "simdgroups_m=4"),
        ({"fragments_m": 2, "simdgroups_m": 8, "simdgroups_k": 2}, "simdgroups_m=8"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, int], words: str) -> None:
    sound = {
        "experts": 4,
        "fragments_m": 1,
        "simdgroups_m": 1,
        "simdgroups_k": 4,
        "dot_rows": 2,
    }

    with pytest.raises(ValueError, match=words):
        GatherPlan(problem=Problem(m=9, n=40, k=64), subtract=False, **(sound | fields))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_each_weight_is_read_once_for_all_rows_that_chose_it(layout: str) -> None:
    from mlx_marlin import emulator

    native = weights(4, 64, "affine", 4, 64, mx.float16)
    packed = pack(*native)
    stored = (packed.words, packed.scales, packed.scales)
    x = mx.random.normal((8, K)).astype(mx.float16)
    plan = GatherPlan(
        problem=Problem(m=8, n=64, k=K, layout=layout),
        experts=4,
        fragments_m=1,
        simdgroups_m=1,
        simdgroups_k=2,
        dot_rows=2,
        subtract=False,
    )
    sources = mx.arange(8, dtype=mx.uint32)
    chosen = mx.array([1, 3, 1, 1, 3, 3, 3, 1], mx.uint32)
    weight = native if layout == "mlx" else stored

    counters = emulator.trace(
        experts_launch.gather_product(plan), x, *weight, sources, chosen
    )

    read = counters[0].of("w")
    assert read.read_bytes == 2 * 64 * K // 2  # two of four experts were chosen
    assert read.repeated_read_bytes == 0
    scales = 2 * 64 * (K // 64) * 2
    assert counters[0].of("scales").read_bytes == scales * (1 + (layout == "marlin"))


FEW = [1, 2, 0, 2, 1, 2]
"""Experts that one row chose, two rows and three."""


@pytest.mark.thinned(8)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("layout", "mode", "bits"),
    [
        (layout, *name)
        for name, known in format_cases.FORMATS.items()
        for layout in known.layouts
    ],
)
def test_few_rows_of_every_format_are_the_products_that_they_name(
    layout: str, mode: str, bits: int
) -> None:
    form = mode, bits, max(format_of(mode, bits).group_sizes[:2])
    dtype = list(LIMITS)[bits % 3]
    call = Call(form, layout, 4, 41, 192, 3, FEW, dtype, bits)

    y = call.run()

    rows = oracles.exact(call.x)[call.sources, 0]
    expected = np.einsum("pk,pnk->pn", rows, call.decoded[FEW])
    assert oracles.error(y.squeeze(1), expected) < LIMITS[dtype]
    assert mx.array_equal(y, call.run())


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("simdgroups_m", "simdgroups_k"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("dot_rows", [0, 1, 2])
def test_an_expert_of_few_rows_costs_no_matrix_product(
    dot_rows: int, simdgroups_m: int, simdgroups_k: int
) -> None:
    from mlx_marlin import emulator

    packed = pack(*weights(4, 64, "affine", 4, 64, mx.bfloat16))
    plan = GatherPlan(
        problem=Problem(m=6, n=64, k=K, layout="marlin", dtype="bfloat16"),
        experts=4,
        fragments_m=1,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        dot_rows=dot_rows,
        subtract=True,
    )
    x = mx.random.normal((6, K)).astype(mx.bfloat16)
    pairs = mx.arange(6, dtype=mx.uint32), mx.array(FEW, mx.uint32)
    weight = packed.words, packed.scales, packed.scales

    counters = emulator.trace(experts_launch.gather_product(plan), x, *weight, *pairs)[
        0
    ]

    read = counters.of("w")
    assert read.read_bytes == 3 * 64 * K // 2  # nobody chose one of four experts
    assert read.repeated_read_bytes == 0
    assert counters.count("matrix") == (3 - dot_rows) * (64 // 8) * (K // 8)


def test_a_packed_call_is_one_dispatch_on_metal(backend: Choose) -> None:
    backend("metal")
    names: list[str] = []

    def collect(record: dict[str, Any]) -> None:
        if record.get("type") == "primitive":
            names.append(record["name"])

    problem = Problem(m=64, n=40, k=K, layout="marlin")
    product = experts_launch.gather_product(planner.choose_gather(problem, 4, M1))
    pairs = mx.zeros(64, mx.uint32)
    x = mx.zeros((64, K), mx.float16)
    scales = PACKED.scales.astype(mx.float16)
    mx.export_function(collect, product, x, PACKED.words, scales, scales, pairs, pairs)

    assert names == ["CustomKernel"]
