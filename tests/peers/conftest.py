"""The headers under test, and the table of what was measured."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from _pytest.terminal import TerminalReporter

import metal_emulator
from peers import llama_cpp, mlx_headers
from peers.mlx_products import Record


def _header(*files: str) -> Any:
    """Returns a fixture: the text of some of MLX's headers."""

    @pytest.fixture(scope="session")
    def header() -> str:
        return mlx_headers.flattened(*files)

    return header


GEMM, GEMM_NAX = "steel/gemm/gemm.h", "steel/gemm/gemm_nax.h"
KERNELS = "steel/gemm/kernels/steel_gemm"
affine_header = _header(GEMM, "quantized_utils.h", "quantized.h")
fp_header = _header(GEMM, "quantized_utils.h", "fp_quantized.h")
affine_nax_header = _header(GEMM_NAX, "quantized_utils.h", "quantized_nax.h")
fp_nax_header = _header(GEMM_NAX, "quantized_utils.h", "fp_quantized_nax.h")
gemm_header = _header(GEMM, f"{KERNELS}_fused.h")
gemm_nax_header = _header(GEMM_NAX, f"{KERNELS}_fused_nax.h")
thin_header = _header(GEMM_NAX, f"{KERNELS}_thin_nax.h")
attention_nax_header = _header("steel/attn/kernels/steel_attention_nax.h")


@pytest.fixture(scope="session")
def library() -> metal_emulator.Library:
    """llama.cpp's text."""
    return llama_cpp.library()


@pytest.fixture
def llama(library: metal_emulator.Library) -> llama_cpp.Llama:
    """llama.cpp's kernels."""
    return llama_cpp.Llama(library, np.random.default_rng(7))


@pytest.fixture
def header_of(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Returns what gives the text of a family of kernels, such as "fp"."""
    return lambda family: str(request.getfixturevalue(f"{family}_header"))


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Returns what adds the error of a kernel for a dtype to the table of errors."""

    def add(kernel: str, dtype: mx.Dtype, error: float) -> None:
        names = ("kernel", "dtype", "error")
        values = (kernel, str(dtype).removeprefix("mlx.core."), error)
        for name, value in zip(names, values, strict=True):
            record_property(name, value)

    return add


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
