"""The errors of the emulator, and its warning."""


class EmulatorError(RuntimeError):
    """A kernel did what no kernel may do, or the emulator cannot run it.

    The message names kernel, buffer, threadgroup, thread and source line as far as
    they are known.
    """


class CompileError(EmulatorError):
    """The Metal text does not compile. The message names the Metal line."""


class EmulatorWarning(UserWarning):
    """A kernel does what is rarely meant: it leaves elements of an output unwritten."""
