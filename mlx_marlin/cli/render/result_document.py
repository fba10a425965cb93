"""The page and the charts of a result file of `mlx-marlin bench` and `make mac`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_marlin.cli.pictures import staircase
from mlx_marlin.cli.pictures.charts import Chart
from mlx_marlin.cli.render.fields import Fields
from mlx_marlin.cli.render.page import Page
from mlx_marlin.cli.render.profile_document import format_name, problem_cells, shape
from mlx_marlin.cli.render.tables import (
    UNKNOWN,
    Cell,
    Table,
    number_cell,
    source,
    source_cell,
    text_cell,
)

SCHEMA = "mlx-marlin result"
VERSION = 1

CHAIN = "chain"
"""The clock that charts show if a product has it, because decoding is a chain."""
STOCK = "mx.quantized_matmul"
MEASURED = "wall time"
"""The only method of a measurement."""
PRODUCTS = (
    *("rows", "k→n", "format", "dtype", "layout", "arm", "clock", "times", "ms"),
    *("range, ms", "x stock", "samples", "drift, %", "method", "stock MLX would serve"),
    "plan",
)
GENERATION = (
    *("model", "arm", "streams", "prompt tokens", "new tokens", "times"),
    *("ms to first token", "ms a step", "prompt tokens/s", "generated tokens/s"),
)
FIRST_TOKENS = ("model", "arm", "prompt tokens", "times", "cold, ms", "warm, ms")
STAGES = ("stage", "status", "seconds on the host", "detail")
STATUSES = ("passed", "failed")
"""Statuses of a stage that are highlighted."""
FACTS = {
    "chip": "chip",
    "architecture": "architecture",
    "cores": "GPU cores",
    "memory_gb": "memory, GB",
    "system": "system",
    "build": "build",
    "backend": "back end",
    "python": "Python",
    "mlx": "MLX",
    "mlx_lm": "mlx-lm",
    "mlx_marlin": "mlx-marlin",
    "commit": "commit",
    "kernels": "kernels",
}
"""Names of the facts of a machine, by the field."""


def charts(data: Mapping[str, Any]) -> list[Chart]:
    """Returns a chart for each product that was timed with several numbers of rows.

    Args:
        data: The document.

    Raises:
        ValueError: If an object or a list of it is something else.
    """
    return _charts(Fields(data, "the document").rows("products"))


def page(data: Mapping[str, Any], origin: str) -> Page:
    """Returns the page of a document.

    Args:
        data: The document.
        origin: What it was read from.

    Raises:
        ValueError: If an object or a list of it is something else.
    """
    document = Fields(data, "the document")
    machine, products = document.fields("machine"), document.rows("products")
    return Page(
        title=f"Results on {machine.text('chip') or 'an unnamed device'}",
        subtitle=f"{_command(document)}, {document.text('date') or 'without a date'}",
        facts=[*_facts(machine)],
        charts=_charts(products),
        tables=[
            _products(products),
            _generation(document.rows("generation")),
            _first_tokens(document.rows("first_tokens")),
            _stages(document.rows("stages")),
        ],
        notes=[*filter(None, document.texts("notes"))],
        origin=origin,
    )


def _command(document: Fields) -> str:
    """Returns what made a document: only `make mac` has stages."""
    return "make mac" if document.rows("stages") else "mlx-marlin bench"


def _facts(machine: Fields) -> Iterator[tuple[str, str]]:
    for key, name in FACTS.items():
        value = machine.number(key)
        yield name, machine.text(key) if value is None else f"{value:g}"


def _charts(products: Sequence[Fields]) -> list[Chart]:
    groups: dict[str, dict[str, list[staircase.Sample]]] = {}
    for row in products:
        problem = row.fields("problem")
        title = f"{shape(problem)}, {format_name(problem)} {problem.text('dtype')}"
        sample = _sample(row, problem)
        if sample is not None:
            clocks = groups.setdefault(title, {})
            clocks.setdefault(row.text("clock"), []).append(sample)
    found = []
    for title, clocks in groups.items():
        clock = CHAIN if CHAIN in clocks else next(iter(clocks))
        sources = sorted({sample.source for sample in clocks[clock]})
        name = f"{title}, {clock} clock ({', '.join(sources)})"
        found.append(staircase.chart(name, clocks[clock]))
    return [*filter(None, found)]


def _sample(row: Fields, problem: Fields) -> staircase.Sample | None:
    rows, time = problem.integer("m"), row.number("milliseconds")
    if rows is None or time is None:
        return None
    layout = problem.text("layout")
    return staircase.Sample(
        rows=rows,
        seconds=time / 1e3,
        name=f"{row.text('arm')}, {layout} layout" if layout else row.text("arm"),
        source=_source(row),
    )


def _source(timing: Fields) -> str:
    """Returns where a time comes from. A method that measures nothing decides."""
    found = source(timing.text("source"))
    if found == "measured" and timing.text("method") not in ("", MEASURED):
        return UNKNOWN
    return found


def _products(products: Sequence[Fields]) -> Table:
    stock = {
        _key(row): time
        for row in products
        if row.text("arm") == STOCK and (time := row.number("milliseconds"))
    }
    return Table(
        title="Products",
        heads=PRODUCTS,
        rows=[_product(row, stock.get(_key(row))) for row in products],
        sources=[_source(row) for row in products],
    )


def _key(row: Fields) -> tuple[object, ...]:
    """Returns what rows have in common whose times can be compared."""
    problem = row.fields("problem")
    sizes = (problem.integer(name) for name in "mnk")
    names = (format_name(problem), problem.text("dtype"), row.text("clock"))
    return (*sizes, *names, _source(row))


def _product(row: Fields, stock: float | None) -> list[Cell]:
    time, drift = row.number("milliseconds"), row.number("drift")
    ratio = stock / time if stock and time else None
    return [
        *problem_cells(row.fields("problem")),
        text_cell(row.text("arm")),
        text_cell(row.text("clock")),
        source_cell(_source(row)),
        number_cell(time, is_figure=True),
        number_cell(row.number("range_ms"), 2, is_figure=True),
        number_cell(ratio, 3, is_figure=True),
        number_cell(row.number("samples")),
        number_cell(None if drift is None else 100 * drift, 2),
        text_cell(row.text("method")),
        text_cell(row.text("handover")),
        text_cell(_plan(row.fields("plan"))),
    ]


def _plan(plan: Fields) -> str:
    """Returns a plan's kernel, sizes and division of the work, as far as known."""
    tile, work = plan.fields("tile"), plan.fields("work")
    sizes = "x".join(str(tile.integer(name)) for name in "mnk" if tile.integer(name))
    along = [plan.integer(f"simdgroups_{name}") for name in "mnk"]
    simdgroups = "x".join(str(count) for count in along if count)
    parts = [
        " ".join(filter(None, (plan.text("kernel"), sizes))),
        f"{simdgroups} simdgroups" if simdgroups else "",
        *(
            f"{count} {name}"
            for name in ("buffers", "loaders")
            if (count := plan.integer(name))
        ),
        work.text("strategy"),
        f"{count} threadgroups" if (count := work.integer("threadgroups")) else "",
        f"{count} slices" if (count := work.integer("slices") or 0) > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _generation(rows: Sequence[Fields]) -> Table:
    sources = [_of_both(row.fields("prompt"), row.fields("step")) for row in rows]
    return Table(
        title="Generation",
        heads=GENERATION,
        rows=[
            [
                text_cell(row.text("model")),
                text_cell(row.text("arm")),
                number_cell(row.number("streams")),
                number_cell(row.number("prompt_tokens")),
                number_cell(row.number("new_tokens")),
                source_cell(found),
                _milliseconds(row.fields("prompt")),
                _milliseconds(row.fields("step")),
                number_cell(row.number("prompt_tokens_per_second"), is_figure=True),
                number_cell(row.number("generated_tokens_per_second"), is_figure=True),
            ]
            for row, found in zip(rows, sources, strict=True)
        ],
        sources=sources,
    )


def _first_tokens(rows: Sequence[Fields]) -> Table:
    sources = [_of_both(row.fields("cold"), row.fields("warm")) for row in rows]
    return Table(
        title="First token",
        heads=FIRST_TOKENS,
        rows=[
            [
                text_cell(row.text("model")),
                text_cell(row.text("arm")),
                number_cell(row.number("prompt_tokens")),
                source_cell(found),
                _milliseconds(row.fields("cold")),
                _milliseconds(row.fields("warm")),
            ]
            for row, found in zip(rows, sources, strict=True)
        ],
        sources=sources,
    )


def _stages(rows: Sequence[Fields]) -> Table:
    return Table(
        title="Stages",
        heads=STAGES,
        rows=[
            [
                text_cell(row.text("name")),
                _status(row.text("status")),
                number_cell(row.number("host_seconds"), 3),
                text_cell(row.text("detail")),
            ]
            for row in rows
        ],
        sources=[""] * len(rows),
    )


def _status(text: str) -> Cell:
    badge = text if text in STATUSES else "failed" if text == "timed out" else None
    return text_cell(text, badge)


def _milliseconds(timing: Fields) -> Cell:
    return number_cell(timing.number("milliseconds"), is_figure=True)


def _of_both(first: Fields, second: Fields) -> str:
    """Returns the source of a row with two times: measured if both are."""
    sources = (_source(first), _source(second))
    return next((found for found in sources if found != "measured"), "measured")
