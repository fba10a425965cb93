"""MLX's gathered products of sorted rows, unmodified: a run of rows for each weight."""

from collections.abc import Callable

import mlx.core as mx
import pytest

import metal_emulator
from peers.mlx_gathers import RUNS, Gather, error_of
from peers.mlx_products import FORMATS, TOLERANCE

pytestmark = pytest.mark.peer

MODES = pytest.mark.parametrize("mode", FORMATS)


@MODES
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[-1])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("letter", "tn")
def test_runs_of_rows_meet_their_weights(
    mode: str,
    dtype: mx.Dtype,
    runs: str,
    letter: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    ragged_n = 50 if letter == "t" else 128
    n = 64 if runs == "aligned" else ragged_n
    gather = Gather(mode, dtype, RUNS[runs], n, 128, letter == "t")

    header = request.getfixturevalue(f"{gather.family}_header")
    error = error_of(gather, header)

    record_property(
        "kernel", f"{mode} gather_qmm_rhs {'nt' if letter == 't' else 'nn'}"
    )
    record_property("dtype", str(dtype).split(".")[-1])
    record_property("error", error)
    assert error <= TOLERANCE[dtype]


@MODES
@pytest.mark.parametrize("runs", RUNS)
def test_traced_they_report_nothing(
    mode: str, runs: str, request: pytest.FixtureRequest
) -> None:
    gather = Gather(mode, mx.float16, RUNS[runs], 64, 128, True)

    header = request.getfixturevalue(f"{gather.family}_header")
    with metal_emulator.emulated(trace=True):
        assert error_of(gather, header) <= TOLERANCE[mx.float16]
