"""Problems that no strategy divides evenly."""

from dataclasses import replace

from mlx_marlin.planning.problem import Problem

RAGGED = {
    "gemv": Problem(m=2, n=150, k=448),
    "gemm_register": Problem(m=11, n=150, k=448),
    "packed groups of 128": Problem(
        m=3, n=300, k=7 * 128, group_size=128, layout="marlin"
    ),
    "packed groups of 32, half a trip": Problem(
        m=13, n=150, k=11 * 32, group_size=32, layout="marlin"
    ),
}
"""Problems that no strategy divides evenly."""

RAGGED_BATCHES = {
    "batch, gemv": Problem(m=2, n=70, k=448, batch=3),
    "batch, gemm_register": Problem(m=11, n=70, k=448, batch=3),
    "batch, packed groups of 128": Problem(
        m=3, n=40, k=7 * 128, group_size=128, layout="marlin", batch=4
    ),
    "batch, packed groups of 32, half a trip": Problem(
        m=13, n=70, k=11 * 32, group_size=32, layout="marlin", batch=2
    ),
}
"""Likewise several products: ranges cross from one to the next."""


def in_float32(problem: Problem) -> Problem:
    return replace(problem, dtype="float32", scale_dtype="float32")
