"""The output of `mlx-marlin profile`.

Every line with a time, or with a figure that depends on one, says where the time comes
from: "measured", "predicted" or "assumed".
"""

from collections.abc import Iterable, Iterator, Sequence

from mlx_marlin.measure.profiling.document import Skipped
from mlx_marlin.measure.profiling.profile import Profile
from mlx_marlin.measure.profiling.roofline import Roofline
from mlx_marlin.planning.choice import aligned
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
HEADS = (
    "rows",
    "k→n",
    "kernel",
    "ms",
    "TFLOPS",
    "% of peak",
    "GB/s",
    "% of peak",
    "FLOP /byte",
    "% of roof",
    "bound by",
    "simd- groups",
    "low by",
    "times",
)
"""Heads of the table's columns; spaces let long ones take two lines."""


def details(device: PlanningDevice, profiles: Sequence[Profile]) -> str:
    """Returns the profiles of one product, a paragraph for each kernel."""
    head = _aligned_lines([("device", _device(device))])
    parts = [_aligned_lines(_lines(profile)) for profile in profiles]
    return "\n\n".join([head, *parts])


def table(device: PlanningDevice, profiles: Sequence[Profile]) -> str:
    """Returns a table for each format, and below it why times are impossible."""
    lines = [_device(device)]
    for name in dict.fromkeys(_format(profile.problem) for profile in profiles):
        of_format = [each for each in profiles if _format(each.problem) == name]
        rows = [[*HEADS], *map(_row, of_format)]
        lines += ["", name, aligned(rows)]
    if any(profile.low_occupancy for profile in profiles):
        lines += ["", 'low by: the limit that causes LOW OCCUPANCY, in "simdgroups"']
    for profile in profiles:
        if profile.refusal:
            label = f"{_label(profile.problem)}, {profile.kernel}"
            lines.append(f"IMPOSSIBLE ({profile.origin}): {label}: {profile.refusal}")
    return "\n".join(lines)


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


def _row(profile: Profile) -> list[str]:
    point, roofline, problem = profile.point, profile.roofline, profile.problem
    residency = profile.residency
    return [
        f"{problem.m}",
        f"{problem.k}→{problem.n}",
        "stock " * (profile.plan is None) + profile.kernel.split()[0],
        f"{point.seconds * 1e3:.4f}",
        _short(point.tflops),
        _percent(roofline.compute_utilization(point)),
        _short(point.bandwidth_gbs),
        _percent(roofline.memory_utilization(point)),
        f"{point.intensity:.2f}",
        "" if profile.refusal else _percent(roofline.attained(point)),
        "IMPOSSIBLE" if profile.refusal else roofline.bottleneck(point),
        "" if residency is None else f"{residency.resident}",
        _limit(residency) if residency and profile.low_occupancy else "",
        profile.origin,
    ]


def _limit(residency: Residency) -> str:
    """Returns the limit of the occupancy as one word."""
    return residency.limit.removeprefix("launched ")


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
