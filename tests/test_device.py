"""A device is a row of the chip table, a wish of the user, or a safe default."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from strategies import KNOWN_DEVICES

from mlx_marlin import device
from mlx_marlin.device import DEFAULT, Device


@pytest.fixture(autouse=True)
def _ask_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(device.ENVIRONMENT, raising=False)
    device.current.cache_clear()
    yield
    device.current.cache_clear()


@pytest.mark.parametrize("name", ["Apple M3 Max", "M3 Max", "apple m3  max", "m3 max"])
def test_a_bare_name_means_its_largest_variant(name: str) -> None:
    chip = Device.named(name)

    assert (chip.name, chip.cores, chip.bandwidth_gbs) == ("Apple M3 Max", 40, 409.6)
    assert (chip.generation, chip.tier, chip.clock_ghz) == ("M3", "max", 1.38)


def test_cores_pick_the_variant_with_its_own_bandwidth() -> None:
    chip = Device.named("M4 Max", 32)

    assert (chip.cores, chip.bandwidth_gbs) == (32, 409.6)
    assert chip.variant == "Apple M4 Max 32-core GPU"


def test_cores_that_no_variant_has_replace_those_of_the_largest() -> None:
    chip = Device.named("M4 Max", 36)

    assert (chip.cores, chip.bandwidth_gbs) == (36, 546.0)
    assert chip.variant == "Apple M4 Max with 36 GPU cores"


@pytest.mark.parametrize("name", ["Apple M4 (Virtual)", "Apple M4 GPU"])
def test_virtual_machines_and_tablets_spell_the_same_chip_differently(
    name: str,
) -> None:
    assert Device.named(name) == Device.named("Apple M4")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'M0 Nano' is not one of: Apple M1, .*M5"):
        Device.named("M0 Nano")


def test_a_chip_without_published_figures_is_not_in_the_table() -> None:
    with pytest.raises(ValueError, match="M5 Ultra"):
        Device.named("Apple M5 Ultra")


@pytest.mark.parametrize("cores", [0, -4])
def test_a_device_without_cores_is_refused(cores: int) -> None:
    with pytest.raises(ValueError, match=f"cores={cores}"):
        Device.named("M1", cores)


def test_every_variant_of_the_table_is_found_by_name_and_cores() -> None:
    assert len(KNOWN_DEVICES) == 36
    for chip in KNOWN_DEVICES:
        assert Device.named(chip.name, chip.cores) == chip


def test_tensor_units_come_with_the_fifth_generation() -> None:
    with_units = {chip.generation for chip in KNOWN_DEVICES if chip.has_tensor_units}

    assert with_units == {"M5"}
    assert not DEFAULT.has_tensor_units


@pytest.mark.parametrize(
    ("wish", "cores"), [("Apple M3 Max", 40), ("M3 Max:30", 30), ("m3 max: 24", 24)]
)
def test_the_environment_decides_first(
    monkeypatch: pytest.MonkeyPatch, wish: str, cores: int
) -> None:
    monkeypatch.setenv(device.ENVIRONMENT, wish)
    monkeypatch.setattr(device, "_metal_name", lambda: "Apple M1")

    assert device.current() == Device.named("M3 Max", cores)


def test_a_wish_with_a_bad_core_count_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(device.ENVIRONMENT, "Apple M3 Max:many")

    with pytest.raises(ValueError, match=r"MLX_MARLIN_DEVICE='Apple M3 Max:many'"):
        device.current()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a device of its own")
def test_without_metal_the_default_is_planned_for() -> None:
    assert device.current() == DEFAULT


def test_the_real_core_count_of_a_known_chip_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_metal_name", lambda: "Apple M3 Max")
    monkeypatch.setattr(device, "_core_count", lambda: 30)

    assert device.current() == Device.named("M3 Max", 30)


def test_a_newer_chip_is_planned_as_the_default_of_its_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_metal_name", lambda: "Apple M6 Pro")
    chip = device.current()

    assert (chip.name, chip.generation) == ("Apple M6 Pro", "M6")
    assert chip.has_tensor_units
    assert (chip.cores, chip.clock_ghz) == (DEFAULT.cores, DEFAULT.clock_ghz)


def test_a_virtual_gpu_is_of_no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_metal_name", lambda: "Apple Paravirtual device")

    assert device.current().generation == "unknown"


def _install_ioreg(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    program = folder / "ioreg"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_core_count_is_read_from_the_registry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = """[ "$*" = "-rc AGXAccelerator -d1" ] || exit 1
echo '+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X>'
echo '      "gpu-core-count" = 38'"""
    _install_ioreg(monkeypatch, tmp_path, script)

    assert device._core_count() == 38


@pytest.mark.parametrize("script", ["exit 1", 'echo \'"model" = "Apple M3"\''])
def test_a_registry_that_does_not_say_leaves_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    _install_ioreg(monkeypatch, tmp_path, script)

    assert device._core_count() is None


def test_no_registry_tool_leaves_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert device._core_count() is None
