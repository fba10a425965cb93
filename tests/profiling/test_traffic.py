"""The bytes of products in every format, and what plans request."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import metal_emulator
from mlx_marlin.backends import devices, graph, planner
from mlx_marlin.measure import operands
from mlx_marlin.measure.profiling import OperandBytes, Traffic
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.problem import problem_of
from mlx_marlin.weights.formats import CHANNEL
from support.choose import Choose
from support.format_cases import GROUPED, layouts_of, step_of
from support.marks import needs_emulator
from support.profiles import sampled

M3_MAX = devices.named("M3 Max")
FORMATS = [(*row, layout) for row in GROUPED for layout in layouts_of(*row)]
PARAMETERS = {"affine": (2, 2), "symmetric": (2, 0), "zero_point": (2, 2)}
PARAMETERS |= {"codebook": (2, 0), "k_codebook": (1.25, 0)}
PARAMETERS |= {"k_quant 4": (1.25, 1.25), "k_quant 5": (1.25, 1.25)}
PARAMETERS |= {"k_quant 3": (1.125, 0), "k_quant 6": (1.125, 0)}
PARAMETERS |= {"k_quant 2": (0.625, 0.625)}
"""Bytes of a scale and of an offset by mode; the other modes have a byte and none."""


@given(
    st.sampled_from(FORMATS),
    st.sampled_from([1, 2, 7, 512]),
    st.integers(1, 300),
    st.integers(1, 4),
)
def test_each_operand_counts_once_in_every_format(
    format: tuple[str, int, int, str], m: int, n: int, steps: int
) -> None:
    mode, bits, group_size, layout = format
    k = step_of(mode, bits, group_size) * (1 if group_size == CHANNEL else steps)
    group = group_size or k
    problem = problem_of(m, n, k, mode=mode, bits=bits, group_size=group, layout=layout)
    kind = f"{mode} {bits}" if mode == "k_quant" else mode
    scale, offset = PARAMETERS.get(kind, (1, 0))

    found = OperandBytes.of(problem)

    assert found.codes == n * k * bits / 8
    assert found.scales == n * (k / group) * scale
    assert found.offsets == n * (k / group) * offset
    assert (found.activations, found.result) == (m * k * 2, m * n * 2)
    assert found.epilogue == 0
    assert found.total == problem.bytes


def test_operands_of_an_epilogue_count_too() -> None:
    epilogue = Epilogue(multiply=True, residual=True)
    problem = problem_of(3, 64, 128, epilogue=epilogue)

    found = OperandBytes.of(problem)

    assert found.epilogue == 2 * found.result == 2 * 3 * 64 * 2
    assert found.total == problem.bytes


@sampled(3)
@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"),
    [
        (1, 512, 1024, "gemv"),
        (3, 96, 2048, "gemv"),
        (8, 512, 1024, "gemm_register"),
        (33, 256, 512, "gemm_register"),
        (64, 128, 512, "gemm_register"),
        (24, 128, 512, "gemm_staged"),
    ],
)
@needs_emulator
def test_plans_request_what_the_emulator_counts(
    backend: Choose, m: int, n: int, k: int, kernel: str
) -> None:
    backend("emulator")
    problem = problem_of(m, n, k, mode="mxfp8")  # each scale is one byte of each row
    plan = planner.make(problem, device=M3_MAX, kernel=kernel)
    inputs = operands.operands(problem, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", metal_emulator.EmulatorWarning)
        launches = metal_emulator.trace(
            graph.product(plan), inputs.x, *inputs.weights[0]
        )

    found, first = Traffic.of(plan), launches[0]

    x, codes = first.of("x"), first.of("w")
    assert x.read_bytes == found.activation_reads * problem.activation_bytes
    assert codes.read_bytes == found.weight_reads * problem.code_bytes
    if plan.is_split:
        sums = first.of("out").written_bytes, launches[1].of("partials").read_bytes
        assert sum(sums) == found.workspace
    assert found.total >= problem.bytes


def test_a_split_adds_its_workspace() -> None:
    problem = problem_of(4, 64, 4096)
    whole, split = (
        planner.make(problem, device=M3_MAX, strategy=strategy, kernel="gemv", **slices)
        for strategy, slices in (("data_parallel", {}), ("split_k", {"k_parallel": 4}))
    )

    assert Traffic.of(whole).workspace == 0
    # Each of 4 slices writes 4 x 64 float32 sums, which are read back.
    assert Traffic.of(split).workspace == 2 * 4 * 4 * 64 * 4
    more = Traffic.of(split).total - Traffic.of(whole).total
    assert more == Traffic.of(split).workspace
