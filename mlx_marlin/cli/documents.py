"""Documents as pages, charts and tables: those of `profile`, and result files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mlx_marlin.cli.page import Page
from mlx_marlin.cli.pictures import charts
from mlx_marlin.cli.pictures.charts import Chart, can_draw
from mlx_marlin.measure.profiling import Point, Roofline
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import (
    CANDIDATE,
    CHAIN,
    OURS,
    STOCK,
    FirstTokenRow,
    GenerationRow,
    ProductRow,
    Stage,
    Timing,
)
from mlx_marlin.tables import SOURCE, Table, Value, source, text

Document = Mapping[str, Any]


def profile_charts(document: Document) -> list[Chart]:
    """Returns the roofline of a document."""
    device = document["device"]
    roofs = {
        name: Roofline(tflops=device[key], bandwidth_gbs=device["bandwidth_gbs"])
        for name, key in (("roof of stock MLX", "stock_tflops"), ("roof", "tflops"))
        if can_draw(device[key], device["bandwidth_gbs"])
    }
    if not roofs:
        return []
    if len({*roofs.values()}) == 1:
        roofs.pop("roof of stock MLX", None)
    products = [_point(row) for row in document["profiles"] if not row["refusal"]]
    origins = sorted({product.origin for product in products})
    marks = f" ({', '.join(origins)})" if origins else ""
    return [charts.roofline(f"Roofline of {device['variant']}{marks}", roofs, products)]


def profile_page(document: Document, origin: str) -> Page:
    """Returns the page of a document."""
    device = document["device"]
    return Page(
        title=f"Profile of {device['variant']}",
        subtitle="Quantized matrix products, compared with the limits of the device",
        facts=[*_facts(device)],
        charts=profile_charts(document),
        tables=[
            profiles(document),
            plans(
                (
                    problem_cells(each["problem"]) | {"kernel": _kernel(each)},
                    each["plan"],
                )
                for each in document["profiles"]
            ),
            Table(title="Not profiled", rows=[*map(_skipped, document["skipped"])]),
        ],
        notes=refusals(document),
        origin=origin,
    )


def profiles(document: Document) -> Table:
    """Returns the table of the profiles of a document."""
    return Table(title="Products", rows=[*map(_row, document["profiles"])])


def plans(found: Iterable[tuple[dict[str, Value], str | None]]) -> Table:
    """Returns a table of plans, which are too long for a column beside others.

    `found`: what tells the products apart, and the plan, or None.
    """
    rows = [cells | {"plan": plan} for cells, plan in found if plan is not None]
    different = {tuple(row.values()): row for row in rows}
    return Table(title="Plans", rows=[*different.values()])


def refusals(document: Document) -> list[str]:
    """Returns why times cannot be right."""
    return [
        f"IMPOSSIBLE ({each['origin']}): {each['problem']['m']} x "
        f"{shape(each['problem'])}, {_kernel(each)}: {each['refusal']}"
        for each in document["profiles"]
        if each["refusal"]
    ]


def problem_cells(problem: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the rows, shape, format, dtype and layout of a product."""
    return {
        "rows": problem["m"],
        "k→n": shape(problem),
        "format": format_name(problem),
        "dtype": problem["dtype"],
        "layout": problem["layout"],
    }


def shape(problem: Mapping[str, Any]) -> str:
    """Returns the sizes of a product's weight."""
    return f"{problem['k']}→{problem['n']}"


def format_name(problem: Mapping[str, Any]) -> str:
    """Returns the format of a weight's codes."""
    return f"{problem['mode']} {problem['bits']}-bit g{problem['group_size']}"


def _facts(device: Document) -> Iterator[tuple[str, str]]:
    yield "device", device["variant"]
    yield "GPU cores", text(device["cores"])
    yield "peak", f"{text(device['tflops'])} TFLOPS"
    if device["stock_tflops"] != device["tflops"]:
        yield "peak of stock MLX", f"{text(device['stock_tflops'])} TFLOPS"
    yield "memory bandwidth", f"{text(device['bandwidth_gbs'])} GB/s"
    ridge = device["tflops"] * 1e3 / device["bandwidth_gbs"]
    yield "ridge point", f"{ridge:.3g} FLOP/byte"


def _kernel(profile: Document) -> str:
    first: str = profile["kernel"].split()[0]
    return f"stock {first}" if profile["served_by"] == "stock" else first


def _point(profile: Document) -> charts.Product:
    return charts.Product(
        point=Point(**profile["point"]),
        rows=profile["problem"]["m"],
        kernel=_kernel(profile),
        origin=source(profile["origin"]),
    )


def _row(profile: Document) -> dict[str, Value]:
    def percent(key: str) -> float | None:
        return None if profile[key] is None else 100 * profile[key]

    occupancy = profile["occupancy"] or dict.fromkeys(("resident", "limit", "low"))
    bottleneck = "IMPOSSIBLE" if profile["refusal"] else profile["bottleneck"]
    return problem_cells(profile["problem"]) | {
        "kernel": _kernel(profile),
        SOURCE: source(profile["origin"]),
        "ms": profile["point"]["seconds"] * 1e3,
        "TFLOPS": profile["tflops"],
        "compute %": percent("compute_utilization"),
        "GB/s": profile["bandwidth_gbs"],
        "memory %": percent("memory_utilization"),
        "FLOP/byte": profile["intensity"],
        "% of roof": percent("attained"),
        "bottleneck": bottleneck,
        "simdgroups": occupancy["resident"],
        "low occupancy": occupancy["limit"] if occupancy["low"] else "",
    }


