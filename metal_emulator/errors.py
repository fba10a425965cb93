"""Errors and warnings of the emulator."""


class EmulatorError(RuntimeError):
    """A kernel violates the rules of Metal, or the emulator cannot run it.

    The message names the kernel, buffer, threadgroup, thread and source line where they
    are known.
    """


class CompileError(EmulatorError):
    """The Metal text does not compile. The message names the Metal line."""


class EmulatorWarning(UserWarning):
    """A kernel leaves elements of an output unwritten."""
