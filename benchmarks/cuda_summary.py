"""What a report of products comes to: tables, what is slower, what the targets say."""

from typing import Any

from cuda_products import WAYS, Shape
from cuda_weights import Format

Results = list[dict[str, Any]]
"""The rows of a report, as `cuda_products.measure` returns them."""

TIMES = {
    "ours_us": "ours eval",
    "ours_build_us": "build",
    "ours_stream_us": "stream",
    "ours_traced_us": "traced",
    "ours_traced_stream_us": "stream",
    "stock_us": "stock eval",
    "stock_build_us": "build",
    "stock_stream_us": "stream",
    "stock_traced_us": "traced",
    "stock_traced_stream_us": "stream",
    "matmul_us": "f16 eval",
    "matmul_stream_us": "stream",
    "floor_us": "floor",
}
"""Columns of microseconds, by what a row of the report calls them."""
RATIOS = {
    "times_stock": "x stock eval",
    "times_stock_stream": "stream",
    "times_stock_traced": "traced",
    "times_stock_traced_stream": "stream",
}
"""Columns that say how many times as long stock MLX takes."""
NOISE = 1.02
"""How many times stock's time may pass for no slower: what the clock cannot tell."""

TARGETS: dict[Shape, dict[int, float]] = {
    (8192, 28672): {16: 42.0, 32: 52.0, 64: 80.0},
    (5120, 17408): {16: 21.0, 32: 27.0, 64: 38.0},
}
"""Microseconds that are asked of `TARGET_FORMAT` on an H200, by rows; those of 16
rows for fewer too."""
TARGET_FORMAT = Format("affine", 4, 128)


def title(shape: Shape, format: Format, layout: str) -> str:
    """Returns what stands above the lines of one shape."""
    k, n = shape
    names = ("rows", *TIMES.values(), "at most", *RATIOS.values())
    head = "  ".join(name.rjust(width(name)) for name in names)
    return f"\n{k}→{n}, {format}, layout {layout}, microseconds a product\n{head}"


def line(result: dict[str, Any]) -> str:
    """Returns one row of the table."""
    target = target_of(result)
    values = [*(result.get(name) for name in TIMES), target]
    cells = [str(result["rows"])]
    cells += ["-" if each is None else f"{each:.1f}" for each in values]
    ratios = (result.get(name) for name in RATIOS)
    cells += ["-" if each is None else f"{each:.2f}" for each in ratios]
    names = ("rows", *TIMES.values(), "at most", *RATIOS.values())
    aligned = (cell.rjust(width(name)) for cell, name in zip(cells, names, strict=True))
    return f"{'  '.join(aligned)}  {remark(result)}".rstrip()


def width(name: str) -> int:
    """Returns the width of a column: its lines are printed one by one."""
    return max(len(name), 6)


def remark(result: dict[str, Any]) -> str:
    if result["wrong"] is not None:
        return "WRONG"
    served = "by stock" if result["served_by_stock"] else ""
    return f"SLOWER {served}".strip() if is_slower(result) else served


def is_slower(result: dict[str, Any], way: str = "") -> bool:
    """Returns whether ours is slower, by "eval" or another of the `WAYS`."""
    ours, stock = result.get(f"ours{way}_us"), result.get(f"stock{way}_us")
    return ours is not None and stock is not None and ours > NOISE * stock


def target_of(result: dict[str, Any]) -> float | None:
    """Returns the microseconds that are asked of a product, if any are."""
    if result["format"] != str(TARGET_FORMAT):
        return None
    return TARGETS.get((result["k"], result["n"]), {}).get(max(result["rows"], 16))


def acceptance(results: Results) -> Results:
    """Returns what is asked of the rows that were timed, and whether it holds."""
    judged = []
    for each in results:
        target = target_of(each)
        if target is None:
            continue
        time_us = each.get("ours_us")
        judged.append(
            {
                **{name: each[name] for name in ("k", "n", "rows")},
                "target_us": target,
                "ours_us": time_us,
                "ours_build_us": each.get("ours_build_us"),
                **{f"ours{way}_us": each.get(f"ours{way}_us") for way in WAYS[1:]},
                "passed": time_us is not None and time_us <= target,
            }
        )
    return judged


def named(result: dict[str, Any]) -> str:
    return (
        f"{result['rows']} rows of {result['k']}→{result['n']}, {result['format']}, "
        f"layout {result['layout']}"
    )


def summary(report: dict[str, Any]) -> str:
    results: Results = report["results"]
    slower = [each for each in results if is_slower(each)]
    counts = [sum(is_slower(each, way) for each in results) for way in WAYS[1:]]
    wrong = [each for each in results if each["wrong"] is not None]
    lines = [f"\n{len(results)} products, {len(wrong)} wrong"]
    lines += [f"  WRONG {named(each)}: {each['wrong']}" for each in wrong]
    lines.append(
        f"slower than stock MLX by more than the noise: {len(slower)}; "
        "{} in a stream; {} traced, {} traced in a stream".format(*counts)
    )
    lines += [
        f"  {named(each)}: ours {each['ours_us']:.1f} us, stock {each['stock_us']:.1f}"
        for each in slower
    ]
    by_stock: dict[str, int] = {}
    for each in results:
        if (reason := each["served_by_stock"]) is not None:
            by_stock[reason] = by_stock.get(reason, 0) + 1
    lines += [f"served by stock: {times}, {each}" for each, times in by_stock.items()]
    for each in report["acceptance"]:
        took = "not timed"
        if each["ours_us"] is not None:
            took = (
                f"{each['ours_us']:.1f} us, {each['ours_build_us']:.1f} of it build; "
                f"{each['ours_stream_us']:.1f} in a stream; traced "
                f"{each['ours_traced_us']:.1f}, {each['ours_traced_stream_us']:.1f}"
            )
        lines.append(
            f"{'pass' if each['passed'] else 'FAIL'}  {each['k']}→{each['n']}, "
            f"{each['rows']} rows: at most {each['target_us']:.0f}, took {took}"
        )
    if not report["complete"]:
        lines.append("NOT COMPLETE: the time limit came first")
    return "\n".join(lines)
