"""Prepares kernels before MLX looks for them: compiled once per machine, then kept."""

import warnings
from dataclasses import dataclass, replace

from mlx_marlin import state
from mlx_marlin.backends.base import Prepared
from mlx_marlin.backends.cuda.compiling import kernel_files, mlx_folder, toolchain
from mlx_marlin.backends.cuda.compiling.kernel_text import KernelInstance
from mlx_marlin.backends.cuda.compiling.nvrtc import CompileError, MachineCode
from mlx_marlin.backends.cuda.compiling.toolchain import Toolchain, UnavailableError
from mlx_marlin.backends.source import Source

_placed: set[str] = state.register(set())
"""Names of the kernels that are in MLX's folder."""
_warned: set[str] = state.register(set())
_OF_THE_TEXT = ": error: "
"""In NVRTC's message if the text is at fault. A header that is missing is a
"catastrophic error"."""


def prepare(instance: KernelInstance) -> Prepared:
    """Puts a kernel into MLX's folder if it is stored, or returns what compiles it.

    Args:
        instance: The kernel.

    Returns:
        The text to launch. It names the compiler and the architecture, so that MLX
        finds no machine code that was made by or for others.
    """
    chain = _toolchain()
    if chain is None:
        return Prepared(instance.source)
    named = replace(instance, source=_with_compiler(instance, chain))
    try:
        task = _Task.of(named, chain)
    except (ValueError, OSError, AttributeError) as error:
        _warn_unkept(str(error))
        return Prepared(instance.source)
    if task.name in _placed:
        return Prepared(named.source)
    stored = task.stored()
    if stored is None:
        return Prepared(named.source, task.name, task.compile)
    task.place(stored)
    return Prepared(named.source)


@dataclass(frozen=True, slots=True)
class _Task:
    """Stores one kernel.

    Attributes:
        instance: The kernel.
        chain: The compiler.
        text: The text to compile.
        name: Name of the kernel in MLX's folder.
        file: Name of the kernel's file in the cache.
    """

    instance: KernelInstance
    chain: Toolchain
    text: str
    name: str
    file: str

    @classmethod
    def of(cls, instance: KernelInstance, chain: Toolchain) -> "_Task":
        text = instance.text()
        name = mlx_folder.kernel_name(instance, text)
        file = kernel_files.file_name(text, instance.qualified, chain.identity)
        return cls(instance, chain, text, name, file)

    def stored(self) -> MachineCode | None:
        """Returns the stored machine code; None if there is none that is valid."""
        try:
            return kernel_files.read(self.file)
        except (OSError, ValueError) as error:
            _warn("ignored", f"a compiled kernel is ignored: {error}")
            return None

    def compile(self) -> None:
        """Compiles, stores and places the kernel; warns if that fails.

        It does not warn of an error in the text: MLX compiles the same text next and
        raises the error, which the guard reports.
        """
        try:
            compiled = self.chain.compile(self.text, self.instance.qualified)
        except CompileError as error:
            line = next(iter(str(error).splitlines()), "no message")
            if _OF_THE_TEXT not in line:
                _warn_unkept(f"{self.instance.function}: {line}")
            return
        try:
            kernel_files.write(self.file, compiled)
        except OSError as error:
            _warn_unkept(str(error))
        self.place(compiled)

    def place(self, compiled: MachineCode) -> None:
        """Puts machine code into MLX's folder; warns if that fails."""
        target = mlx_folder.folder(self.chain.mlx)
        try:
            mlx_folder.place(target, self.name, self.instance, compiled)
        except OSError as error:
            _warn_unkept(str(error))
        else:
            _placed.add(self.name)


def _with_compiler(instance: KernelInstance, chain: Toolchain) -> Source:
    source = instance.source
    note = f"// NVRTC {chain.compiler.version}, {chain.arch}\n"
    return replace(source, header=source.header + note)


@state.cache(maxsize=1)
def _toolchain() -> Toolchain | None:
    try:
        return toolchain.here()
    except UnavailableError as error:
        _warn_unkept(str(error))
        return None


def _warn_unkept(reason: str) -> None:
    _warn(
        "unkept",
        f"compiled CUDA kernels cannot be kept: {reason}. MLX compiles them in each "
        f"process again (docs/troubleshooting.md)",
    )


def _warn(kind: str, message: str) -> None:
    """Warns once per process and kind of message."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(f"mlx_marlin: {message}", RuntimeWarning, stacklevel=2)
