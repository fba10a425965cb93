"""The census with stand-ins for Apple's tools: what it writes, and how it fails."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import apple_tools, census, census_instances
from benchmarks.apple_tools import ARCHITECTURES
from benchmarks.census_instances import Instance
from mlx_marlin.backends.metal.source import BODIES
from support.apple_tools import link_tools
from support.processes import HANG_SECONDS
from support.profiles import sampled

Plant = Callable[..., None]


@pytest.fixture(scope="module")
def every() -> list[Instance]:
    return census_instances.every_instance()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Puts the stand-ins first on the path, with faults."""
    folder = tmp_path / "tools"
    link_tools(folder)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def faults(**planted: object) -> None:
        monkeypatch.setenv("FAKE_XCRUN", json.dumps(planted))

    faults()
    return faults


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, every: list[Instance]) -> list[Instance]:
    """Leaves a product of an M4, one that no plan has, and a tensor operation."""
    kernels = ("marlin_gemm_register", "marlin_gemm_staged", "marlin_gemm_tensor")
    newest = [each for each in every if ARCHITECTURES[-3] in each.chosen]
    first = [next(each for each in newest if each.kernel == kernels[0])]
    first += [next(each for each in every if each.kernel == k) for k in kernels[1:]]
    monkeypatch.setattr(census_instances, "every_instance", lambda: first)
    monkeypatch.setattr(census, "ARCHITECTURES", ARCHITECTURES[-3:])
    monkeypatch.setattr(census, "LIVE", (8, 120))
    return first


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], few: list[Instance]
) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Returns what runs the census: exit status, output, and the file's content."""

    def call(*more: str) -> tuple[int, str, dict[str, Any]]:
        out = tmp_path / "census.json"
        limit = ("--limit", str(HANG_SECONDS))
        status = census.main(["--out", str(out), *limit, *more])
        captured = capsys.readouterr()
        content = json.loads(out.read_text()) if out.exists() else {}
        return status, captured.out + captured.err, content

    return call


def test_the_file_has_what_the_compilers_say(run: Any, plant: Plant) -> None:
    status, said, content = run()

    assert status == 0, said
    machine = content["machine"]
    assert machine["metal"] == "Apple metal version 32023.883 (metalfe-32023.883)"
    assert (machine["standard"], machine["macos"]) == ("metal4.0", "26.2")
    register, staged, tensor = content["instances"]
    assert register["chosen"]
    assert not staged["chosen"]
    assert register["registers"] > 16
    for figures in tensor["compiled"].values():
        assert (figures["registers"], figures["spilled_bytes"]) == (60, 0)
        assert figures["code_bytes"] == 2048
    assert {*tensor["compiled"]} == {*census_instances.TENSOR_ARCHITECTURES}
    (warning,) = register["warnings"]
    assert warning.startswith("warning: unused variable")
    check = content["self_check"]["applegpu_g17s"]
    assert check["read"]
    assert check["found"]["8"] == [12, 0]
    assert check["found"]["120"] == [96, 512]


@sampled(2)
@pytest.mark.parametrize(
    ("planted", "status", "sentence"),
    [
        ({"missing": "always"}, 2, "Apple's Metal compilers are missing: metal ended"),
        ({"error": "marlin_gemm_staged"}, 1, "error: use of undeclared identifier"),
        ({"spill": "marlin_gemm_register"}, 1, "spills 256 bytes"),
        ({"spill": "marlin_gemm_staged"}, 0, "3 instances, 0 failed"),
        ({"unknown": ["applegpu_g17s"]}, 0, "g17s: unknown: metal-tt ended with 1"),
        ({"unknown": ARCHITECTURES}, 2, "unknown: metal-tt ended with 1"),
        ({"misread": "live"}, 0, "figures are unread: 8 live floats as 5 registers"),
        ({"misread": "live", "spill": "marlin"}, 0, "figures are unread"),
        ({"misread": "live", "error": "marlin"}, 1, "undeclared identifier"),
    ],
)
def test_each_fault_is_named_in_a_sentence(
    run: Any, plant: Plant, planted: dict[str, Any], status: int, sentence: str
) -> None:
    plant(**planted)

    found, said, content = run()

    assert found == status, said
    assert any(sentence in line for line in said.splitlines()), said
    assert bool(content) == (status < 2)


@pytest.mark.slow
def test_a_compiler_that_does_not_end_is_an_error(run: Any, plant: Plant) -> None:
    plant(hang="marlin_gemm_staged")

    status, said, content = run("--limit", "1")

    assert status == 1
    assert "metal did not end in 1 s" in said
    failed = [bool(each["error"]) for each in content["instances"]]
    assert failed == [False, True, False]


@pytest.mark.parametrize("missing", ["default", "component"])
def test_a_component_is_selected_or_downloaded(
    missing: str, run: Any, plant: Plant
) -> None:
    plant(missing=missing)

    assert run()[0] == 0


def test_without_any_tool_the_sentence_says_so(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, said, _ = run()

    assert status == 2
    assert "compilers are missing: xcrun: No such file" in said


@pytest.mark.parametrize(
    ("macos", "standard"), [("15.7.1", "metal3.2"), ("26.1", "metal4.0")]
)
def test_tensor_operations_wait_for_a_system_that_has_them(
    macos: str, standard: str, run: Any, plant: Plant
) -> None:
    plant(macos=macos, error="gemm_tensor")

    status, _, content = run()

    assert status == 0
    assert content["machine"]["standard"] == standard
    *_, tensor = content["instances"]
    assert tensor["skipped"] == f"macOS {macos} has no tensor operations"


def test_the_instances_are_what_plans_choose_and_cover(every: list[Instance]) -> None:
    assert 600 < len(every) <= census_instances.MOST
    bodies = {f"marlin_{name}" for name in BODIES}
    kernels = {each.kernel.removesuffix("_atomic") for each in every}
    assert bodies <= kernels
    assert kernels - bodies == {"marlin_tensor_layout_32_rows"}
    assert {each.kernel for each in census_instances.quick(every)} == {
        each.kernel for each in every
    }
    assert len(census_instances.quick(every)) == census_instances.QUICK
    for each in every:
        assert each.text.isascii()
        assert f"void {each.function}(" in each.text
        assert each.architectures
        newest = {*census_instances.TENSOR_ARCHITECTURES}
        assert not each.is_tensor or {*each.architectures} <= newest


def test_shards_have_every_instance_once(every: list[Instance]) -> None:
    shards = [census_instances.shard(every, index, 4) for index in (1, 2, 3, 4)]

    found = [each.text for shard in shards for each in shard]
    assert sorted(found) == sorted(each.text for each in every)


def test_a_format_selects_its_instances(run: Any, plant: Plant) -> None:
    format = census_instances.every_instance()[0].format
    _, _, content = run("--format", format)
    status, said, _ = run("--format", "affine-9")

    assert {each["format"] for each in content["instances"]} == {format}
    assert status == 2
    assert "no instance has the format 'affine-9'" in said


@pytest.mark.parametrize("shard", ["0/4", "5/4", "one", "1/0"])
def test_a_wrong_shard_is_refused(
    shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        census.main(["--out", "x.json", "--shard", shard])
    assert f"'{shard}', expected one such as 1/4" in capsys.readouterr().err


def test_the_prelude_of_mlx_is_installed() -> None:
    (header,) = (apple_tools.PRELUDE.split('"')[1],)

    assert (apple_tools.MLX_HEADERS / header).is_file()
