"""Charts as values and as pictures: rooflines and staircases."""

import math
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

from cli.conftest import Run
from mlx_marlin.backends import devices, planner
from mlx_marlin.cli import profiled
from mlx_marlin.cli.pictures import charts, figures, plan_picture
from mlx_marlin.cli.pictures.charts import LEAST, MOST, Mark, Sample
from mlx_marlin.measure.profiling import Point, Roofline
from mlx_marlin.planning.problem import Problem
from support.pictures import svg_texts
from support.profiles import sampled

M4_MAX = devices.named("M4 Max")


def products(
    rows: int, origin: str, *kernels: str, tflops: float = 1
) -> list[charts.Product]:
    point = Point(flops=rows * 10**6, bytes=10**6, seconds=rows / tflops * 1e-6)
    return [
        charts.Product(point=point, rows=rows, kernel=kernel, origin=origin)
        for kernel in kernels
    ]


ROOF = {"roof": Roofline(tflops=16, bandwidth_gbs=500)}


def test_the_roofline_bends_at_the_ridge_point() -> None:
    chart = charts.roofline("title", ROOF, products(4, "predicted", "gemv"))
    first, ridge, last = chart.series[0].marks

    assert (ridge.x, ridge.y) == (32, 16)
    assert last == Mark(4 * 32, 16)
    assert first.y == pytest.approx(first.x / 2)
    assert first.y >= 1 / 4


@sampled(3, 9)
@pytest.mark.parametrize("values", [(LEAST, LEAST), (LEAST, MOST), (16, 500)])
@pytest.mark.parametrize("point", [None, (1, 10**30, 1e300), (10**30, 1, 1e-300)])
def test_extreme_rooflines_are_drawn(
    values: tuple[float, float], point: tuple[int, int, float] | None, tmp_path: Path
) -> None:
    tflops, bandwidth = values
    found = products(1, "measured", "gemv")
    if point is not None:
        flops, size, seconds = point
        there = Point(flops=flops, bytes=size, seconds=seconds)
        found.append(replace(found[0], point=there))
    roofs = {"roof": Roofline(tflops=tflops, bandwidth_gbs=bandwidth)}
    chart = charts.roofline("title", roofs, found)
    figures.save(tmp_path / "a.svg", "--plot", lambda: figures.figure([chart]))

    assert len(chart.series[1].marks) == 1
    assert "ours: gemv (measured)" in svg_texts(tmp_path / "a.svg")


def test_series_of_a_roofline_name_where_their_times_come_from() -> None:
    given = [
        *products(1, "predicted", "stock qmv", "gemv"),
        *products(1, "measured", "gemv"),
    ]
    _, *series = charts.roofline("title", ROOF, given).series

    assert [(one.name, one.color, one.is_measured) for one in series] == [
        ("ours: gemv (predicted)", 0, False),
        ("ours: gemv (measured)", 0, True),
        ("stock qmv (predicted)", 1, False),
    ]


def test_the_lowest_point_of_each_number_of_rows_is_labelled() -> None:
    given = [
        *products(1, "predicted", "gemv", tflops=0.2),
        *products(1, "predicted", "stock qmv", tflops=0.1),
        *products(8, "predicted", "gemv"),
    ]
    _, ours, stock = charts.roofline("title", ROOF, given).series

    assert [mark.label for mark in ours.marks] == ["", "8 rows"]
    assert [mark.label for mark in stock.marks] == ["1 row"]


@pytest.mark.parametrize("name", ["M1", "M4 Max", "H200"])
def test_the_staircase_has_what_plans_predict(name: str) -> None:
    device = devices.named(name)
    problem = Problem(m=3, n=4096, k=4096)
    samples = [*charts.predicted_samples(problem, device)]
    ours = {one.rows: one.seconds for one in samples if one.name == "ours"}

    assert [*ours] == [*range(1, 65)]
    assert {one.source for one in samples} == {"predicted"}
    for rows in (1, 7, 64):
        choice = planner.compare(Problem(m=rows, n=4096, k=4096), device=device)
        assert ours[rows] == choice.prediction.seconds


def test_rows_that_overrides_cannot_plan_are_left_out() -> None:
    problem = Problem(m=8, n=4096, k=4096)
    with pytest.raises(ValueError, match="gemv"):
        planner.compare(problem, device=M4_MAX, kernel="gemv")
    rows = {
        one.rows for one in charts.predicted_samples(problem, M4_MAX, kernel="gemv")
    }

    assert 1 in rows
    assert 8 not in rows


def sample(rows: int, milliseconds: float, **fields: str) -> Sample:
    given = {"name": "ours", "source": "measured", **fields}
    return Sample(rows=rows, seconds=milliseconds / 1e3, **given)


def test_a_staircase_keeps_sources_apart_and_draws_the_shortest_time() -> None:
    chart = charts.staircase(
        "title",
        [
            *(sample(8, 2), sample(8, 1), sample(1, 0.5)),
            *(sample(1, 0.7, source="predicted"), sample(2, 0.7, name="stock")),
        ],
    )
    assert chart is not None
    measured, predicted, stock = chart.series

    assert [(mark.x, mark.y) for mark in measured.marks] == [(1, 500), (8, 1000)]
    assert (measured.name, measured.is_measured) == ("ours (measured)", True)
    assert (predicted.name, predicted.is_measured) == ("ours (predicted)", False)
    assert (measured.color, predicted.color, stock.color) == (0, 0, 1)


