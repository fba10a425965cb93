"""The values of options of `optimize`, and those that `MLX_MARLIN_OPTIONS` sets.

Parsers of options need them without MLX.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

from mlx_marlin.weights.formats import LAYOUTS

COMPUTE = ("float16",)
"""Dtypes in which a model in bfloat16 can compute."""
FUSIONS = {
    "residual": "the residual sum into the output and down projections",
    "gate": "gate, up and activation of an MLP or shared expert into one product",
    "norm": "the RMSNorm into the product that follows, for few rows",
    "rope": "the norms of q's and k's heads, and rope, into one kernel",
    "add_norm": "the sum after attention and the norm after it into one kernel",
    "experts": "experts: choice, gate and up with activation, and sum, a kernel each",
}
"""Fusion -> what it fuses."""
ENVIRONMENT = "MLX_MARLIN_OPTIONS"
FLAGS = {"true": True, "1": True, "false": False, "0": False}
BITS = range(1, 9)


def fusions(fuse: Iterable[str] | None, trace: bool = True) -> frozenset[str]:
    """Returns fusions by their names; None for those that a back end has by default."""
    if fuse is None:
        from mlx_marlin.backends import selection  # it imports MLX

        return selection.traits().fusions
    names = None if isinstance(fuse, str) else frozenset(fuse)
    if names is None or not names <= FUSIONS.keys():
        raise ValueError(f"fuse={fuse!r}: expected some of {(*FUSIONS,)}, as a tuple")
    if names and not trace:
        raise ValueError(f"fuse={fuse!r}: expected trace=True, got trace=False")
    return names


def from_environment() -> dict[str, Any]:
    """Returns the options of `optimize` that the environment sets."""
    text = os.environ.get(ENVIRONMENT, "")
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = map(str.strip, part.partition("="))
        if name not in _PARSERS:
            raise _wrong(part, f"one of {', '.join(_PARSERS)}, as in layout=marlin")
        if name in options:
            raise _wrong(part, f"{name} once")
        parse, expected = _PARSERS[name]
        try:
            options[name] = parse(value)
        except (KeyError, ValueError):
            raise _wrong(part, f"{name}={expected}") from None
    return options


def _wrong(part: str, expected: str) -> ValueError:
    value = os.environ.get(ENVIRONMENT)
    return ValueError(f"{ENVIRONMENT}={value!r}: {part!r}, expected {expected}")


def _one_of(values: tuple[str, ...]) -> Callable[[str], str]:
    return lambda value: values[values.index(value)]


def _number(value: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise ValueError(value)
    return int(value)


def _group_size(value: str) -> int | str:
    return value if value == "channel" else _number(value)


def _bits(value: str) -> int:
    return BITS[BITS.index(_number(value))]


def _fusions(value: str) -> tuple[str, ...]:
    return (*fusions(filter(None, value.split("+"))),)


def _rows(value: str) -> tuple[int, ...]:
    return tuple(map(_number, value.split("+")))


_FLAG: tuple[Callable[[str], Any], str] = (FLAGS.__getitem__, "true or false")
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "layout": (_one_of(LAYOUTS), " or ".join(LAYOUTS)),
    "join": _FLAG,
    "trace": _FLAG,
    "fuse": (_fusions, f"some of {'+'.join(FUSIONS)}, or nothing"),
    "compute": (_one_of(COMPUTE), " or ".join(COMPUTE)),
    "measure": _FLAG,
    "invariant": _FLAG,
    "quantize": _FLAG,
    "group_size": (_group_size, "a number or channel"),
    "bits": (_bits, f"{BITS[0]} to {BITS[-1]}"),
    "warm_up": (_rows, "numbers of rows, such as 1+4+8"),
    "progress": _FLAG,
}
"""Option -> (parser of its value, what it takes)."""
