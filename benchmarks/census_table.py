"""Compares what Apple's compilers say in census files with our own counts."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.apple_tools import ARCHITECTURES
from benchmarks.results import replaced
from mlx_marlin import regular_files
from mlx_marlin.backends.devices import named

SCHEMA, VERSION = "mlx-marlin census", 1
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "results.md"
BEGIN = "<!-- Apple's compiler: python -m benchmarks.calibrate census.json -->"
END = "<!-- end of Apple's compiler -->"
"""What the document has before and after the table."""
PRODUCT = "Apple metal version "
"""Begin of a version of the compiler."""
FEWEST = 8
"""Instances from which a difference of counts is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """An instance as the native compiler of an architecture made it.

    Attributes:
        kernel: Name of our kernel.
        template: Its template arguments.
        architecture: The architecture.
        registers: 32-bit registers of a thread.
        spilled_bytes: Bytes of a thread that did not fit its registers.
        code_bytes: Size of the instructions.
        counted: Our count of registers, or None.
        instructions: Our count of an iteration of the main loop, or None.
    """

    kernel: str
    template: str
    architecture: str
    registers: int
    spilled_bytes: int
    code_bytes: int
    counted: int | None
    instructions: int | None


@dataclass(frozen=True, slots=True)
class Census:
    """What census files hold.

    Attributes:
        metal: Version of the compiler.
        rows: What was compiled, where the figures were read.
        failed: Instances that did not compile.
    """

    metal: str
    rows: list[Compiled] = field(default_factory=list)
    failed: int = 0


def is_census(path: Path) -> bool:
    """Returns whether a file says that it is one of the census."""
    try:
        content = _json(path)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("schema") == SCHEMA


def read(paths: Sequence[Path]) -> Census:
    """Returns what the files of one compiler hold together.

    Raises:
        ValueError: If one is no census, or is of another compiler than the first.
        OSError: If one cannot be read.
    """
    found: Census | None = None
    for path in paths:
        part = _read(path)
        found = found or Census(part.metal)
        if part.metal != found.metal:
            raise ValueError(f"{path} is of {part.metal}, expected {found.metal}")
        found.rows.extend(part.rows)
        found = Census(found.metal, found.rows, found.failed + part.failed)
    if found is None or not found.rows:
        raise ValueError(f"{paths[0]} has no figures that were read")
    return found


def _read(path: Path) -> Census:
    content = _json(path)
    try:
        if (content["schema"], content["version"]) != (SCHEMA, VERSION):
            raise ValueError(f"schema={content['schema']!r}")
        rows = [*_rows(content)]
        failed = sum(bool(row["error"]) for row in content["instances"])
        return Census(_typed(content["machine"], "metal", str), rows, failed)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no census: {error!r}") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(regular_files.read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no census: {error}") from None


def _rows(content: Any) -> Iterator[Compiled]:
    for row in content["instances"]:
        for architecture, figures in row["compiled"].items():
            if architecture not in ARCHITECTURES:
                raise ValueError(f"architecture={architecture!r}")
            is_read = content["self_check"][architecture]["read"] is True
            if is_read and "registers" in figures:
                names = ("registers", "spilled_bytes", "code_bytes")
                yield Compiled(
                    kernel=_typed(row, "kernel", str),
                    template=_typed(row, "template", str),
                    architecture=architecture,
                    **{name: _typed(figures, name, int) for name in names},
                    counted=_typed(row, "registers", int | None),
                    instructions=_typed(row, "instructions", int | None),
                )


def _typed(row: Any, name: str, type_: Any) -> Any:
    value = row[name]
    if not isinstance(value, type_) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}")
    return value


def table(census: Census) -> str:
    """Returns the document's table: a line for each kernel and generation."""
    lines = [
        f"Apple's compiler, {census.metal.removeprefix(PRODUCT)}. 32-bit registers of "
        "a thread, ours by an open compiler; no time is measured:",
        "",
        "| kernel | generation | instances | registers | ours less Apple's | spill | "
        "code, KB | bytes per counted instruction |",
        "|---" * 8 + "|",
    ]
    for (kernel, generation), rows in _groups(census.rows).items():
        registers = [row.registers for row in rows]
        differences = [row.counted - row.registers for row in rows if row.counted]
        ratios = [row.code_bytes / row.instructions for row in rows if row.instructions]
        sizes = [row.code_bytes / 1024 for row in rows]
        cells = [
            f"`{kernel.removeprefix('marlin_')}`",
            generation,
            str(len(rows)),
            _range(registers, "d"),
            _range(differences, "+d"),
            str(sum(row.spilled_bytes > 0 for row in rows)),
            _range(sizes, ".1f"),
            _quartiles(ratios),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _groups(rows: Iterable[Compiled]) -> dict[tuple[str, str], list[Compiled]]:
    """Returns rows by kernel and generation, such as "g16" of both sizes."""
    found: dict[tuple[str, str], list[Compiled]] = {}
    for row in sorted(rows, key=lambda row: (row.kernel, row.architecture)):
        generation = row.architecture.removeprefix("applegpu_")[:-1]
        found.setdefault((row.kernel, generation), []).append(row)
    return found


def _range(values: Sequence[float], format: str) -> str:
    if not values:
        return ""
    ends = dict.fromkeys(f"{value:{format}}" for value in (min(values), max(values)))
    return " to ".join(ends)


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return _range(values, ".0f")
    first, _, third = quantiles(values, n=4)
    return f"{first:.0f} to {third:.0f}"


def proposals(census: Census) -> list[str]:
    """Returns figures for `data/chips.json` and our counts, with their sources."""
    return [*_limits(census), *_differences(census)]


def _limits(census: Census) -> Iterator[str]:
    """Yields the most registers of a thread, where some instance of it spills."""
    by_architecture: dict[str, list[Compiled]] = {}
    for row in census.rows:
        by_architecture.setdefault(row.architecture, []).append(row)
    for architecture, rows in sorted(by_architecture.items()):
        chip = named(architecture)
        now = chip.core.thread_registers  # type: ignore[attr-defined]
        most = max(row.registers for row in rows)
        spilling = [row for row in rows if row.spilled_bytes]
        if not spilling and most <= now:
            continue
        bound = "" if spilling else "at least "
        yield (
            f'data/chips.json, {architecture}: "thread_registers": {bound}{most} (now '
            f'{now}), source "{census.metal}, {architecture}, {len(rows)} instances, '
            f'{len(spilling)} spill"'
        )


def _differences(census: Census) -> Iterator[str]:
    """Yields by how much the counts of a kernel differ, where that is on one side."""
    for (kernel, generation), rows in _groups(census.rows).items():
        found = [
            row.registers - row.counted
            for row in rows
            if row.counted is not None and not row.spilled_bytes
        ]
        if len(found) >= FEWEST and (min(found) > 0 or max(found) < 0):
            yield (
                f"registers of {kernel} for {generation}: add {median(found):+g} to "
                f"our counts ({min(found):+d} to {max(found):+d}), source "
                f'"{census.metal}, {len(found)} instances"'
            )


def publish(paths: Sequence[Path], document: Path) -> Census:
    """Writes the table into a document; returns what it shows.

    Raises:
        ValueError: As for `read`, or if the document has no place for the table.
        OSError: If a file cannot be read or written.
    """
    census = read(paths)
    text = document.read_text(encoding="utf-8")
    written = replaced(text, table(census), BEGIN, END)
    document.write_text(written, encoding="utf-8")
    return census
