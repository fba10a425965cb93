"""The output of `mlx-marlin profile`.

Every line with a time, or with a figure that depends on one, says where the time comes
from: "measured", "predicted" or "assumed".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_marlin.cli import tables
from mlx_marlin.cli.render import profile_document
from mlx_marlin.measure.profiling.document import Skipped
from mlx_marlin.measure.profiling.profile import Profile
from mlx_marlin.measure.profiling.roofline import Roofline
from mlx_marlin.planning.device import PlanningDevice, Residency
from mlx_marlin.planning.problem import Problem

WIDTH = 13
"""Width of the names of details."""
REASONS = {
    "MEMORY": "below the ridge point, the bandwidth is the nearer roof",
    "COMPUTE": "above the ridge point, the multiplications are the nearer roof",
    "LATENCY": "less than half of either roof is used",
    "BALANCED": "within a tenth of the ridge point, both roofs are near",
}


def details(device: PlanningDevice, profiles: Sequence[Profile]) -> str:
    """Returns the profiles of one product, a paragraph for each kernel."""
    head = _aligned_lines([("device", _device(device))])
    parts = [_aligned_lines(_lines(profile)) for profile in profiles]
    return "\n\n".join([head, *parts])


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


def _lines(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yields the details of a profile: name and text."""
    point, roofline, mark = profile.point, profile.roofline, f"({profile.origin})"
    yield "product", profile.problem.explain()
    yield "kernel", _kernel(profile)
    yield "time", f"{point.seconds * 1e3:.4g} ms {mark}"
    rates = f"{_short(point.tflops)} TFLOPS and {_short(point.bandwidth_gbs)} GB/s"
    yield "throughput", f"{rates} {mark}"
    compute = _percent(roofline.compute_utilization(point))
    memory = _percent(roofline.memory_utilization(point))
    yield "utilization", f"compute {compute} %, memory {memory} % {mark}"
    yield "operands", _operands(profile)
    yield (
        "intensity",
        f"{point.intensity:.2f} FLOP/byte, ridge point {roofline.ridge:.1f}",
    )
    if profile.refusal:
        yield "IMPOSSIBLE", f"{rates} {mark}: {profile.refusal}"
    else:
        bottleneck = roofline.bottleneck(point)
        yield "bottleneck", f"{bottleneck}: {REASONS[bottleneck]} {mark}"
        roof = "memory" if roofline.is_memory_side(point) else "compute"
        share = _percent(roofline.attained(point))
        yield "attained", f"{share} % of the {roof} roof {mark}"
    yield from _of_plan(profile)


def _kernel(profile: Profile) -> str:
    if profile.plan is None:
        return f"stock MLX, {profile.kernel}"
    return profile.plan.explain()


def _of_plan(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yields the details that only a plan has."""
    traffic, counts, residency = profile.traffic, profile.counts, profile.residency
    if traffic is not None:
        yield (
            "traffic",
            f"{_bytes(traffic.total)} requested of caches and memory: weights "
            f"{traffic.weight_reads}x, x {traffic.activation_reads}x, workspace "
            f"{_bytes(traffic.workspace)} (by the plan)",
        )
    if counts is not None:
        yield (
            "counters",
            f"{_bytes(counts.read_bytes)} read, {_bytes(counts.written_bytes)} "
            f"written, {counts.matrix_products} 8x8 products, {counts.barriers} "
            f"barriers, {counts.launches} launches (counted by the emulator)",
        )
    if residency is not None:
        assumed = f"; assumed: {residency.assumed}" if residency.assumed else ""
        yield (
            "occupancy",
            f"{residency.resident} of {residency.max_simdgroups} simdgroups of a core "
            f"(predicted): {_limits(residency)}{assumed}",
        )
    if low := profile.low_occupancy:
        yield "", f"LOW OCCUPANCY: {low} (predicted)"


def _limits(residency: Residency) -> str:
    """Returns how many simdgroups each limit allows."""
    return ", ".join(
        f"{name} {count * residency.simdgroups}"
        for name, count in residency.threadgroups.items()
    )


def _operands(profile: Profile) -> str:
    operands = profile.operands
    parts = {
        "codes": operands.codes,
        "scales": operands.scales,
        "offsets": operands.offsets,
        "x": operands.activations,
        "result": operands.result,
        "epilogue": operands.epilogue,
    }
    listed = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
    return f"{operands.total} bytes, each once: {listed}"


def _label(problem: Problem) -> str:
    return f"{problem.m} x {problem.k}→{problem.n} {_format(problem)}"


def _format(problem: Problem) -> str:
    size = f"g{problem.group_size}"
    return f"{problem.mode} {problem.bits}-bit {size} {problem.layout}"


def _aligned_lines(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<{WIDTH}}{text}" for name, text in lines)


def _short(value: float) -> str:
    """Returns a number with about three digits."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _bytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} KB"
