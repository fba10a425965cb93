"""NVRTC, NVIDIA's compiler for text, through ctypes.

Run as a program, this file compiles one kernel: threads of one process would wait for
each other, because NVRTC compiles most of a text under a lock (measured, docs/lab).
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_SUCCESS = 0


class CompileError(Exception):
    """NVRTC refused a text. The message is its log."""


class MachineCode(NamedTuple):
    """A compiled kernel."""

    symbol: str
    """Name of the function in `code`."""
    code: bytes
    """A cubin."""


class Nvrtc:
    """An NVRTC library."""

    def __init__(self, library: Path) -> None:
        # NVRTC finds this library by name only once it is loaded.
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
            with suppress(OSError):
                ctypes.CDLL(str(builtins))
        self._path = library
        self._library = ctypes.CDLL(str(library))
        try:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        except AttributeError as error:  # another library
            raise CompileError(str(error)) from error
        self.version = f"{major.value}.{minor.value}"

    def compile_apart(
        self,
        text: str,
        function: str,
        options: Sequence[str],
        headers: dict[str, str],
    ) -> MachineCode:
        """Compiles like `compile`, in another process if one can be started."""
        # This file is also a program, which imports nothing of the package.
        from mlx_marlin.backends import children

        task = json.dumps([str(self._path), text, function, options, headers])
        command = [sys.executable, "-I", __file__]
        try:
            line, _, code = children.run(command, task.encode()).partition(b"\n")
            symbol, error = json.loads(line)
        except (OSError, ValueError, TypeError, subprocess.SubprocessError):
            return self.compile(text, function, options, headers)
        if error is not None:
            raise CompileError(error)
        return MachineCode(symbol, code)

    def compile(
        self,
        text: str,
        function: str,
        options: Sequence[str],
        headers: dict[str, str],
    ) -> MachineCode:
        """Compiles a text that has one kernel."""
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*map(str.encode, headers.values()))
        names = (ctypes.c_char_p * len(headers))(*map(str.encode, headers))
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            text.encode(),
            b"kernel.cu",
            len(headers),
            texts,
            names,
        )
        try:
            return self._compiled(program, function, options)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _compiled(
        self, program: ctypes.c_void_p, function: str, options: Sequence[str]
    ) -> MachineCode:
        self._call("nvrtcAddNameExpression", program, function.encode())
        arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        failed = self._library.nvrtcCompileProgram(program, len(options), arguments)
        if failed:
            raise CompileError(self._log(program) or self._message(failed))
        symbol = ctypes.c_char_p()
        self._call(
            "nvrtcGetLoweredName", program, function.encode(), ctypes.byref(symbol)
        )
        code = self._content(program, "nvrtcGetCUBIN")
        return MachineCode((symbol.value or b"").decode(), code)

    def _log(self, program: ctypes.c_void_p) -> str:
        log = self._content(program, "nvrtcGetProgramLog")
        return log.rstrip(b"\0").decode(errors="replace").strip()

    def _content(self, program: ctypes.c_void_p, getter: str) -> bytes:
        """Returns what one of NVRTC's pairs of functions, size and content, gives."""
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(max(size.value, 1))
        self._call(getter, program, content)
        return content.raw[: size.value]

    def _call(self, name: str, *arguments: Any) -> None:
        failed = getattr(self._library, name)(*arguments)
        if failed != _SUCCESS:
            raise CompileError(f"{name}: {self._message(failed)}")

    def _message(self, status: int) -> str:
        message: bytes | None = self._library.nvrtcGetErrorString(status)
        return (message or b"unknown error").decode()


def _main() -> None:
    """Compiles the task on the standard input; writes names as JSON, then the code."""
    library, *task = json.load(sys.stdin)
    symbol, code, error = "", b"", None
    try:
        symbol, code = Nvrtc(Path(library)).compile(*task)
    except CompileError as failure:
        error = str(failure)
    sys.stdout.buffer.write(json.dumps([symbol, error]).encode() + b"\n" + code)


if __name__ == "__main__":
    _main()
