"""CUDA devices: the table, the machine's own, and the one that plans are made for."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin import cache
from mlx_marlin.backends import devices, planner
from mlx_marlin.backends.cuda import detection
from mlx_marlin.backends.cuda import device as cuda_device
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.metal import device
from mlx_marlin.backends.metal.device import ARCHITECTURE_ENVIRONMENT
from mlx_marlin.cli.main import main
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.products import this_machine
from support.choose import Choose

H200 = CudaDevice.named("NVIDIA H200")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(devices.ENVIRONMENT, raising=False)
    devices.current.cache_clear()
    yield
    devices.current.cache_clear()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, "NVIDIA H200") for name in ("H200", "nvidia h200", "NVIDIA  H200 ")),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_device_is_found_by_its_name_or_an_alias(name: str, found: str) -> None:
    device = devices.named(name)
    assert device.name == found
    assert device == CudaDevice.named(found)


def test_another_number_of_multiprocessors_is_another_variant() -> None:
    part = devices.named("H200", 66)

    assert isinstance(part, CudaDevice)
    assert (part.multiprocessors, part.name) == (66, "NVIDIA H200")
    assert part.variant == "NVIDIA H200 with 66 multiprocessors"
    assert devices.named("H200", 132) == H200
    assert (H200.cores, H200.arch, H200.capability) == (132, "sm_90", (9, 0))
    assert devices.named("M3 Max", 30) == device.Device.named("M3 Max", 30)


def test_an_unknown_device_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'NVIDIA Q1' is not one of: .*NVIDIA H200"):
        devices.named("NVIDIA Q1")


@pytest.mark.parametrize(
    ("field", "value"), [("multiprocessors", 0), ("tflops", -1.0), ("arch", "gfx9")]
)
def test_figures_that_make_no_device_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(H200, **{field: value})


def test_every_figure_of_the_table_has_a_source() -> None:
    text = files("mlx_marlin").joinpath("data/gpus.json").read_text("utf-8")
    table = json.loads(text)

    for row in table["gpus"]:
        assert row["sources"].keys() == row.keys() - {"name", "aliases", "sources"}
        for source in row["sources"].values():
            assert source.split()[0] in table["sources"]
    assert len(table["gpus"]) >= 8


def test_the_default_asks_for_no_more_than_any_known_device_has() -> None:
    for gpu in cuda_device.gpus().values():
        assert cuda_device.DEFAULT.multiprocessors <= gpu.multiprocessors
        assert cuda_device.DEFAULT.shared_bytes <= gpu.shared_bytes
        assert cuda_device.DEFAULT.bandwidth_gbs <= gpu.bandwidth_gbs


class Driver:
    """Stands for the driver's library: what it says of multiprocessors and memory."""

    def __init__(self, **attributes: int) -> None:
        self.says = {
            detection.MULTIPROCESSORS: attributes.get("multiprocessors", 0),
            detection.SHARED_BYTES: attributes.get("shared", 0),
        }

    def cuDeviceGet(self, _: Any, index: int) -> int:  # noqa: N802
        return index

    def cuDeviceGetAttribute(self, value: Any, name: int, _: Any) -> int:  # noqa: N802
        value._obj.value = self.says[name]
        return 0 if self.says[name] else 1

    def cuDriverGetVersion(self, value: Any) -> int:  # noqa: N802
        value._obj.value = 13000
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Returns what makes a machine with a CUDA device."""

    def make(name: str, driver: Driver | None, default: mx.DeviceType = mx.gpu) -> None:
        info = {"device_name": name, "architecture": "sm_90"}
        monkeypatch.setattr(detection, "_driver", lambda: driver)
        monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(default))
        monkeypatch.setattr(mx, "stream", lambda _: nullcontext())
        monkeypatch.setattr(mx, "device_info", lambda _: info)
        monkeypatch.setattr(cache, "folder", lambda name: tmp_path / name)
        monkeypatch.setattr("sys.platform", "linux")

    return make


PART = replace(
    H200,
    multiprocessors=60,
    shared_bytes=100000,
    variant="NVIDIA H200 with 60 multiprocessors",
)


@pytest.mark.parametrize(
    ("driver", "default", "expected"),
    [
        (Driver(multiprocessors=132, shared=232448), mx.gpu, H200),
        (Driver(multiprocessors=60, shared=100000), mx.gpu, PART),
        (Driver(), mx.gpu, H200),  # which says nothing
        (Driver(), mx.cpu, H200),  # the next call may be on another
    ],
)
def test_a_known_device_has_its_stated_figures_or_the_drivers(
    machine: Callable[..., None],
    driver: Driver,
    default: mx.DeviceType,
    expected: CudaDevice,
) -> None:
    machine("NVIDIA H200", driver, default)

    assert devices.current() == expected


def test_an_unknown_device_is_measured_once(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("NVIDIA Q1", Driver(multiprocessors=50, shared=101376))
    asked: list[str] = []
    monkeypatch.setattr(
        detection, "_bandwidth_gbs", lambda: asked.append("memory") or 700.0
    )
    monkeypatch.setattr(detection, "_tflops", lambda: asked.append("matrix") or 200.0)

    first = detection.detect_device()
    second = detection.detect_device()

    assert first == second
    assert first is not None
    assert asked == ["memory", "matrix"]
    assert (first.bandwidth_gbs, first.tflops) == (700, 200)
    assert (first.multiprocessors, first.arch) == (50, "sm_90")
    assert first.variant == "NVIDIA Q1, measured"


def test_what_cannot_be_measured_is_planned_as_a_small_device(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine("NVIDIA Q1", Driver())

    def no_room() -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(detection, "_bandwidth_gbs", no_room)

    found = detection.detect_device()

    assert found is not None
    assert found.name == "NVIDIA Q1"
    assert found.multiprocessors == cuda_device.DEFAULT.multiprocessors
    assert not (tmp_path / "gpus").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"tflops": "x"}', '{"bandwidth_gbs": 1}'])
def test_a_kept_file_that_is_odd_is_measured_anew(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "folder", lambda name: tmp_path / name)
    cache.write(cache.folder("gpus"), "kept.json", text.encode())

    with pytest.warns(RuntimeWarning, match="GPU in .*kept.json is ignored: "):
        assert detection._read("kept.json") is None


def test_figures_that_others_may_have_written_are_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "folder", lambda name: tmp_path / name)
    figures = detection.Figures(700.0, 200.0)
    detection._write("kept.json", figures)
    assert detection._read("kept.json") == figures

    (tmp_path / "gpus" / "kept.json").chmod(0o666)

    assert detection._read("kept.json") is None


def test_the_probe_measures_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "COPIED", 2**12)
    monkeypatch.setattr(detection, "SIDE", 16)

    for measured in (detection._bandwidth_gbs(), detection._tflops()):
        assert measured > 0
        assert measured == float(f"{measured:.2g}")


def test_without_a_driver_mlx_is_not_asked(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("NVIDIA H200", None)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: pytest.fail("asked"))

    assert devices.current() == device.DEFAULT


def test_the_environment_may_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.ENVIRONMENT, "NVIDIA H200, 100 cores")
    monkeypatch.setenv(ARCHITECTURE_ENVIRONMENT, "applegpu_g15s")

    found = devices.current()

    assert isinstance(found, CudaDevice)
    assert (found.cores, found.arch) == (100, "sm_90")


@pytest.mark.parametrize(
    ("back_end", "wish", "expected"),
    [
        ("cuda", None, cuda_device.DEFAULT),
        ("cuda", "H200", H200),
        ("emulator", None, device.DEFAULT),
        ("emulator", "M3", device.Device.named("M3")),
    ],
)
def test_plans_are_made_for_what_the_back_end_runs_on(
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    back_end: str,
    wish: str | None,
    expected: PlanningDevice,
) -> None:
    backend(back_end)
    if wish:
        monkeypatch.setenv(devices.ENVIRONMENT, wish)

    assert this_machine.device() == expected


@pytest.mark.parametrize(
    ("back_end", "wish", "words"),
    [
        ("cuda", "M3 Max", "expected a CUDA device, because our kernels run on cuda"),
        ("emulator", "H200", "'H200': expected an Apple chip, because our"),
    ],
)
def test_a_device_of_another_back_end_is_an_error(
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    back_end: str,
    wish: str,
    words: str,
) -> None:
    backend(back_end)
    monkeypatch.setenv(devices.ENVIRONMENT, wish)

    with pytest.raises(ValueError, match=words):
        this_machine.device()
    assert main(["tune", "8x4096x4096", "--dry-run"]) != 0
    assert words in capsys.readouterr().err


def test_what_would_be_tuned_is_listed(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend("cuda")
    monkeypatch.setenv(devices.ENVIRONMENT, "H200")

    assert main(["tune", "16x4096x4096", "--dry-run", "--layout", "both"]) == 0

    said = capsys.readouterr().out
    assert all(f", {kernel} 16 rows" in said for kernel in OF_CUDA)
    # Of the layout that it reads, and there is no model of it.
    assert len(re.findall(r"^stock MLX *$", said, re.MULTILINE)) == 1


def test_a_plan_can_be_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.plan(4, 4096, 4096, chip="H200").plan.kernel == "mma"
    assert main(["plan", "4", "4096", "4096", "--chip", "H200", "--all"]) == 0

    said = capsys.readouterr().out
    assert "NVIDIA H200: 132 multiprocessors, 4800 GB/s, 989 TFLOP/s" in said
    assert "served by this plan, where nobody has measured" in said
    assert "hytis: no plan" in said
