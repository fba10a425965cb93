"""A launch: everything that one dispatch of a kernel needs, decided before it.

A back end turns a plan into launches (`Backend.launches`); `graph` runs them, and
the guard, the tuner and the counters take them as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mlx_marlin.backends.source import Source

TemplateValue = str | int | bool
"""A dtype's name, a number or a flag."""
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An array that a kernel reads."""

    # An argument of the call, an output of an earlier launch, or an array of
    # `Launch.integers`
    name: str
    dtype: str  # The dtype that the kernel is compiled for
    # Whether the array may have so few elements that the back end has to pad it
    # (`Traits.pads_small_inputs`)
    may_be_small: bool = False
    # Whether the array has another dtype, of which the kernel reads the bytes
    reinterpreted: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """An array that a kernel writes."""

    name: str  # Its name, for later launches
    dtype: str  # Its dtype
    shape: tuple[int, ...]  # Its last axes, or the whole shape
    # The argument whose first axes precede `shape`, and how many of its last axes do
    # not; None if `shape` is the whole shape
    leading: tuple[str, int] | None = ("x", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One dispatch of a kernel."""

    source: Source  # The text of the kernel
    template: tuple[tuple[str, TemplateValue], ...]  # Its template arguments
    # The arrays of its buffers, in the order of `source.input_names`
    inputs: tuple[Operand, ...]
    # Constant arrays of int32 that it reads, by their names
    integers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    grid: Grid  # Threads in each dimension
    threadgroup: Grid  # Threads of a threadgroup in each dimension
    shared_bytes: int = 0  # Bytes of dynamic shared memory of a threadgroup
    outputs: tuple[Output, ...]  # What it writes, in the order of `source.output_names`
    # What the outputs contain before the launch, if it adds to them
    start: float | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of the inputs."""
        return tuple(operand.dtype for operand in self.inputs)

    @property
    def instance(self) -> tuple[object, ...]:
        """What the compiler of the GPU sees: text, template arguments and dtypes.

        Launches with equal instances run the same machine code.
        """
        return self.source, self.template, self.dtypes


def inputs_of(
    text: Source,
    dtypes: Mapping[str, str],
    *,
    stand_ins: Mapping[str, str] | None = None,
    small: Sequence[str] = (),
    reinterpreted: Sequence[str] = (),
) -> tuple[Operand, ...]:
    """Returns the operands of a kernel in the order of its buffers.

    `reinterpreted`: operands whose bytes the kernel reads.
    """
    names = ((stand_ins or {}).get(name, name) for name in text.input_names)
    return tuple(
        Operand(
            name=name,
            dtype=dtypes[name],
            may_be_small=name in small,
            reinterpreted=name in reinterpreted,
        )
        for name in names
    )


def distinct(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """Returns the first launch of each instance, in order."""
    found: dict[tuple[object, ...], Launch] = {}
    for launch in launches:
        found.setdefault(launch.instance, launch)
    return tuple(found.values())


def digest(launches: Sequence[Launch]) -> str:
    """Returns a digest of the instances of launches.

    It changes with any character of their texts.
    """
    import hashlib  # its library takes milliseconds

    whole = hashlib.sha256()
    for launch in launches:
        whole.update(_text_digest(launch.source))
        # bool before int: True and 1 are different template arguments.
        template = [(name, repr(value)) for name, value in launch.template]
        whole.update(repr((template, launch.dtypes)).encode())
    return whole.hexdigest()[:32]


@lru_cache(256)
def _text_digest(text: Source) -> bytes:
    import hashlib

    fields = text.name, text.input_names, text.output_names, text.atomic
    return hashlib.sha256(repr((fields, text.header, text.source)).encode()).digest()
