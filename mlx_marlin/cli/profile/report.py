"""The output of `mlx-marlin profile`.

Every line with a time, or with a figure that depends on one, says where the time comes
from: "measured", "predicted" or "assumed".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_marlin import tables
from mlx_marlin.cli.render import profile_document
from mlx_marlin.measure.profiling.document import Skipped
from mlx_marlin.measure.profiling.profile import Profile
from mlx_marlin.measure.profiling.roofline import Roofline
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem
from mlx_marlin.tables import Value

WIDTH = 15
"""Width of the names of details."""
OF_PRODUCT = ("rows", "k→n", "format", "dtype", "layout", "low occupancy")
"""Columns of the table that details have in another line."""
SOURCES = {
    "operands": " (bytes, each once)",
    "traffic": " (requested of caches and memory, by the plan)",
    "counts": " (by the emulator)",
    "occupancy": " (predicted)",
}
"""Further figures of a profile, and where they are from."""
REASONS = {
    "MEMORY": ": below the ridge point, the bandwidth is the nearer roof",
    "COMPUTE": ": above the ridge point, the multiplications are the nearer roof",
    "LATENCY": ": less than half of either roof is used",
    "BALANCED": ": within a tenth of the ridge point, both roofs are near",
}


def details(
    device: PlanningDevice, profiles: Sequence[Profile], exported: Mapping[str, Any]
) -> str:
    """Returns the profiles of one product, a paragraph for each kernel."""
    rows = profile_document.products(exported).rows
    documents = exported["profiles"]
    parts = [
        "\n".join([profile.problem.explain(), *_lines(row, document)])
        for profile, row, document in zip(profiles, rows, documents, strict=True)
    ]
    return "\n\n".join([_device(device), *parts, *profile_document.refusals(exported)])


def table(device: PlanningDevice, exported: Mapping[str, Any]) -> str:
    """Returns the table of a document, and below it why times are impossible."""
    table = tables.printed(profile_document.products(exported))
    return "\n\n".join([_device(device), table, *profile_document.refusals(exported)])


def skipped(rows: Iterable[Skipped]) -> Iterator[str]:
    """Yields a line for each product that was not profiled."""
    for row in rows:
        yield f"{_label(row.problem)}: no profile of {row.kernel}: {row.reason}"


def _device(device: PlanningDevice) -> str:
    stock = ""
    if device.stock_tflops != device.tflops:
        stock = f" ({_short(device.stock_tflops)} with tensor units)"
    roofline = Roofline(tflops=device.tflops, bandwidth_gbs=device.bandwidth_gbs)
    return (
        f"{device.variant}: peaks {device.tflops:.2f} TFLOPS{stock} and "
        f"{device.bandwidth_gbs:g} GB/s, ridge point {roofline.ridge:.1f} FLOP/byte"
    )


def _lines(row: Mapping[str, Value], profile: Mapping[str, Any]) -> Iterator[str]:
    """Yields the details of a profile: the row of its table, and where it is from."""
    mark = f" ({profile['origin']})"
    for head, value in row.items():
        shown = tables.text(value)
        if shown and head not in OF_PRODUCT:
            is_derived = head in tables.FIGURES or head == "bottleneck"
            reason = REASONS.get(shown, "")
            yield _line(head, f"{shown}{reason}{mark if is_derived else ''}")
    for name, origin in SOURCES.items():
        if profile[name]:
            yield _line(name, f"{_listed(profile[name])}{origin}")
    if low := (profile["occupancy"] or {}).get("low"):
        yield _line("", f"LOW OCCUPANCY: {low} (predicted)")


def _listed(values: Mapping[str, Any]) -> str:
    """Returns figures by their names, without those that are missing."""
    return ", ".join(
        f"{name.replace('_', ' ')} "
        + (f"({_listed(value)})" if isinstance(value, dict) else tables.text(value))
        for name, value in values.items()
        if value and name not in ("limit", "low")
    )


def _line(name: str, text: str) -> str:
    return f"{name:<{WIDTH}}{text}"


def _label(problem: Problem) -> str:
    return f"{problem.m} x {problem.k}→{problem.n} {_format(problem)}"


def _format(problem: Problem) -> str:
    size = f"g{problem.group_size}"
    return f"{problem.mode} {problem.bits}-bit {size} {problem.layout}"


def _short(value: float) -> str:
    """Returns a number with about three digits."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
