"""What a report of products comes to: tables, what is slower, what the targets say."""

from typing import Any

from cuda_products import Shape
from cuda_report import table
from cuda_weights import Format

Results = list[dict[str, Any]]
"""The rows of a report, as `cuda_products.measure` returns them."""

TIMES = {
    "ours_us": "ours us",
    "ours_build_us": "of it build",
    "stock_us": "stock us",
    "stock_build_us": "of it build",
    "matmul_us": "matmul us",
    "floor_us": "floor us",
}
"""Columns of the table, by what a row calls them."""
NOISE = 1.02
"""How many times stock's time may pass for no slower: what the clock cannot tell."""

TARGETS: dict[Shape, dict[int, float]] = {
    (8192, 28672): {16: 42.0, 32: 52.0, 64: 80.0},
    (5120, 17408): {16: 21.0, 32: 27.0, 64: 38.0},
}
"""Microseconds that are asked of `TARGET_FORMAT` on an H200, by rows; those of 16
rows for fewer too."""
TARGET_FORMAT = Format("affine", 4, 128)


def block(results: Results) -> str:
    """Returns the table of one shape."""
    first = results[0]
    title = f"\n{first['k']}→{first['n']}, {first['format']}, layout {first['layout']}"
    head = ("rows", *TIMES.values(), "times stock", "")
    return f"{title}\n{table([head, *(cells(each) for each in results)])}"


def cells(result: dict[str, Any]) -> tuple[str, ...]:
    times = (result.get(name) for name in TIMES)
    ratio = result.get("times_stock")
    return (
        str(result["rows"]),
        *("-" if each is None else f"{each:.1f}" for each in times),
        "-" if ratio is None else f"{ratio:.2f}",
        remark(result),
    )


def remark(result: dict[str, Any]) -> str:
    if result["wrong"] is not None:
        return "WRONG"
    served = "by stock" if result["served_by_stock"] else ""
    return f"SLOWER {served}".strip() if is_slower(result) else served


def is_slower(result: dict[str, Any]) -> bool:
    return "stock_us" in result and result["ours_us"] > NOISE * result["stock_us"]


def acceptance(results: Results) -> Results:
    """Returns what is asked of the rows that were timed, and whether it holds."""
    judged = []
    for each in results:
        targets = TARGETS.get((each["k"], each["n"]), {})
        target = targets.get(max(each["rows"], 16))
        if each["format"] != str(TARGET_FORMAT) or target is None:
            continue
        time_us = each.get("ours_us")
        judged.append(
            {
                **{name: each[name] for name in ("k", "n", "rows")},
                "target_us": target,
                "ours_us": time_us,
                "ours_build_us": each.get("ours_build_us"),
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
    wrong = [each for each in results if each["wrong"] is not None]
    lines = [f"\n{len(results)} products, {len(wrong)} wrong"]
    lines += [f"  WRONG {named(each)}: {each['wrong']}" for each in wrong]
    lines.append(f"slower than stock MLX by more than the noise: {len(slower)}")
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
            took = f"{each['ours_us']:.1f} us, {each['ours_build_us']:.1f} of it build"
        lines.append(
            f"{'pass' if each['passed'] else 'FAIL'}  {each['k']}→{each['n']}, "
            f"{each['rows']} rows: at most {each['target_us']:.0f}, took {took}"
        )
    if not report["complete"]:
        lines.append("NOT COMPLETE: the time limit came first")
    return "\n".join(lines)
