"""MLX's gathered products of sorted rows, unmodified: a run of rows for each weight."""

from collections.abc import Callable

import mlx.core as mx
import pytest

import metal_emulator
from peers.mlx_gathers import RUNS, Gather, error_of
from peers.mlx_products import FORMATS, TOLERANCE, Record

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("letter", "tn")
def test_runs_of_rows_meet_their_weights_and_the_trace_reports_nothing(
    mode: str,
    dtype: mx.Dtype,
    runs: str,
    letter: str,
    header_of: Callable[[str], str],
    record: Record,
) -> None:
    ragged_n = 50 if letter == "t" else 128
    n = 64 if runs == "aligned" else ragged_n
    gather = Gather(mode, dtype, RUNS[runs], n, 128, letter == "t")

    header = header_of(gather.family)

    if dtype == mx.float16 and letter == "t":
        with metal_emulator.emulated(trace=True):
            assert error_of(gather, header) <= TOLERANCE[dtype]
    error = error_of(gather, header)

    record(f"{mode} gather_qmm_rhs n{letter}", dtype, error)
    assert error <= TOLERANCE[dtype]
