"""No text keeps a compiler busy for ever, or fills memory or disk with it."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import metal_emulator
from metal_emulator.compiling import limited
from support.marks import needs_emulator
from support.metal_sources import each_thread, run
from support.profiles import sampled

pytestmark = needs_emulator
Check = Callable[[str, str], object]

DOUBLED = """
template <long A, int N>
struct F {
  static constexpr constant int v = F<2 * A, N - 1>::v + F<2 * A + 1, N - 1>::v;
};
template <long A>
struct F<A, 0> { static constexpr constant int v = 1; };
constant int all = F<0, 40>::v;
"""
TENFOLD = "#define M0 1+1\n" + "".join(
    f"#define M{n} {'+'.join([f'M{n - 1}'] * 10)}\n" for n in range(1, 10)
)
LARGE = "constant int large[1 << 28] = {1};\n"
ENDLESS_FILE = '#include "/dev/zero"\n'


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for trace in (False, True):  # what all kernels share is built before
        with metal_emulator.emulated(trace=trace):
            each_thread("1.0f")
    monkeypatch.setattr(limited, "SECONDS", 2)
    monkeypatch.setattr(limited, "MEMORY_BYTES", 1 << 30)


def runs(header: str, body: str) -> None:
    run(body, header=header)


def runs_traced(header: str, body: str) -> None:
    with metal_emulator.emulated(trace=True):
        run(body, header=header)


def checks(header: str, body: str) -> None:
    metal_emulator.check_text(
        f"{header}kernel void f(device float* out [[buffer(0)]]) {{ {body} }}"
    )


@sampled(3)
@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("check", "header", "body"),
    [
        *((check, DOUBLED, "out[0] = all;") for check in (runs, runs_traced, checks)),
        *((check, TENFOLD, "out[0] = M9;") for check in (runs, runs_traced, checks)),
        (runs_traced, "", "float t[1 << 28]; t[int(out[1])] = 2; out[0] = t[3];"),
        (runs, LARGE, "out[0] = large[int(out[1])];"),
    ],
)
def test_a_compile_bomb_is_stopped(check: Check, header: str, body: str) -> None:
    with pytest.raises(
        metal_emulator.CompileError, match="the compiler exceeds a limit"
    ):
        check(header, body)


@pytest.mark.parametrize("check", [runs, checks])
def test_an_endless_file_that_is_included_ends(check: Check) -> None:
    """Clang reads no device; what counts is that it does not wait for one."""
    check(ENDLESS_FILE, "out[0] = 1;")


@pytest.mark.usefixtures("limits")
def test_a_pipe_that_is_included_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h")

    with pytest.raises(
        metal_emulator.CompileError, match="the compiler exceeds a limit"
    ):
        run("out[0] = 1;", header=f'#include "{tmp_path}/pipe.h"\n')


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (subprocess.TimeoutExpired("cc", 120), limited.ExceededError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_a_compiler_has_started_ends_with_it(
    cause: BaseException,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = tmp_path / "child"

    def communicate(*_: object, **__: object) -> None:
        while not started.exists() or not started.read_text().endswith("\n"):
            time.sleep(0.01)
        raise cause

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(raised):
        limited.run(("/bin/sh", "-c", "sleep 1000 & echo $! > child; wait"), tmp_path)

    while is_alive(int(started.read_text())):
        time.sleep(0.01)


def test_messages_count_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "FILE_BYTES", 1 << 20)

    with pytest.raises(limited.ExceededError):
        limited.run(("/bin/sh", "-c", "while true; do echo error: again; done"))
