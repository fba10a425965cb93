"""`exporting`: files of graphs with our kernels for a GPU that is not here."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin.backends import devices, graph, planner, selection
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products import exporting as streams
from support import exported_files
from support.choose import Choose
from support.marks import needs_emulator
from support.models import LAYOUTS, tiny_llama
from support.profiles import sampled

CHIP = "M3 Max"
N, K = 192, 256
without_gpu = pytest.mark.skipif(
    mx.is_available(mx.gpu), reason="here MLX itself assigns operations to the GPU"
)


def layer(layout: str = "mlx") -> MarlinLinear:
    mx.random.seed(1)
    linear = nn.Linear(K, N)
    linear.set_dtype(mx.float16)
    made = MarlinLinear.from_linear(linear, 64, 4, layout=layout)
    mx.eval(made.parameters())
    return made


def rows(m: int) -> mx.array:
    x = mx.random.normal((m, K), key=mx.random.key(m)).astype(mx.float16)
    mx.eval(x)
    return x


def written(file: Path, function: Any, *arrays: mx.array, chip: str = CHIP) -> Plan:
    """Exports a function, and returns the last plan that its graph was made of."""
    with mlx_marlin.exporting(chip):
        mx.export_function(str(file), function, *arrays)
        return graph.plans_built()[-1]


@sampled(2, 4)
@needs_emulator
@without_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 8])
def test_an_imported_layer_runs_on_the_emulator_with_equal_results(
    layout: str, m: int, tmp_path: Path, backend: Choose, monkeypatch: Any
) -> None:
    backend("emulator")
    own, x = layer(layout), rows(m)
    plan = written(tmp_path / "layer.mlxfn", own, x)

    nodes = exported_files.graph(exported_files.imported(tmp_path / "layer.mlxfn"), x)

    (call,) = exported_files.kernels(nodes)
    name, text = call["arguments"][:2]
    assert name.startswith(f"custom_kernel_marlin_{plan.kernel}")
    assert f"[[kernel]] void {name}(" in text
    assert call["arguments"][2] == plan.num_threadgroups * plan.threads
    (y,) = exported_files.emulated(nodes, x)
    monkeypatch.setenv(devices.ENVIRONMENT, CHIP)
    backend("emulator")
    assert mx.array_equal(y, own(x))


@without_gpu
def test_the_graph_is_that_of_the_named_gpu(tmp_path: Path, backend: Choose) -> None:
    backend(None)
    own, x = layer(), rows(8)
    found = {}
    for chip in (CHIP, "Apple M1, 7 cores"):
        plan = written(tmp_path / "layer.mlxfn", own, x, chip=chip)
        found[chip] = planner.choose(plan.problem, devices.named(chip))
        assert plan == found[chip]


@without_gpu
def test_a_model_is_written_for_the_gpu_alone(tmp_path: Path, backend: Choose) -> None:
    backend(None)
    tokens = mx.array([[1, 2, 3, 4]])
    model = mlx_marlin.optimize(tiny_llama(), layout="marlin", join=True, trace=True)
    nodes: list[dict[str, Any]] = []
    file = tmp_path / "model.mlxfn"
    with mlx_marlin.exporting(CHIP):
        mx.export_function(nodes.append, model, tokens)
        mx.export_function(str(file), model, tokens)

    data = file.read_bytes()

    primitives = [node["name"] for node in nodes if node["type"] == "primitive"]
    assert [*streams.operations(data, streams.CPU)] == []
    stored = [name for _, name in streams.operations(data, streams.GPU)]
    assert sorted(stored) == sorted(primitives)
    assert stored.count("CustomKernel") == 9  # four products a block, and the head
    assert all(
        node["arguments"][0].encode() in data for node in exported_files.kernels(nodes)
    )
    result = exported_files.imported(file)(tokens)[0]
    assert result.shape == (1, 4, 100)


@without_gpu
def test_only_streams_are_changed(tmp_path: Path) -> None:
    def function(x: mx.array) -> mx.array:
        return mx.exp(x + 1) @ mx.zeros((8, 4))

    file = tmp_path / "function.mlxfn"
    mx.export_function(str(file), function, mx.zeros((2, 8)))
    before = file.read_bytes()
    found = [start for start, _ in streams.operations(before, streams.CPU)]

    streams.move_to_gpu(file)

    assert found
    after = bytearray(file.read_bytes())
    for start in found:
        assert after[start : start + 12] != before[start : start + 12]
        after[start : start + 12] = before[start : start + 12]
    assert bytes(after) == before


@pytest.mark.usefixtures("stock")
def test_everything_is_as_before_afterwards() -> None:
    original, environment = mx.export_function, dict(os.environ)

    def fail() -> None:
        assert selection.backend() != "stock"
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), mlx_marlin.exporting(CHIP):
        fail()

    assert mx.export_function is original
    assert dict(os.environ) == environment
    assert selection.backend() == "stock"
    assert layer()(rows(2)).shape == (2, N)


@without_gpu
def test_nothing_is_computed_in_the_context(backend: Choose) -> None:
    backend(None)
    own, x = layer(), rows(2)

    with mlx_marlin.exporting(CHIP), pytest.raises(ValueError, match="cannot run"):
        mx.eval(own(x))


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("device", ["H200", "M99", "", "M3 Max, many", 3, None])
def test_another_device_is_refused_before_anything_changes(device: Any) -> None:
    with (
        pytest.raises(ValueError, match=f"device={device!r}: "),
        mlx_marlin.exporting(device),
    ):
        pytest.fail("entered")

    assert selection.backend() == "stock"


def test_an_architecture_is_its_largest_chip() -> None:
    with mlx_marlin.exporting("applegpu_g15s"):
        assert devices.current() == devices.named("M3 Max")
    assert (
        mlx_marlin.plan(8, 64, 64, chip="applegpu_g13d").device.name == "Apple M1 Ultra"
    )
