"""Which compiler is used: the first that builds a kernel, and why others are not."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import cache
from metal_emulator.compiling import build, clangs, compiler
from support.marks import needs_emulator
from support.metal_sources import each_thread, to_numpy
from support.processes import HANG_SECONDS
from support.profiles import sampled

pytestmark = [
    needs_emulator,
    pytest.mark.skipif(os.name != "posix", reason="the compilers here are scripts"),
]

Script = Callable[..., str]
HERE = compiler.find()
assert HERE is not None
AS_HERE = 20 if HERE.traps_name_checks else 19
"""The version that a script for the compiler in use states: it decides the flags."""
VERSION = 'echo "clang version {version}.1.2"'
SEARCH_PATH = os.environ["PATH"]
ROOT = cache.root
"""Of the user's cache, which has what the compiler in use has built."""
WORKING = """
PATH='{path}'
case "$*" in
  --version) echo "clang version {version}.1.2" ;;
  *-shared*) shift 2; exec {linker} "$@" ;;
  *) exec {clang} "$@" -O0 ;;
esac
"""
"""A clang that runs the compiler in use, which may need a linker of the search path.
To link it gets `-nostdlib -shared` first. It optimises nothing, which is faster."""
RUN_TIME_ONLY = """
case "$*" in
  *translation.cpp*) echo "error: this kernel is too hard" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forgets what was found and built, hides the wheel and every clang."""
    monkeypatch.delenv(clangs.ENVIRONMENT, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setattr(cache, "root", lambda: tmp_path / "cache")
    forget()
    yield
    forget()


def forget() -> None:
    compiler.search.cache_clear()
    compiler.unavailable.cache_clear()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Returns what writes a program into the first folder of the search path."""

    def write(name: str, *lines: str, version: int = AS_HERE) -> str:
        assert HERE is not None
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        commands = {
            "version": version,
            "path": SEARCH_PATH,
            "linker": " ".join(HERE.linker),
            "clang": " ".join(HERE.clang),
        }
        text = "\n".join(lines)
        for key, value in commands.items():
            text = text.replace(f"{{{key}}}", str(value))
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            ("echo 'I cannot start' >&2", "exit 1"),
            "`--version` does not name a clang, but prints I cannot start",
        ),
        ((RUN_TIME_ONLY, WORKING), "error: this kernel is too hard"),
    ],
    ids=["does not start", "builds the run time alone"],
)
def test_a_failing_clang_is_passed_over(
    lines: tuple[str, ...], why: str, empty: None, script: Script
) -> None:
    bad = script("clang", *lines)
    good = script("clang-20", WORKING)

    found, failures = compiler.search()

    assert found is not None
    assert found.clang == (good,)
    assert failures == (f"{bad} does not work: {why}",)
    assert compiler.unavailable() is None


def test_a_second_clang_of_one_name_is_tried(
    empty: None, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = script("clang", WORKING)
    first = tmp_path / "first"
    first.mkdir()
    (first / "clang").write_text("#!/bin/sh\nexit 1\n")
    (first / "clang").chmod(0o755)
    monkeypatch.setenv("PATH", f"{first}{os.pathsep}{Path(good).parent}")

    found = compiler.find()

    assert found is not None
    assert found.clang == (good,)


@pytest.mark.skipif(
    HERE is None or "ziglang" not in HERE.clang[0], reason="the wheel is not in use"
)
def test_the_wheel_comes_first(
    empty: None, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ziglang")
    monkeypatch.setattr(cache, "root", ROOT)
    script("clang", WORKING)

    assert compiler.search() == (HERE, ())


def test_when_all_fail_the_reason_names_each_and_what_failed(
    empty: None, script: Script
) -> None:
    scripts = [
        script("clang", "echo clang version 14.0.6"),
        script("clang-21", VERSION, version=21),
        script("clang-20", RUN_TIME_ONLY, WORKING),
    ]

    assert compiler.find() is None
    assert compiler.unavailable() == (
        f"{scripts[0]} does not work: its version is 14, expected 19 or later; "
        f"{scripts[1]} does not work: {scripts[1]} has written no library; "
        f"{scripts[2]} does not work: error: this kernel is too hard"
    )


def test_without_any_compiler_the_reason_says_so(empty: None) -> None:
    reason = compiler.unavailable()

    assert reason == (
        "there is neither the wheel 'ziglang' nor a clang >= 19: pip install "
        '".[emulator]" in a checkout of mlx_marlin'
    )


def test_the_environment_chooses_a_compiler_by_path_or_name(
    empty: None, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("clang", WORKING)
    mine = script("mine", WORKING)

    for value in (mine, "mine"):
        forget()
        monkeypatch.setenv("MLX_MARLIN_CLANG", value)
        found = compiler.find()
        assert found is not None
        assert found.clang == (mine,)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no such program"),
        ("exit 3", "`--version` does not name a clang, but prints nothing"),
        ("echo clang version 18.1.8", "its version is 18, expected 19 or later"),
        (RUN_TIME_ONLY + WORKING, "error: this kernel is too hard"),
    ],
)
def test_a_compiler_that_was_chosen_is_not_replaced_by_another(
    empty: None,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    why: str,
) -> None:
    script("clang", WORKING)
    if text is not None:
        script("mine", text)
    monkeypatch.setenv("MLX_MARLIN_CLANG", "mine")

    assert compiler.find() is None
    assert compiler.unavailable() == f"MLX_MARLIN_CLANG='mine' does not work: {why}"


def test_a_damaged_wheel_is_passed_over(
    empty: None, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "ziglang")
    good = script("clang", WORKING)

    found, failures = compiler.search()

    assert found is not None
    assert found.clang == (good,)
    assert len(failures) == 1
    assert f"the wheel 'ziglang' ({package / 'zig'}) does not work" in failures[0]


def test_a_second_process_finds_the_compiler_without_running_it(
    empty: None, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HERE is not None
    monkeypatch.setenv("PATH", SEARCH_PATH)
    monkeypatch.setattr(cache, "root", ROOT)
    candidate = clangs.Candidate("it", lambda: HERE)
    monkeypatch.setattr(clangs, "candidates", lambda: iter([candidate]))
    compiler.search()
    forget()
    monkeypatch.setattr(build, "run", None)

    assert compiler.search() == (HERE, ())


SPECIAL = [1.5, -2.0, 0.0, float("nan"), float("inf"), -float("inf"), 3.0, -0.25]


@sampled(2)
@pytest.mark.parametrize("lacks_builtins", [False, True])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_a_nan_loses_against_a_number(
    dtype: mx.Dtype, lacks_builtins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clang 19 and 20 lack the element-wise builtins; here they get other names."""
    if lacks_builtins:
        names = (f"__builtin_elementwise_{name}num" for name in ("min", "max"))
        hidden = ("-D__has_builtin(name)=0", *(f"-D{name}=missing" for name in names))
        monkeypatch.setattr(build, "METAL_FLAGS", (*build.METAL_FLAGS, *hidden))
    a = mx.array([x for x in SPECIAL for _ in SPECIAL], dtype)
    b = mx.array(SPECIAL * len(SPECIAL), dtype)
    size = {"grid": a.size, "shape": a.shape, "dtype": dtype}

    for metal, numpy in (("min", np.fmin), ("max", np.fmax)):
        expected = numpy(to_numpy(a), to_numpy(b))
        for name in (metal, f"f{metal}", f"fast::{metal}"):
            result = each_thread(f"{name}(a[i], b[i])", a, b, **size)
            np.testing.assert_array_equal(result, expected)


CLANG_19 = shutil.which("clang-19")
COMPUTE = """
import mlx.core as mx
import metal_emulator
from mlx_marlin import quantized_matmul
from mlx_marlin.backends import graph
from metal_emulator.compiling import compiler
x = mx.random.normal((4, 256))
native = mx.quantize(mx.random.normal((64, 256)))
y = quantized_matmul(x, *native)
assert mx.abs(y - mx.quantized_matmul(x, *native)).max().item() < 1e-3
metal_emulator.check(
    name="twice", input_names=["a"], output_names=["b"],
    source="uint i = thread_position_in_grid.x; b[i] = 2 * a[i];",
    calls=[dict(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype],
                grid=(1024, 1, 1), threadgroup=(32, 1, 1))],
)
print(len(graph.plans_built()), compiler.find().clang[0])
"""


@pytest.mark.skipif(CLANG_19 is None, reason="there is no clang-19 on the search path")
def test_clang_19_compiles_our_kernels(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MLX_MARLIN_CLANG": "clang-19",
        "MLX_MARLIN_BACKEND": "emulator",
        "XDG_CACHE_HOME": str(tmp_path),
    }

    answer = subprocess.run(
        [sys.executable, "-c", COMPUTE],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=environment,
    )

    assert answer.stdout.split() == ["1", CLANG_19], answer.stderr
