"""Documents as `mlx-marlin bench` and `make mac` write them, with made-up times."""

import json
from dataclasses import replace
from typing import Any

from mlx_marlin.measure import result_file
from mlx_marlin.measure.rows import (
    CLOCKS,
    DEQUANTIZED,
    OURS,
    STOCK,
    ProductRow,
    Stage,
    Timing,
)
from mlx_marlin.planning.problem import problem_of
from support.benchmark_rows import mac_file

ARMS = {
    (OURS, "mlx"): 1.0,
    (OURS, "marlin"): 0.9,
    (STOCK, "mlx"): 1.7,
    (DEQUANTIZED, "mlx"): 4.0,
}
"""Arm and layout -> its time in comparison with the first."""
ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 512)
SHAPES = ((4096, 4096), (14336, 4096))


def result(method: str = "wall time", most: int = 512) -> dict[str, Any]:
    """Returns a whole document."""

    def timing(milliseconds: float) -> Timing:
        seconds = milliseconds / 1e3
        spread = {"range": seconds / 40, "samples": 7, "drift": 0.004}
        return Timing(seconds=seconds, method=method, **spread)

    whole = mac_file()
    products = [
        ProductRow(
            problem=problem_of(m, n, k, layout=layout),
            arm=arm,
            clock=clock,
            timing=timing(n * k / 1e9 * factor * (5 + -(-m // 8)) * clock_factor),
            plan=None,
            handover="predicted 1.0 times stock's speed" if m > 64 else None,
        )
        for n, k in SHAPES
        for m in ROWS
        for (arm, layout), factor in ARMS.items()
        for clock, clock_factor in zip(CLOCKS, (1.0, 0.8), strict=True)
        if m <= most
    ]
    generation = [
        replace(row, streams=streams, prompt=timing(20.5), step=timing(31.25))
        for streams in (1, 2, 4)
        for row in whole.generation
    ]
    first = [
        replace(row, cold=timing(1500), warm=timing(250)) for row in whole.first_tokens
    ]
    doctor = Stage(name="doctor", status="passed", host_seconds=41.2, detail="")
    filled = replace(
        whole,
        products=products,
        generation=generation,
        first_tokens=first,
        stages=[doctor, *whole.stages],
    )
    written: dict[str, Any] = json.loads(result_file.text(filled))
    return written