@pytest.mark.parametrize(
    "times",
    [
        [],
        [sample(1, 1)],
        [sample(1, 1), sample(1, 2)],
        [sample(1, 1), sample(0, 1), sample(-8, 1)],
        [sample(1, 1), sample(8, 0)],
        [sample(1, 1), sample(8, math.nan), sample(16, math.inf)],
    ],
)
def test_times_of_one_number_of_rows_are_no_staircase(times: list[Sample]) -> None:
    assert charts.staircase("title", times) is None


PLAN = "plan 8 4096 4096 --chip M4"


def test_plan_plots_the_staircase(tmp_path: Path, printed: Run) -> None:
    path = tmp_path / "plan.svg"

    assert printed(f"{PLAN} --plot", path).endswith(f"\nsaved {path}\n")
    texts = svg_texts(path)
    assert "ours (predicted)" in texts


def test_profile_plots_the_roofline(tmp_path: Path, printed: Run) -> None:
    path = tmp_path / "roofline.svg"
    words = "--single-config 8,512,1024 --mode affine --chip 'M4 Max'"

    assert printed(f"profile {words} --plot", path).endswith(f"saved {path}\n")
    texts = svg_texts(path)
    assert "ours: gemm_register (predicted)" in texts
    assert any("546 GB/s" in text for text in texts)
    assert "8 rows" in texts


@pytest.mark.parametrize(
    "line", [f"{PLAN} --plot", f"{PLAN} --save", "profile --chip M4 --plot"]
)
def test_without_matplotlib_the_remedy_is_named_and_the_file_kept(
    line: str, tmp_path: Path, refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiled, "timed", None)  # it would take long
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.style", raising=False)
    path = tmp_path / "a.svg"
    path.write_text("kept")

    said, option = refused(line, path), line.split()[-1]
    assert f"{option} draws with matplotlib, pip install matplotlib: " in said
    assert 'pip install ".[plot]" in a checkout' in said
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_places_depend_on_no_text() -> None:
    """The solver of a layout ends elsewhere with texts that are measured otherwise."""
    choice = planner.compare(Problem(m=8, n=256, k=512), device=M4_MAX)
    chart = charts.staircase("title", [sample(1, 1), sample(8, 1)])
    assert chart is not None
    wide = replace(chart, y="W" * 30, x="x")

    def places(figure: Any) -> list[Any]:
        assert figure.get_layout_engine() is None
        figure.draw_without_rendering()
        return [axes.get_position().bounds for axes in figure.axes]

    assert places(figures.figure([chart] * 2)) == places(figures.figure([wide] * 2))
    big = replace(choice, device=replace(choice.device, name="W" * 300))
    drawn = [places(plan_picture.figure([each] * 4)) for each in (choice, big)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("source", ["measured", "predicted"])
def test_up_to_four_series_with_equal_times_are_all_seen(source: str) -> None:
    samples = [
        sample(rows, 1, name=f"arm {index}", source=source)
        for index in range(4)
        for rows in (1, 8)
    ]
    found = charts.staircase("times", samples)
    assert found is not None
    figure = figures.figure([found])
    (axes,) = figure.axes
    axes.get_legend().remove()  # type: ignore[union-attr]
    picture = imread(BytesIO(figures.content(lambda: figure, ".png")))[..., :3]

    x, _, right, _ = axes.get_position().extents
    middle = (x + right) / 2  # the markers of 1 and 8 rows are left and right of it
    for left, end in ((x, right), (middle - 0.1, middle + 0.1)):
        part = picture[:, slice(*(int(at * picture.shape[1]) for at in (left, end)))]
        for color in figures.COLORS[:4]:
            assert (abs(part - to_rgb(color)).max(axis=2) < 0.15).any(), color


@pytest.mark.parametrize("microseconds", [1e-3, 1, 1e5])
def test_nothing_of_a_chart_is_outside_of_its_picture(microseconds: float) -> None:
    name = "dequantize + matmul, mlx layout"
    samples = [sample(rows, microseconds / 1e3, name=name) for rows in (1, 8, 512)]
    found = charts.staircase(
        "4096→14336, affine 4-bit g64 float16, chain " * 3, samples
    )
    assert found is not None
    roofs = charts.roofline("R" * 60, ROOF, products(512, "predicted", name))
    figure = figures.figure([found, roofs])
    figures.content(lambda: figure, ".svg")
    figure.draw_without_rendering()  # places are those of the file's resolution

    undrawn = {
        tick.label1
        for axes in figure.axes
        for axis, (low, high) in (
            (axes.xaxis, sorted(axes.get_xlim())),
            (axes.yaxis, sorted(axes.get_ylim())),
        )
        for tick in axis.get_major_ticks()
        if not low <= tick.get_loc() <= high
    }
    left, bottom, right, top = figure.bbox.extents
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible() and text not in undrawn:
            x, y, end, upper = text.get_window_extent().extents
            assert left <= x <= end <= right + 1, text
            assert bottom <= y <= upper <= top + 1, text


def test_no_two_series_look_alike() -> None:
    names = [f"arm {index}" for index in range(32)]
    samples = [sample(rows, 1.0, name=name) for rows in (1, 8) for name in names]
    found = charts.staircase("times", samples)
    assert found is not None

    figure = figures.figure([found])
    drawn = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(drawn) == 32