def _skipped(row: Document) -> dict[str, Value]:
    cells = problem_cells(row["problem"])
    return cells | {"kernel": row["kernel"], "reason": row["reason"]}


FACTS = {
    "memory_gb": "memory, GB",
    "cores": "GPU cores",
    "backend": "back end",
    "python": "Python",
    "mlx": "MLX",
    "mlx_lm": "mlx-lm",
    "mlx_marlin": "mlx-marlin",
}
"""Names of the facts of a machine that are not the fields'."""


def result_charts(result: ResultFile) -> list[Chart]:
    """Returns a chart for each product that was timed with several numbers of rows."""
    groups: dict[str, dict[str, list[charts.Sample]]] = {}
    for row in result.products:
        problem = asdict(row.problem)
        title = f"{shape(problem)}, {format_name(problem)} {row.problem.dtype}"
        clocks = groups.setdefault(title, {})
        clocks.setdefault(row.clock, []).append(_sample(row))
    found = []
    for title, clocks in groups.items():
        # Decoding is a chain.
        clock = CHAIN if CHAIN in clocks else next(iter(clocks))
        sources = sorted({sample.source for sample in clocks[clock]})
        name = f"{title}, {clock} clock ({', '.join(sources)})"
        found.append(charts.staircase(name, clocks[clock]))
    return [*filter(None, found)]


def result_page(result: ResultFile, origin: str) -> Page:
    """Returns the page of a result."""
    tuned = any(row.arm.startswith(CANDIDATE) for row in result.products)
    command = "mlx-marlin tune" if tuned else "mlx-marlin bench"
    facts = asdict(result.machine).items()
    return Page(
        title=f"Results on {result.machine.chip or 'an unnamed device'}",
        subtitle=f"{'make mac' if result.stages else command}, {result.date}",
        facts=[(FACTS.get(name, name), str(value)) for name, value in facts],
        charts=result_charts(result),
        tables=[
            Table(title="Stages", rows=[*map(_stage, result.stages)]),
            products(result.products),
            plans(
                (problem_cells(asdict(row.problem)) | {"arm": row.arm}, plan.explain())
                for row in result.products
                if (plan := row.plan) is not None
            ),
            generation(result.generation),
            first_tokens(result.first_tokens),
        ],
        notes=result.notes,
        origin=origin,
    )


def _sample(row: ProductRow) -> charts.Sample:
    arm = row.arm.partition(":")[0]
    owner = "ours: " if row.plan is not None and arm != OURS else ""
    return charts.Sample(
        rows=row.problem.m,
        seconds=row.timing.seconds,
        name=f"{owner}{arm}, {row.problem.layout} layout",
        source=row.timing.source,
    )


def products(rows: Sequence[ProductRow]) -> Table:
    """Returns the table of times of products."""
    stock = {_key(row): row.timing for row in rows if row.arm == STOCK}
    cells = [_product(row, stock.get(_key(row))) for row in rows]
    return Table(title="Products", rows=cells)


def generation(rows: Sequence[GenerationRow]) -> Table:
    """Returns the table of the speeds of models."""
    return Table(title="Generation", rows=[*map(_generation, rows)])


def first_tokens(rows: Sequence[FirstTokenRow]) -> Table:
    """Returns the table of times to the first token in a new process."""
    return Table(title="First token", rows=[*map(_first_token, rows)])


def _key(row: ProductRow) -> tuple[object, ...]:
    """Returns what rows have in common whose times can be compared."""
    problem = row.problem
    sizes = (problem.m, problem.n, problem.k, problem.dtype)
    return (*sizes, format_name(asdict(problem)), row.clock, row.timing.source)


def _product(row: ProductRow, stock: Timing | None) -> dict[str, Value]:
    timing = row.timing
    return problem_cells(asdict(row.problem)) | {
        "arm": row.arm,
        "clock": row.clock,
        SOURCE: timing.source,
        "ms": timing.seconds * 1e3,
        "range, ms": timing.range * 1e3,
        "x stock": None if stock is None else stock.seconds / timing.seconds,
        "samples": timing.samples,
        "drift, %": 100 * timing.drift,
        "method": timing.method,
        "stock MLX would serve": row.handover,
    }


def _generation(row: GenerationRow) -> dict[str, Value]:
    return {
        "model": row.model,
        "arm": row.arm,
        "streams": row.streams,
        "prompt tokens": row.prompt_tokens,
        "new tokens": row.new_tokens,
        SOURCE: _source(row.prompt, row.step),
        "ms to first token": row.prompt.seconds * 1e3,
        "ms a step": row.step.seconds * 1e3,
        "prompt tokens/s": row.prompt_rate,
        "generated tokens/s": row.generation_rate,
    }


def _first_token(row: FirstTokenRow) -> dict[str, Value]:
    return {
        "model": row.model,
        "arm": row.arm,
        "prompt tokens": row.prompt_tokens,
        SOURCE: _source(row.cold, row.warm),
        "cold, ms": row.cold.seconds * 1e3,
        "warm, ms": row.warm.seconds * 1e3,
    }


def _stage(stage: Stage) -> dict[str, Value]:
    return {
        "stage": stage.name,
        "status": stage.status,
        "seconds on the host": stage.host_seconds,
        "detail": stage.detail,
    }


def _source(*timings: Timing) -> str:
    """Returns the source of a row with several times: measured if all are."""
    return max(timing.source for timing in timings)  # "predicted" is the greater
