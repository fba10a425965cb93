"""No text keeps a compiler busy for ever, or fills memory or disk with it."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st

from metal_emulator import (
    CompileError,
    EmulatorError,
    check_text,
    emulated,
    library,
)
from metal_emulator.compiling import limited
from support.marks import needs_emulator
from support.metal_sources import each_thread, run
from support.profiles import drawn, sampled

pytestmark = needs_emulator
Bomb = Callable[[int], tuple[str, str]]


@pytest.fixture(scope="module")
def limits() -> Iterator[None]:
    """Lowers the limits, once what all kernels share is built."""
    for trace in (False, True):
        with emulated(trace=trace):
            each_thread("1.0f")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limited, "SECONDS", 1)
        patch.setattr(limited, "MEMORY_BYTES", 1 << 30)
        patch.setattr(limited, "FILE_BYTES", 16 << 20)
        yield


def templates(size: int) -> tuple[str, str]:
    header = (
        "template <long A, int N> struct F { static constexpr constant int v ="
        " F<2 * A, N - 1>::v + F<2 * A + 1, N - 1>::v; };\n"
        "template <long A> struct F<A, 0> { static constexpr constant int v = 1; };\n"
    )
    return header, f"out[0] = F<0, {size}>::v;"


def macros(size: int) -> tuple[str, str]:
    doubled = (f"#define M{n} M{n - 1}+M{n - 1}\n" for n in range(1, size + 1))
    return f"#define M0 1\n{''.join(doubled)}", f"out[0] = M{size};"


def arrays(size: int) -> tuple[str, str]:
    return f"constant int t[1 << {size % 31}] = {{1}};\n", "out[0] = t[int(out[1])];"


def private_arrays(size: int) -> tuple[str, str]:
    array = f"float t[1 << {size % 31}]"
    return "", f"{array}; t[int(out[1])] = 1; out[0] = t[int(out[2])];"


def nested(size: int) -> tuple[str, str]:
    return "", f"out[0] = {'(' * 8 * size}1{')' * 8 * size};"


def steps(size: int) -> tuple[str, str]:
    header = "constexpr int f(int n) { int s = 0; for (int i = 0; i < n; ++i) ++s; "
    return (
        f"{header}return s; }}\n",
        f"constexpr int s = f(1 << {size % 31}); out[0] = s;",
    )


def compiled(text: tuple[str, str], how: str) -> None:
    """Compiles a header and a body for a run, a trace or the static check."""
    header, body = text
    if how == "checked":
        kernel = f"kernel void f(device float* out [[buffer(0)]]) {{ {body} }}"
        check_text(header + kernel)
    else:
        with emulated(trace=how == "traced"):
            run(body, header=header, init_value=0)


HOW = ("run", "traced", "checked")


@sampled(3)
@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("bomb", "size", "how"),
    [
        *((templates, 40, how) for how in HOW),
        *((macros, 30, how) for how in HOW),
        (private_arrays, 28, "traced"),
        (arrays, 28, "run"),
    ],
)
def test_a_compile_bomb_is_stopped(bomb: Bomb, size: int, how: str) -> None:
    with pytest.raises(CompileError, match="the compiler exceeds a limit"):
        compiled(bomb(size), how)


@pytest.mark.usefixtures("limits")
def test_a_bomb_in_a_condition_is_stopped_once() -> None:
    header, body = macros(30)

    with pytest.raises(CompileError, match="not preprocessed: the compiler exceeds"):
        library(f"{header}#if M30\n#endif\nkernel void f() {{ {body} }}")


@pytest.mark.usefixtures("limits")
@drawn(
    5,
    bomb=st.sampled_from((templates, macros, arrays, private_arrays, nested, steps)),
    size=st.integers(0, 40),
    how=st.sampled_from(HOW),
)
def test_a_bomb_of_any_size_ends(bomb: Bomb, size: int, how: str) -> None:
    with suppress(EmulatorError):
        compiled(bomb(size), how)


@pytest.mark.parametrize("how", ["run", "checked"])
def test_an_endless_file_that_is_included_ends(how: str) -> None:
    """Clang reads no device; what counts is that it does not wait for one."""
    compiled(('#include "/dev/zero"\n', "out[0] = 1;"), how)


@pytest.mark.usefixtures("limits")
def test_a_pipe_that_is_included_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h")

    with pytest.raises(CompileError, match="the compiler exceeds a limit"):
        compiled((f'#include "{tmp_path}/pipe.h"\n', "out[0] = 1;"), "run")


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("raised", [limited.ExceededError, KeyboardInterrupt])
def test_what_a_compiler_has_started_ends_with_it(
    raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "child"

    def interrupted(*_: object) -> None:
        while not started.exists() or not started.read_text().endswith("\n"):
            time.sleep(0.01)
        raise KeyboardInterrupt

    if raised is KeyboardInterrupt:
        monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    else:
        monkeypatch.setattr(limited, "SECONDS", 2)
    with pytest.raises(raised):
        limited.run(("/bin/sh", "-c", "sleep 1000 & echo $! > child; wait"), tmp_path)

    while is_alive(int(started.read_text())):
        time.sleep(0.01)


def test_messages_count_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "FILE_BYTES", 1 << 20)

    with pytest.raises(limited.ExceededError):
        limited.run(("/bin/sh", "-c", "while true; do echo error: again; done"))
