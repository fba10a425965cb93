"""The race on a GPU: its clock is the machine's, and a slow kernel loses."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin import cache, state
from mlx_marlin.backends import measured_results, result_files, source
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.measure import timing
from mlx_marlin.planning.measurement import STOCK
from mlx_marlin.products import this_machine
from support.models import Layers
from support.planted_text import plant

pytestmark = [
    pytest.mark.skipif(
        not mx.cuda.is_available(), reason="MLX has no CUDA device here"
    ),
    pytest.mark.cuda,
]
PRODUCTS = {
    **dict.fromkeys(("mma.cu", "mma_staged.cu", "wgmma.cu"), "extern __shared__"),
    "dequantize.cu": "marlin::dequantize",
}
"""Files of kernels that compute products, and how their work begins."""
WAIT = "for (long long start = clock64(); clock64() - start < 2000000;) {}\n"
"""About a millisecond."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setattr(cache, "folder", tmp_path.joinpath)
    monkeypatch.delenv(measured_results.ENVIRONMENT)
    monkeypatch.setattr(timing, "NOISE", 1.0)  # other tests run on the same GPU
    state.reset()
    yield tmp_path
    state.reset()


def model() -> Any:
    mx.random.seed(0)
    layer = nn.QuantizedLinear(2048, 4096, bias=False, group_size=64, bits=4)
    layer.set_dtype(mx.float16)
    mx.eval(layer.parameters())
    return Layers(layer)


def results() -> list[Any]:
    machine = measured_results.machine(this_machine.device(), "cuda")
    found = result_files.read(result_files.folder(), machine)
    return [*found.results.values()]


def test_the_race_keeps_times_of_both(kept: Path) -> None:
    converted = mlx_marlin.optimize(model())

    assert results()
    for result in results():
        assert result.us > 0
        assert result.medians_us[STOCK] > 0
    x = mx.random.normal((8, 2048)).astype(mx.float16)
    y = converted(x)
    expected = model()(x)
    assert mx.abs(y - expected).max().item() < 0.02 * mx.abs(expected).max().item()


def test_a_slow_kernel_loses_and_stock_serves(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept / "shaders"
    shutil.copytree(source.shader_folder(), folder)
    for name, line in PRODUCTS.items():
        file = folder / "cuda" / name
        text = file.read_text()
        assert line in text
        file.write_text(text.replace(line, WAIT + line, 1))
    plant(folder, monkeypatch)

    layer = mlx_marlin.optimize(model()).layers[0]

    assert results()
    assert all(each.us > 2 * each.medians_us[STOCK] for each in results())
    assert type(layer) is MarlinLinear
    assert layer.layout == "mlx"
    x = mx.zeros((8, 2048), mx.float16)
    weight = layer["weight"], layer["scales"], layer["biases"]
    assert mlx_marlin.why_not(x, *weight) is not None
