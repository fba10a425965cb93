"""Prints how tensor operations of this machine hold their operands, for a result file.

`gemm_tensor` expects the layout of an M5 (docs/m5.md). A machine with another layout
prints its tables, one lane a line.

Usage: python -m benchmarks.tensor_layout [FILE]
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_marlin.backends import devices
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.probes import ELEMENTS, layout_probe
from mlx_marlin.guard.known_answers import output_of_probe

DTYPES = ("float16", "bfloat16")


def main(given: Sequence[str] | None = None) -> None:
    """Prints the layout for each type of activations, and writes it to a file."""
    found = [f"tensor operations, {line}" for line in lines()]
    text = "\n".join(found)
    print(text)
    for path in sys.argv[1:] if given is None else given:
        Path(path).write_text(text, "utf-8")


def lines() -> Iterator[str]:
    """Yields what is known of this machine's tensor operations."""
    device = devices.current()
    if not isinstance(device, Device) or not device.has_tensor_units:
        yield f"none: {device.variant}"
        return
    for dtype in DTYPES:
        probe = layout_probe(dtype)
        values = output_of_probe(probe)
        fault = probe.fault(values)
        if fault is None:
            yield f"{dtype}: the layout of M5"
            continue
        yield f"{dtype}: {fault}"
        yield from (f"{dtype}, {row}" for row in table(values))


def table(values: Sequence[float]) -> Iterator[str]:
    """Yields a lane's elements of an operand as text: outer and inner index of each.

    Args:
        values: As for `tensor_probe.layout_fault`.
    """
    size = sum(1 + 3 * count for count in ELEMENTS.values())
    for lane in range(len(values) // size):
        at = lane * size
        for name, count in ELEMENTS.items():
            capacity = int(values[at])
            elements = [
                f"{int(outer)}.{int(inner)}{'' if valid else '?'}"
                for valid, inner, outer in (
                    values[at + 1 + 3 * i : at + 4 + 3 * i] for i in range(count)
                )
            ]
            yield f"lane {lane}, {name}, {capacity} elements: {' '.join(elements)}"
            at += 1 + 3 * count


if __name__ == "__main__":
    main()
