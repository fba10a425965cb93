"""The headers under test, and the table of what was measured."""

from collections import defaultdict

import numpy as np
import pytest
from _pytest.terminal import TerminalReporter

import metal_emulator
from peers import llama_cpp, mlx_headers


@pytest.fixture(scope="session")
def affine_header() -> str:
    return mlx_headers.affine()


@pytest.fixture(scope="session")
def fp_header() -> str:
    return mlx_headers.flattened(
        mlx_headers.downloaded(),
        "steel/gemm/gemm.h",
        "quantized_utils.h",
        "fp_quantized.h",
    )


@pytest.fixture(scope="session")
def affine_nax_header() -> str:
    return mlx_headers.flattened(
        mlx_headers.downloaded(),
        "steel/gemm/gemm_nax.h",
        "quantized_utils.h",
        "quantized_nax.h",
    )


@pytest.fixture(scope="session")
def fp_nax_header() -> str:
    return mlx_headers.flattened(
        mlx_headers.downloaded(),
        "steel/gemm/gemm_nax.h",
        "quantized_utils.h",
        "fp_quantized_nax.h",
    )


@pytest.fixture(scope="session")
def gemm_header() -> str:
    return mlx_headers.flattened(
        mlx_headers.downloaded(),
        "steel/gemm/gemm.h",
        "steel/gemm/kernels/steel_gemm_fused.h",
    )


@pytest.fixture(scope="session")
def gemm_nax_header() -> str:
    return mlx_headers.flattened(
        mlx_headers.downloaded(),
        "steel/gemm/gemm_nax.h",
        "steel/gemm/kernels/steel_gemm_fused_nax.h",
    )


@pytest.fixture(scope="session")
def thin_header() -> str:
    return mlx_headers.flattened(
        mlx_headers.downloaded(),
        "steel/gemm/gemm_nax.h",
        "steel/gemm/kernels/steel_gemm_thin_nax.h",
    )


@pytest.fixture(scope="session")
def library() -> metal_emulator.Library:
    """llama.cpp's kernels."""
    return llama_cpp.library()


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Prints the largest error of every kernel: the table in docs/lab."""
    errors: dict[tuple[str, str], float] = defaultdict(float)
    for report in terminalreporter.getreports("passed"):
        properties = dict(report.user_properties)
        if "error" in properties:
            key = properties["kernel"], properties["dtype"]
            errors[key] = max(errors[key], properties["error"])
    if not errors:
        return
    dtypes = ("float32", "float16", "bfloat16")
    terminalreporter.section(f"largest relative errors, MLX {mlx_headers.MLX}")
    terminalreporter.line(f"| kernel | {' | '.join(dtypes)} |\n|---|---|---|---|")
    for kernel in sorted({kernel for kernel, _ in errors}):
        cells = (errors.get((kernel, dtype)) for dtype in dtypes)
        row = " | ".join("" if cell is None else f"{cell:.1e}" for cell in cells)
        terminalreporter.line(f"| {kernel} | {row} |")
