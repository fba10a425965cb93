"""Products with chosen weights: as `mx.gather_qmm`, each weight read once at most."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.backends import graph, planner, selection
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import MetalGatherPlan
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.products.reference.weight import as_mlx
from mlx_marlin.weights.formats import format_of
from support import format_cases, oracles, strategies
from support.gather_calls import DEVICES, LIMITS, Call, K, calls, weights
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only


@pytest.mark.usefixtures("kernels")
@drawn(6, call=calls(), invariant=st.booleans())
def test_every_pair_is_the_product_that_it_names(call: Call, invariant: bool) -> None:
    is_sorted = call.chosen == sorted(call.chosen)

    y = call.run(sorted_indices=is_sorted, invariant=invariant)

    dtype = getattr(mx, call.dtype)
    assert (y.shape, y.dtype) == ((len(call.chosen), 1, call.n), dtype)
    rows = oracles.exact(call.x)[call.sources, 0]
    expected = np.einsum("pk,pnk->pn", rows, call.decoded[call.chosen])
    assert oracles.error(y.squeeze(1), expected) < LIMITS[call.dtype]


@emulator_only
@drawn(3, call=calls(), seed=st.integers(0, 99))
def test_no_call_races_or_strays(call: Call, seed: int) -> None:
    import metal_emulator

    with metal_emulator.emulated(seed=seed, trace=True):
        mx.eval(call.run())


@emulator_only
@pytest.mark.parametrize("dot_rows", [0, 2])
def test_an_expert_of_several_tiles_lists_its_rows_without_a_race(
    dot_rows: int,
) -> None:
    """Its second list is written where simdgroups may still read the first."""
    import metal_emulator

    native = weights(2, 40, "affine", 4, 64, mx.float32)
    plan = MetalGatherPlan(
        gather=GatherProblem(
            problem=Problem(m=20, n=40, k=K, dtype="float32", scale_dtype="float32"),
            experts=2,
        ),
        fragments_m=1,
        simdgroups_m=1,
        simdgroups_k=2,
        dot_rows=dot_rows,
        operand="exact",
    )
    x = mx.random.normal((20, K))
    # Expert 0 has three tiles, of eight rows, eight and one; expert 1 one of three.
    chosen = mx.array([1 if pair % 8 == 3 else 0 for pair in range(20)], mx.uint32)
    pairs = chosen, mx.arange(20, dtype=mx.uint32)

    for seed in range(3):
        with metal_emulator.emulated(seed=seed, trace=True):
            mx.eval(graph.gather_product(plan)(x, *native, *pairs))


@pytest.mark.usefixtures("kernels")
@drawn(3, call=calls(), seed=st.integers(0, 99))
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


@sampled(1)
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
        gather = GatherProblem(problem=problem, experts=experts)
        return planner.choose_gather(gather, device)

    one, several = planned(1), planned(pairs)

    assert one.simdgroups_k == several.simdgroups_k
    assert one.operand == several.operand == "exact"
    for fields in ({"operand": "offset"}, {"dot_rows": 1}):
        with pytest.raises(ValueError, match="invariant=True needs operand='exact'"):
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
def test_packed_weights_without_indices_are_chosen_in_turn() -> None:
    native = weights(4, 40, "affine", 4, 64, mx.float32)
    x = mx.random.normal((3, 1, 1, K))

    y = mlx_marlin.gather_qmm(x, pack(*native), lhs_indices=mx.array([[0], [2]]))

    expected = mx.gather_qmm(x, *native, lhs_indices=mx.array([[0], [2]]))
    assert y.shape == expected.shape == (2, 4, 1, 40)
    assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)


@sampled(1)
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


@sampled(2)
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
        with pytest.raises(ValueError, match="no gradient wrt uint"):
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


FEW = [1, 2, 0, 2, 1, 2]
"""Experts that one row chose, two rows and three."""


@sampled(3)
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
    known = format_of(mode, bits)
    form = mode, bits, max((known.group_sizes or known.packed_group_sizes)[:2])
    dtype = list(LIMITS)[bits % 3]
    k = 256 if mode in format_cases.SUPER_BLOCKS else 192
    call = Call(form, layout, 4, 41, k, 3, FEW, dtype, bits)

    y = call.run()

    rows = oracles.exact(call.x)[call.sources, 0]
    expected = np.einsum("pk,pnk->pn", rows, call.decoded[FEW])
    assert oracles.error(y.squeeze(1), expected) < LIMITS[dtype]
    assert mx.array_equal(y, call.run())
