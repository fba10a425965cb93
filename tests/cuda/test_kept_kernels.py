"""Compiled CUDA kernels that are kept: names, files and fallbacks, without a GPU."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import cache, guard, state
from mlx_marlin.backends import kernels, planner, registry
from mlx_marlin.backends.base import Prepared
from mlx_marlin.backends.cuda import detection
from mlx_marlin.backends.cuda.compiling import (
    kernel_text,
    nvrtc,
    preparation,
    toolchain,
)
from mlx_marlin.backends.cuda.compiling.nvrtc import CompileError, MachineCode, Nvrtc
from mlx_marlin.backends.cuda.compiling.toolchain import Toolchain, UnavailableError
from mlx_marlin.backends.launch import Launch, Operand, Output
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.problem import problem_of
from support.cuda_launches import H200, Model
from support.recorder import Recorder

CODE = preparation.ELF + bytes(range(256))
SOURCE = Source(
    name="twice",
    input_names=("x", "numbers"),
    output_names=("out",),
    header="#define THREADS 32\n",
    source="out[0] = T(2) * x[0];",
)
LAUNCH = Launch(
    source=SOURCE,
    template=(("M", 8), ("WHOLE", True), ("SPLIT", False), ("T", "bfloat16")),
    inputs=(Operand(name="x", dtype="float16"), Operand(name="numbers", dtype="int32")),
    grid=(1, 1, 1),
    threadgroup=(1, 1, 1),
    outputs=(Output("out", "float32", (1,)),),
)
TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define THREADS 32
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_twice_8_t_f_bfloat16_t(
    const __half* x,
    const int32_t* numbers,
    float* out) {
  constexpr int M = 8;
  constexpr bool WHOLE = true;
  constexpr bool SPLIT = false;
  using T = __nv_bfloat16;

out[0] = T(2) * x[0];
}

} // namespace mlx::core::cu
"""
"""What MLX 0.32.4 compiles; test_kept_kernels_on_gpu.py compares with MLX."""


class Compiler(Nvrtc):
    """Compiles nothing: the machine code is a digest of what it would compile."""

    def __init__(self) -> None:
        self.version = "13.0"
        self.compiled: list[str] = []
        self.fault: str | None = None

    def compile_apart(
        self, text: str, function: str, options: Any, headers: Any
    ) -> MachineCode:
        if self.fault is not None:
            raise CompileError(self.fault)
        self.compiled.append(text)
        return MachineCode(f"_Z{len(text)}", CODE)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Gives the test a cache and an MLX folder of its own."""
    place = tmp_path / "mlx_marlin"
    monkeypatch.setattr(cache, "root", lambda: place)
    monkeypatch.setenv(kernel_text.ENVIRONMENT, str(tmp_path / "ptx"))
    state.reset()
    yield tmp_path
    state.reset()


@pytest.fixture
def compiler(root: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes a machine with a compiler, which is faked."""
    fake = Compiler()
    chain = Toolchain(fake, "sm_90a", ("--option",), "0.32.4", "one")
    monkeypatch.setattr(toolchain, "here", lambda: chain)
    return fake


def compiled(prepared: Prepared) -> Source:
    assert prepared.compile is not None
    prepared.compile()
    return prepared.source


def test_the_text_is_the_one_that_mlx_compiles() -> None:
    assert kernel_text.text(LAUNCH) == TEXT
    assert (
        kernel_text.qualified(LAUNCH)
        == "mlx::core::cu::custom_kernel_twice_8_t_f_bfloat16_t"
    )


def test_a_name_ends_with_the_hash_of_gnus_library() -> None:
    assert kernel_text.kernel_name(LAUNCH, "abc") == (
        "custom_kernel_twice_8_t_f_bfloat16_t_32d82bf8ed3dba39"
    )
    long = replace(LAUNCH, template=tuple((f"A{i}", 10**9) for i in range(25)))
    with pytest.raises(ValueError, match="more than 245 characters"):
        kernel_text.kernel_name(long, "abc")


def test_a_kernel_that_reads_shapes_is_not_kept() -> None:
    reading = replace(SOURCE, source="out[0] = x_shape[0];")
    with pytest.raises(ValueError, match="reads x_shape"):
        kernel_text.text(replace(LAUNCH, source=reading))


@pytest.mark.parametrize("m", [1, 16, 64])
def test_our_kernels_read_no_shapes_and_have_short_names(m: int) -> None:
    problem = problem_of(m=m, n=5120, k=17408, layout="marlin")
    plan = planner.make(problem, device=H200)
    launch = registry.named(plan.backend).launches(plan)[0]
    text = kernel_text.text(launch)
    assert "_shape" not in kernel_text.kernel_name(launch, text)


