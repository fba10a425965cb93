"""The page and the charts of a result file of `mlx-marlin bench` and `make mac`."""

from collections.abc import Sequence
from dataclasses import asdict

from mlx_marlin.cli.pictures import staircase
from mlx_marlin.cli.pictures.charts import Chart
from mlx_marlin.cli.render.page import Page
from mlx_marlin.cli.render.profile_document import (
    format_name,
    plans,
    problem_cells,
    shape,
)
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
from mlx_marlin.tables import SOURCE, Table, Value

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


def charts(result: ResultFile) -> list[Chart]:
    """Returns a chart for each product that was timed with several numbers of rows."""
    groups: dict[str, dict[str, list[staircase.Sample]]] = {}
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
        found.append(staircase.chart(name, clocks[clock]))
    return [*filter(None, found)]


def page(result: ResultFile, origin: str) -> Page:
    """Returns the page of a result."""
    tuned = any(row.arm.startswith(CANDIDATE) for row in result.products)
    command = "mlx-marlin tune" if tuned else "mlx-marlin bench"
    facts = asdict(result.machine).items()
    return Page(
        title=f"Results on {result.machine.chip or 'an unnamed device'}",
        subtitle=f"{'make mac' if result.stages else command}, {result.date}",
        facts=[(FACTS.get(name, name), str(value)) for name, value in facts],
        charts=charts(result),
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


def _sample(row: ProductRow) -> staircase.Sample:
    arm = row.arm.partition(":")[0]
    owner = "ours: " if row.plan is not None and arm != OURS else ""
    return staircase.Sample(
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
