"""A device is a row of the chip table, a wish of the user, or a safe default."""

import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_marlin.backends import devices, planner
from mlx_marlin.backends.cuda.device import gpus
from mlx_marlin.backends.metal import detection, device
from mlx_marlin.backends.metal.device import ARCHITECTURE_ENVIRONMENT, DEFAULT, Device
from mlx_marlin.cli import arguments
from mlx_marlin.planning.device import PARAVIRTUAL
from support.processes import HANG_SECONDS

KNOWN_DEVICES = [each for variants in device.chips().values() for each in variants]

Tools = Callable[..., None]


@pytest.fixture(autouse=True)
def _ask_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(devices.ENVIRONMENT, raising=False)
    monkeypatch.delenv(ARCHITECTURE_ENVIRONMENT, raising=False)
    devices.current.cache_clear()
    yield
    devices.current.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tools:
    """Makes shell scripts the only tools there are, and waits for slow ones."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(detection, "QUICK", HANG_SECONDS)
    monkeypatch.setattr(detection, "SLOW", HANG_SECONDS)

    def scripts(**tools: str) -> None:
        for name, script in tools.items():
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)

    return scripts


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, install: Tools) -> Tools:
    """Makes this machine a Mac with that Metal device and these tools."""

    def pretend(name: str = "", arch: str = "", **tools: str) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(detection, "_metal", lambda: (name, arch))
        install(**tools)

    return pretend


def says(text: str, *command: str) -> str:
    """A script that prints a text, if called as the command says."""
    return f"[ \"$*\" = '{' '.join(command[1:])}' ] || exit 1\necho '{text}'"


def ioreg(cores: int) -> str:
    lines = "+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X>\n"
    return says(f'{lines}      "gpu-core-count" = {cores}', *detection.REGISTRY_CORES)


def profiler(cores: object) -> str:
    answer = f'{{"SPDisplaysDataType" : [ {{ "sppci_cores" : {cores} }} ] }}'
    return says(answer, *detection.PROFILER_CORES)


def sysctl(name: str) -> str:
    return says(name, *detection.SYSTEM_NAME)


@pytest.mark.parametrize(
    ("name", "asked", "cores", "bandwidth", "variant"),
    [
        ("Apple M3 Max", None, 40, 409.6, "Apple M3 Max 40-core GPU"),  # the largest
        ("m3  max", None, 40, 409.6, "Apple M3 Max 40-core GPU"),
        # Virtual machines and tablets spell the same chip differently.
        ("Apple M4 (Virtual)", None, 10, 120.0, "Apple M4 10-core GPU"),
        ("Apple M4 GPU", None, 10, 120.0, "Apple M4 10-core GPU"),
        ("M4 Max", 32, 32, 409.6, "Apple M4 Max 32-core GPU"),
        ("M4 Max", 36, 36, 546.0, "Apple M4 Max with 36 GPU cores"),
    ],
)
def test_a_name_and_cores_pick_a_variant_with_its_own_bandwidth(
    name: str, asked: int | None, cores: int, bandwidth: float, variant: str
) -> None:
    chip = Device.named(name, asked)

    assert (chip.cores, chip.bandwidth_gbs) == (cores, bandwidth)
    assert chip.variant == variant
    if chip.generation == "M3":
        assert (chip.tier, chip.clock_ghz, chip.arch) == ("max", 1.38, "applegpu_g15s")


@pytest.mark.parametrize(
    ("name", "told"),
    [("Quartz", r"^[^;]*'Quartz' is not one of: Apple M1, [^;]*M5[^;]*$")]
    + [(each, "; near it: Apple M3 Max") for each in ("M3 Mux", "m3max", "M3Max")],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_the_known_ones(
    name: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Device.named(name)


@pytest.mark.parametrize(
    "name",
    [
        "Apple M3 Max, 30 cores",
        "m3 max: 30",
        "M3 Max, 30",
        "Apple M3 Max 30-core GPU",
        "Apple M3 Max with 30 GPU cores",
        "M3 Max 30 cores",
    ],
)
def test_a_name_may_have_the_cores_in_every_spelling_that_we_print(name: str) -> None:
    chip = Device.named("Apple M3 Max", 30)

    assert devices.named(name) == devices.named(name, 30) == chip
    assert planner.plan(8, 256, 256, chip=name).device == chip
    assert arguments.device(name) == chip
    with pytest.raises(ValueError, match=r"^cores=40, expected those of '"):
        devices.named(name, 40)


def test_each_device_is_found_by_the_name_that_tells_it_from_others() -> None:
    others = (chip.with_cores(33) for chip in (KNOWN_DEVICES[0], *gpus().values()))
    known = {each.variant: each for each in (*KNOWN_DEVICES, *gpus().values(), *others)}

    assert {name: devices.named(name) for name in known} == known


def test_every_figure_of_the_table_has_a_source() -> None:
    data = device._data()
    for row in data["chips"]:
        figures = {"cores", "bandwidth_gbs", "clock_ghz", "arch"}
        assert {source for source, text in row["sources"].items() if text} >= figures
    for row in data["core"]:
        figures = {"register_bytes", "threadgroup_bytes", "max_threads"}
        assert row["sources"].keys() >= figures
        assert row["is_known"] == ("ASSUMED" not in str(row["sources"]))


@pytest.mark.parametrize(("version", "units"), [("26.1", False), ("26.3.1", True)])
def test_the_kernels_version_of_macos_comes_first(
    mac: Tools, monkeypatch: pytest.MonkeyPatch, version: str, units: bool
) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    mac("Apple M5 Max", sysctl=says(version, *detection.SYSTEM_VERSION))

    assert detection.has_tensor_system() == units


@pytest.mark.parametrize("chip", KNOWN_DEVICES, ids=lambda chip: chip.variant)
def test_a_generation_decides_the_architecture_and_what_a_core_has(
    chip: Device,
) -> None:
    number, letter = chip.arch_gen, chip.size_letter
    assert chip.arch == f"applegpu_g{number}{letter}"
    assert 12 + int(chip.generation[1:]) == number
    bare = replace(chip, arch="")
    assert (bare.arch_gen, bare.size_letter) == (number, letter)

    core, is_newest = chip.core, chip.generation == "M5"
    assert (core.register_bytes, core.threadgroup_bytes) == (208 * 1024, 60 * 1024)
    assert core.max_threads == 3072
    assert core.is_known == (chip.generation in ("M1", "M2"))
    assert core.tensor_flops_per_clock == (1024 if is_newest else 0)
    assert chip.has_tensor_units == is_newest


@pytest.mark.parametrize("arch", ["g1", "applegpu", "applegpu_g15", "applegpu_g15s "])
def test_an_architecture_that_mlx_could_not_read_is_refused(arch: str) -> None:
    with pytest.raises(ValueError, match="expected an architecture such as"):
        replace(DEFAULT, arch=arch)


@pytest.mark.parametrize(
    ("end", "units"), [("16s", False), ("17g", True), ("17p", False), ("18p", True)]
)
def test_phones_are_a_number_ahead(end: str, units: bool) -> None:
    assert replace(DEFAULT, arch=f"applegpu_g{end}").has_tensor_units == units


@pytest.mark.parametrize(
    ("version", "units"),
    # A Python built for an older macOS is told 16.2 for 26.2.
    [(each, True) for each in ("", "16.2", "26.2", "26.10", "27.0", "100.1")]
    + [(each, False) for each in ("15.7.1", "16.0", "16.1", "26", "26.1.2", "9.9")],
)
def test_tensor_units_need_macos_26_2(
    mac: Tools, monkeypatch: pytest.MonkeyPatch, version: str, units: bool
) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    mac("Apple M5 Max", "applegpu_g17s", ioreg=ioreg(40))

    chip = devices.current()

    assert isinstance(chip, Device)
    assert chip.has_tensor_units == units
    assert (chip.stock_tflops > chip.tflops) == units


@pytest.mark.parametrize(
    ("wish", "cores"),
    [("Apple M3 Max", 40), ("M3 Max:30", 30), (" M3 Max,1 core ", 1)],
)
def test_the_environment_decides_first(
    monkeypatch: pytest.MonkeyPatch, mac: Tools, wish: str, cores: int
) -> None:
    mac("Apple M1", "applegpu_g13g", ioreg=ioreg(8))
    monkeypatch.setenv(devices.ENVIRONMENT, wish)

    assert devices.current() == Device.named("M3 Max", cores)


@pytest.mark.parametrize(
    ("wish", "answer"),
    [
        *(
            (wish, "expected a chip")
            for wish in ("M3 Max:many", "M3 Max, 30 cats", ":30", "M3,3,0")
        ),
        ("M3 Mox", "near it: Apple M3 Max"),
        ("M3:0", "cores=0"),
    ],
)
def test_a_wish_that_cannot_be_met_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, wish: str, answer: str
) -> None:
    monkeypatch.setenv(devices.ENVIRONMENT, wish)

    with pytest.raises(ValueError, match=f"MLX_MARLIN_DEVICE='{wish}': .*{answer}"):
        devices.current()


@pytest.mark.parametrize("wish", [None, "M5 Max, 32 cores"])
def test_mlx_s_variable_replaces_the_architecture(
    monkeypatch: pytest.MonkeyPatch, mac: Tools, wish: str | None
) -> None:
    mac("Apple M5 Max", "applegpu_g17s", ioreg=ioreg(32))
    if wish:
        monkeypatch.setenv(devices.ENVIRONMENT, wish)
    monkeypatch.setenv(ARCHITECTURE_ENVIRONMENT, "applegpu_g15d")
    chip = devices.current()

    assert (chip.generation, chip.cores) == ("M5", 32)
    assert (chip.arch_gen, chip.size_letter) == (15, "d")
    assert not chip.has_tensor_units


def test_mlx_s_variable_must_be_an_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ARCHITECTURE_ENVIRONMENT, "M5")

    with pytest.raises(ValueError, match="MLX_METAL_GPU_ARCH: arch='M5': expected"):
        devices.current()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a device of its own")
def test_elsewhere_no_tool_is_asked(install: Tools) -> None:
    install(ioreg=ioreg(40), sysctl=sysctl("Apple M3 Max"))

    assert devices.current() == DEFAULT


@pytest.mark.parametrize(
    ("name", "arch", "tools", "expected"),
    [
        (  # the registry counts the cores
            *("Apple M3 Max", "applegpu_g15s"),
            {"ioreg": ioreg(30), "system_profiler": profiler(40)},
            Device.named("M3 Max", 30),
        ),
        (  # Metal states the architecture
            *("Apple M5 Pro", "applegpu_g17g", {"ioreg": ioreg(20)}),
            replace(Device.named("M5 Pro"), arch="applegpu_g17g"),
        ),
        # The system's name stands in for one that no chip has.
        ("", "", {"sysctl": sysctl("Apple M4 (Virtual)")}, Device.named("M4")),
        ("", "", {}, DEFAULT),
    ],
)
def test_a_mac_is_what_its_tools_say(
    mac: Tools, name: str, arch: str, tools: dict[str, str], expected: Device
) -> None:
    mac(name, arch, **tools)

    assert devices.current() == expected


@pytest.mark.parametrize(
    ("arch", "wish", "generation", "in_mlx"),
    [
        ("air64_v27", None, "M1", (2, "7")),
        ("air64_v131", None, "M1", (13, "1")),
        ("", None, "M1", (13, "g")),
        ("air64_v27", "applegpu_g13g", "M1", (13, "g")),
        ("air64_v27", "applegpu_g16s", "M4", (16, "s")),
        ("air64_v27", "applegpu_g99g", "M1", (99, "g")),
    ],
)
def test_a_paravirtual_device_has_a_generation_and_what_mlx_takes_it_for(
    mac: Tools,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    wish: str | None,
    generation: str,
    in_mlx: tuple[int, str],
) -> None:
    mac(PARAVIRTUAL, arch, sysctl=sysctl("Apple M4 (Virtual)"))
    if wish:
        monkeypatch.setenv(ARCHITECTURE_ENVIRONMENT, wish)
    chip = devices.current()

    assert isinstance(chip, Device)
    assert chip.name == PARAVIRTUAL
    assert chip.generation == generation
    assert (chip.arch_gen, chip.size_letter) == in_mlx
    assert not chip.has_tensor_units


def test_a_newer_chip_is_planned_as_the_default_of_its_generation(mac: Tools) -> None:
    mac("Apple M6 Pro", "applegpu_g18s", sysctl=sysctl("Apple M6 Pro"))
    chip = devices.current()

    assert (chip.name, chip.generation) == ("Apple M6 Pro", "M6")
    assert (chip.arch, chip.has_tensor_units) == ("applegpu_g18s", True)
    assert (chip.cores, chip.clock_ghz) == (DEFAULT.cores, DEFAULT.clock_ghz)
    assert isinstance(chip, Device)
    assert chip.core == Device.named("M5").core


@pytest.mark.parametrize("brand", ["exit 1", "echo Intel"])
def test_a_gpu_of_no_known_name_is_of_no_generation(mac: Tools, brand: str) -> None:
    mac("Apple Quartz", "virtual", sysctl=brand)

    assert devices.current().generation == "unknown"


FAILING = "echo '\"gpu-core-count\" = 20'; exit 1"
HANG = "while true; do true; done"
NO_COUNT = ["exit 1", 'echo \'"model" = "Apple M3"\'', "echo '\"gpu-core-count\" = 0'"]


@pytest.mark.parametrize(
    "registry", [None, *NO_COUNT, FAILING, "printf '\\377\\376'", HANG]
)
@pytest.mark.parametrize("count", ["30", '"30"'])
def test_the_profiler_is_asked_when_the_registry_does_not_say(
    monkeypatch: pytest.MonkeyPatch, install: Tools, registry: str | None, count: str
) -> None:
    monkeypatch.setattr(detection, "QUICK", 0.5)
    tools = {} if registry is None else {"ioreg": registry}
    install(**tools, system_profiler=profiler(count))

    assert detection.gpu_cores() == 30


@pytest.mark.parametrize(
    "answer",
    [None, "exit 3", "echo garbage", profiler('"many"'), profiler(99999999), HANG],
)
def test_without_any_count_the_table_stands_in(
    monkeypatch: pytest.MonkeyPatch, mac: Tools, answer: str | None
) -> None:
    mac("Apple M3 Max", **({} if answer is None else {"system_profiler": answer}))
    monkeypatch.setattr(detection, "SLOW", 0.5)  # a tool that hangs is left

    assert detection.gpu_cores() is None
    assert devices.current() == Device.named("M3 Max")


@pytest.mark.parametrize("answer", [None, "exit 1", "echo"])
def test_a_system_without_a_name_has_none(install: Tools, answer: str | None) -> None:
    install(**({} if answer is None else {"sysctl": answer}))

    assert detection.chip_name() is None