def test_a_kernel_is_compiled_once_and_found_in_the_next_process(
    compiler: Compiler, root: Path
) -> None:
    source = compiled(preparation.prepare(LAUNCH))
    assert preparation.prepare(LAUNCH) == Prepared(source)

    state.reset()  # another process
    again = preparation.prepare(LAUNCH)

    assert again == Prepared(source)
    assert source.header == SOURCE.header + "// NVRTC 13.0, sm_90a\n"
    assert len(compiler.compiled) == 1
    (text,) = compiler.compiled
    name = kernel_text.kernel_name(replace(LAUNCH, source=source), text)
    assert (root / "ptx" / f"{name}.ptx").read_bytes() == CODE
    names = f"{kernel_text.qualified(LAUNCH)}\t_Z{len(text)}\n"
    assert (root / "ptx" / f"{name}.txt").read_text() == names


def test_mlxs_folder_is_filled_from_the_cache(compiler: Compiler, root: Path) -> None:
    compiled(preparation.prepare(LAUNCH))
    files = sorted((root / "ptx").iterdir())
    contents = [file.read_bytes() for file in files]
    files[0].write_bytes(CODE[:9])  # left by a process that was killed
    files[1].unlink()

    state.reset()
    assert preparation.prepare(LAUNCH).compile is None

    assert [file.read_bytes() for file in files] == contents
    assert sorted((root / "ptx").iterdir()) == files


OTHERS = {
    "template": replace(LAUNCH, template=(("M", 16),)),
    "dtypes": replace(LAUNCH, inputs=(LAUNCH.inputs[1], LAUNCH.inputs[1])),
    "text": replace(LAUNCH, source=replace(SOURCE, source="out[0] = T(3);")),
    "compiler": LAUNCH,
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_kernel_or_compiler_has_another_file(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    compiled(preparation.prepare(LAUNCH))
    chain = toolchain.here()
    assert chain is not None
    if change == "compiler":
        chain = replace(chain, identity="another NVRTC")
    monkeypatch.setattr(toolchain, "here", lambda: chain)
    state.reset()

    assert preparation.prepare(OTHERS[change]).compile is not None


def with_head(head: object) -> bytes:
    return preparation.MAGIC + json.dumps(head).encode() + b"\n" + CODE


DIGEST = preparation._digest(CODE)
TOO_LONG = MachineCode("a", CODE + bytes(preparation.MOST_BYTES))
INVALID: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "too long": lambda _: preparation._content(TOO_LONG),
    "another version": lambda content: content.replace(b"kernel 1", b"kernel 2"),
    "a list": lambda _: with_head([]),
    "no digest": lambda _: with_head({"symbol": "a"}),
    "another symbol": lambda _: with_head({"symbol": "../a\tb", "sha256": DIGEST}),
    "no symbol": lambda _: with_head({"symbol": 7, "sha256": DIGEST}),
    "empty": lambda _: b"",
    "deep": lambda _: preparation.MAGIC + b"[" * 100_000,
}


@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID)
def test_a_file_that_is_not_valid_is_ignored_with_one_message(
    compiler: Compiler, root: Path, change: Callable[[bytes], bytes]
) -> None:
    compiled(preparation.prepare(LAUNCH))
    (file,) = (root / "mlx_marlin" / "kernels").iterdir()
    file.write_bytes(change(file.read_bytes()))
    state.reset()

    with pytest.warns(RuntimeWarning, match="a compiled kernel is ignored") as warned:
        first = preparation.prepare(LAUNCH)
    assert preparation.prepare(LAUNCH).compile is not None  # without a message
    compiled(first)

    assert len(warned) == 1
    state.reset()
    assert preparation.prepare(LAUNCH).compile is None


def test_a_file_that_others_may_have_written_is_ignored(
    compiler: Compiler, root: Path
) -> None:
    compiled(preparation.prepare(LAUNCH))
    (file,) = (root / "mlx_marlin" / "kernels").iterdir()
    file.chmod(0o666)
    state.reset()

    with pytest.warns(RuntimeWarning, match="can be written by other users"):
        assert preparation.prepare(LAUNCH).compile is not None


def test_a_folder_of_mlx_that_is_not_ours_is_not_written_to(
    compiler: Compiler, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_text.os, "geteuid", lambda: 4_000_000)

    with pytest.raises(PermissionError, match="ptx belongs to the user"):
        kernel_text.place(root / "ptx", "a", LAUNCH, MachineCode("a", CODE))

    assert [*(root / "ptx").iterdir()] == []


def test_a_folder_of_mlx_that_cannot_be_written_to_is_one_message(
    compiler: Compiler, root: Path
) -> None:
    (root / "ptx").write_text("a file")

    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        compiled(preparation.prepare(LAUNCH))
    compiled(preparation.prepare(replace(LAUNCH, template=(("M", 1),))))


