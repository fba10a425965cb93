"""What the command prints, and writes as JSON."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_emulator.library import Library

STDOUT = Path("-")
"""Value of `--json` without a file: JSON is printed instead of text."""


def check(file: Path | None) -> None:
    """Checks the file of `--json`.

    Raises:
        ValueError: If it cannot be written.
    """
    if file in (None, STDOUT):
        return
    if not file.parent.is_dir():
        raise ValueError(
            f"--json {file}: the folder {file.parent} does not exist, expected a file "
            "in an existing folder"
        )
    if file.is_dir():
        raise ValueError(f"--json {file}: is a folder, expected a file")


def show(lines: Iterable[str], value: Any, file: Path | None) -> None:
    """Prints lines, and writes a value as JSON to the file of `--json`."""
    text = f"{json.dumps(value, indent=2)}\n"
    if file == STDOUT:
        print(text, end="")
        return
    if file is not None:
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    for line in lines:
        print(line)


def show_entries(library: Library, file: Path | None) -> None:
    """Prints the entries of a text and its function constants."""
    lines = [str(entry) for entry in library.entries]
    if library.constants:
        constants = ", ".join(map(str, library.constants))
        lines.append(f"function constants: {constants}")
    value = {
        "entries": [
            {
                "name": entry.name,
                "instance": entry.instance,
                "template": list(entry.template),
                "parameters": [str(each) for each in entry.parameters],
            }
            for entry in library.entries
        ],
        "constants": [
            {"name": each.name, "index": each.index, "type": each.type}
            for each in library.constants
        ],
    }
    show(lines, value, file)


def summary(name: str, array: mx.array) -> str:
    """Returns a line that describes an output; unwritten elements are NaN."""
    dtype = str(array.dtype).removeprefix("mlx.core.")
    head = f"{name}: {dtype} {'x'.join(map(str, array.shape)) or 'scalar'}"
    if array.size == 0:
        return f"{head}, empty"
    values = array.astype(mx.float32)
    finite = mx.where(mx.isfinite(values), values, 0)
    not_finite = (~mx.isfinite(values)).sum().item()
    return (
        f"{head}, min {finite.min().item():.6g}, max {finite.max().item():.6g}, "
        f"mean {finite.mean().item():.6g}, {not_finite} NaN or infinite"
    )