def test_a_kernel_that_does_not_compile_is_left_to_mlx(
    compiler: Compiler, root: Path
) -> None:
    compiler.fault = "kernel.cu(3): error: expected a ;\nand more"

    compiled(preparation.prepare(LAUNCH))  # without a message: MLX raises the error

    assert not (root / "ptx").exists()


def test_a_compiler_that_finds_no_headers_is_one_message(
    compiler: Compiler, root: Path
) -> None:
    compiler.fault = "kernel.cu(3): catastrophic error: cannot open cuda_fp16.h\nmore"

    with pytest.warns(RuntimeWarning, match=r"cuda_fp16.h. MLX compiles them in each"):
        compiled(preparation.prepare(LAUNCH))

    assert not (root / "ptx").exists()


def test_without_a_compiler_mlx_compiles_after_one_message(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Toolchain:
        raise UnavailableError("MLX has not loaded NVRTC in this process")

    monkeypatch.setattr(toolchain, "here", missing)

    with pytest.warns(RuntimeWarning, match="has not loaded NVRTC"):
        assert preparation.prepare(LAUNCH) == Prepared(SOURCE)
    assert preparation.prepare(LAUNCH) == Prepared(SOURCE)  # without a message


@pytest.mark.parametrize("error", [OSError("no library"), AttributeError("no hash")])
def test_without_mlxs_hash_mlx_compiles(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def missing() -> None:
        raise error

    monkeypatch.setattr(kernel_text, "_hash", missing)

    with pytest.warns(RuntimeWarning, match=f"cannot be kept: {error}"):
        assert preparation.prepare(LAUNCH) == Prepared(SOURCE)


def test_without_a_device_nothing_is_kept(root: Path) -> None:
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert preparation.prepare(LAUNCH) == Prepared(SOURCE)  # without a message


def test_the_tool_chain_is_that_of_the_loaded_library(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = root / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"seven b")
    include = root / "nvidia" / "cu13" / "include"
    include.mkdir()
    (include / "cuda_fp16.h").touch()
    maps = root / "maps"
    monkeypatch.setattr(toolchain, "MAPPED", maps)
    monkeypatch.setattr(toolchain, "Nvrtc", lambda path: Compiler())
    monkeypatch.setattr(detection, "detect_device", lambda: H200)
    monkeypatch.setattr(mx, "__file__", str(root / "mlx" / "core.so"))
    maps.write_text("7f00-7f01 r--p 0 fe:00 1 /usr/lib/libc.so.6\n")
    with pytest.raises(UnavailableError, match="has not loaded NVRTC"):
        toolchain.here()
    maps.write_text(f"7f00-7f01 r--p 0 fe:00 1 {library}\n")

    chain = toolchain.here()

    assert chain is not None
    assert chain.options == (
        "--device-as-default-execution-space",
        "--gpu-architecture=sm_90a",
        f"--include-path={root}/mlx/include/cccl",
        f"--include-path={include}",
    )
    assert "(7 bytes)" in chain.identity
    (include / "cuda_fp16.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(root / "none"))
    with pytest.raises(UnavailableError, match=r"no cuda_fp16\.h in"):
        toolchain.here()


def test_a_library_that_is_not_nvrtc_is_refused() -> None:
    with pytest.raises(CompileError, match="nvrtc"):
        Nvrtc(Path("libc.so.6"))


def test_another_process_that_fails_is_replaced_by_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = object.__new__(Nvrtc)
    fake._path = Path("libnvrtc.so")
    monkeypatch.setattr(nvrtc.sys, "executable", "/bin/false")
    monkeypatch.setattr(Nvrtc, "compile", lambda *_: MachineCode("here", CODE))

    assert fake.compile_apart("text", "f", (), {}) == MachineCode("here", CODE)


def test_a_deferred_call_compiles_nothing(
    compiler: Compiler, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlx_marlin.optimize(Model())
    compiler.compiled.clear()
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    assert guard.is_on()

    with kernels.deferred() as compilations:
        assert not guard.is_on()  # a check would evaluate the kernel
        model.linear(mx.zeros((3, model.linear.packed.k), mx.float16))

    assert compiler.compiled == []
    assert [*compilations]
    for task in compilations.values():
        task()
    assert len(compiler.compiled) == len(compilations)
    assert not kernels.are_deferred()


def test_warm_up_compiles_ahead_several_at_a_time(
    compiler: Compiler, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def compile_apart(*arguments: Any) -> MachineCode:
        threads.add(threading.current_thread().name)
        return Compiler.compile_apart(compiler, *arguments)

    monkeypatch.setattr(compiler, "compile_apart", compile_apart)

    mlx_marlin.optimize(Model(), warm_up=(1, 64))

    assert compiler.compiled
    assert threading.main_thread().name not in threads
    assert len(set(compiler.compiled)) == len(compiler.compiled)
