"""Charts as values and as pictures: axes, rooflines, staircases, busy cores."""

import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import devices, planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.cli import main
from mlx_marlin.cli.pictures import busy_cores, charts, plots, roofline, staircase
from mlx_marlin.cli.pictures.charts import LEAST, MOST, Axis, Mark
from mlx_marlin.cli.pictures.staircase import Sample
from mlx_marlin.cli.pictures.text import schedule
from mlx_marlin.cli.profile import times
from mlx_marlin.cli.render import page, svg
from mlx_marlin.measure.profiling.roofline import Point, Roofline
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support.pictures import chosen, svg_texts
from support.strategies import devices as any_device
from support.strategies import plans

values = st.lists(st.floats(LEAST, MOST), min_size=1, max_size=5)
M4_MAX = devices.named("M4 Max")


def check(axis: Axis, contained: list[float]) -> None:
    """Checks what holds for every axis."""
    assert axis.low <= min(contained)
    assert max(contained) <= axis.high
    assert 2 <= len(axis.ticks) <= 12
    assert [*axis.ticks] == sorted({*axis.ticks})
    positions = [axis.position(value) for value in (*axis.ticks, *contained)]
    assert all(-1e-9 <= position <= 1 + 1e-9 for position in positions)
    labels = [charts.tick_label(tick) for tick in axis.ticks]
    assert len({*labels}) == len(labels)


@given(values)
def test_a_logarithmic_axis_contains_its_values(contained: list[float]) -> None:
    axis = charts.log_axis("name", contained)

    check(axis, contained)
    assert axis.is_log


@given(values)
def test_a_linear_axis_contains_its_values(contained: list[float]) -> None:
    check(charts.axis_from_zero("name", contained), [0.0, *contained])


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=5, unique=True))
def test_an_axis_of_rows_contains_its_values(rows: list[int]) -> None:
    axis = charts.rows_axis(rows)

    check(axis, [float(row) for row in rows])
    assert axis.is_log == (max(rows) > 64)
    assert all(tick == int(tick) >= 1 for tick in axis.ticks)


def products(
    rows: int, origin: str, *kernels: str, tflops: float = 1
) -> list[roofline.Product]:
    point = Point(flops=rows * 10**6, bytes=10**6, seconds=rows / tflops * 1e-6)
    return [
        roofline.Product(
            point=point, rows=rows, text="text", kernel=kernel, origin=origin
        )
        for kernel in kernels
    ]


ROOF = {"roof": Roofline(tflops=16, bandwidth_gbs=500)}


def test_the_roofline_bends_at_the_ridge_point() -> None:
    chart = roofline.chart("title", ROOF, products(4, "predicted", "gemv"))
    first, ridge, last = chart.series[0].marks

    assert (ridge.x, ridge.y) == (32, 16)
    assert last == Mark(x=chart.x.high, y=16)
    assert first.y == pytest.approx(first.x / 2)
    assert first.y >= chart.y.low


@given(
    st.floats(LEAST, MOST),
    st.floats(LEAST, MOST),
    st.lists(
        st.tuples(
            st.integers(1, 10**30), st.integers(1, 10**30), st.floats(1e-300, 1e300)
        )
    ),
)
def test_everything_on_a_roofline_is_within_its_axes(
    tflops: float, bandwidth: float, points: list[tuple[int, int, float]]
) -> None:
    chart = roofline.chart(
        "title",
        {"roof": Roofline(tflops=tflops, bandwidth_gbs=bandwidth)},
        [
            roofline.Product(
                point=Point(flops=flops, bytes=size, seconds=seconds),
                rows=1,
                text="",
                kernel="gemv",
                origin="measured",
            )
            for flops, size, seconds in points
        ],
    )

    for series in chart.series:
        for mark in series.marks:
            assert -1e-9 <= chart.x.position(mark.x) <= 1 + 1e-9
            assert -1e-9 <= chart.y.position(mark.y) <= 1 + 1e-9


def test_series_of_a_roofline_name_where_their_times_come_from() -> None:
    given = [
        *products(1, "predicted", "stock qmv", "gemv"),
        *products(1, "measured", "gemv"),
    ]
    _, *series = roofline.chart("title", ROOF, given).series

    assert [(one.name, one.color, one.is_measured) for one in series] == [
        ("gemv (predicted)", 0, False),
        ("gemv (measured)", 0, True),
        ("stock qmv (predicted)", 1, False),
    ]
    assert all("predicted" in mark.text for mark in series[0].marks)


def test_the_lowest_point_of_each_number_of_rows_is_labelled() -> None:
    given = [
        *products(1, "predicted", "gemv", tflops=0.2),
        *products(1, "predicted", "stock qmv", tflops=0.1),
        *products(8, "predicted", "gemv"),
    ]
    _, ours, stock = roofline.chart("title", ROOF, given).series

    assert [mark.label for mark in ours.marks] == ["", "8 rows"]
    assert [mark.label for mark in stock.marks] == ["1 row"]


@pytest.mark.parametrize("name", ["M1", "M4 Max", "H200"])
def test_the_staircase_has_what_plans_predict(name: str) -> None:
    device = devices.named(name)
    problem = Problem(m=3, n=4096, k=4096)
    samples = [*staircase.predicted(problem, device)]
    ours = {one.rows: one.seconds for one in samples if one.name == "ours"}

    assert [*ours] == [*range(1, 65)]
    assert {one.source for one in samples} == {"predicted"}
    for rows in (1, 7, 64):
        choice = planner.compare(Problem(m=rows, n=4096, k=4096), device=device)
        assert ours[rows] == choice.prediction.seconds
        stock = [one.seconds for one in samples if one.name != "ours"]
        assert bool(stock) == (choice.stock is not None)
        if choice.stock:
            assert stock[rows - 1] == choice.stock.seconds


def test_rows_that_overrides_cannot_plan_are_left_out() -> None:
    problem = Problem(m=8, n=4096, k=4096)
    with pytest.raises(ValueError, match="gemv"):
        planner.compare(problem, device=M4_MAX, kernel="gemv")
    rows = {one.rows for one in staircase.predicted(problem, M4_MAX, kernel="gemv")}

    assert 1 in rows
    assert 8 not in rows


def sample(rows: int, milliseconds: float, **fields: str) -> Sample:
    given = {"name": "ours", "source": "measured", **fields}
    return Sample(rows=rows, seconds=milliseconds / 1e3, **given)


def test_a_staircase_keeps_sources_apart_and_draws_the_shortest_time() -> None:
    chart = staircase.chart(
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
    assert staircase.chart("title", times) is None


@given(plans(), any_device())
def test_busy_cores_are_those_of_the_timeline(plan: Plan, device: Device) -> None:
    choice = chosen(plan, device)
    (chart,) = busy_cores.charts([choice])
    marks = chart.series[0].marks
    bars = [bar for bar in schedule(plan, device.cores) if bar.pieces]
    work = sum(bar.end - bar.begin for bar in bars)
    area = sum(mark.y * (after.x - mark.x) for mark, after in pairwise(marks))
    prediction = choice.prediction
    first_us = (prediction.seconds - prediction.dispatch) * 1e6

    assert marks[0].x == 0
    assert marks[0].y == len({bar.core for bar in bars})
    assert marks[-1].y == 0
    assert marks[-1].x <= chart.x.high * (1 + 1e-9)
    counts = [mark.y for mark in marks]
    assert counts == sorted(counts, reverse=True)
    # The area is the work, in the unit in which the busiest core takes all the time.
    longest = max(bar.end for bar in bars)
    assert area * longest == pytest.approx(work * marks[-1].x)
    assert marks[-1].x <= first_us * (1 + 1e-9)
    assert "(predicted)" in chart.title


PLAN = "plan 8 4096 4096 --chip M4"


def test_plan_plots_the_staircase_and_each_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.svg"

    assert main([*PLAN.split(), "--plot", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"\nsaved {path}\n")
    texts = svg_texts(path)
    assert {"ours (predicted)", "stock MLX (predicted)"} <= {*texts}
    for strategy in ("stripe", "split_k", "data_parallel"):
        assert sum(text.startswith(f"{strategy}: ") for text in texts) == 1
    timed = [text for text in texts if re.search(r"\d us\b", text)]
    assert timed
    assert all("(predicted)" in text for text in timed)


def test_profile_plots_the_roofline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "roofline.svg"
    words = ["profile", "--single-config", "8,4096,4096", "--mode", "affine"]
    words += ["--compare", "stock", "--chip", "M4 Max", "--plot", str(path)]

    assert main(words) == 0
    assert capsys.readouterr().out.endswith(f"saved {path}\n")
    texts = svg_texts(path)
    assert "gemm_register (predicted)" in texts
    assert any(re.fullmatch(r"stock \w+ \(predicted\)", text) for text in texts)
    assert any("546 GB/s" in text for text in texts)
    assert "8 rows" in texts


@pytest.mark.thinned(1)
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_same_chart_gives_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    first, second = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
    for path in (first, second):
        assert main([*PLAN.split(), "--json", "--plot", str(path)]) == 0

    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [first, second]


@pytest.mark.parametrize("command", [PLAN, "profile --single-config 1,64,128"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.pdf", "expected a name that ends in .svg or .png"),
        ("none/a.svg", "/none does not exist, expected a file in an existing folder"),
    ],
)
def test_a_file_that_cannot_be_a_picture_is_refused(
    command: str,
    name: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*command.split(), "--plot", str(tmp_path / name)]) == 2

    printed, error = capsys.readouterr()
    assert printed == ""
    assert f"--plot {tmp_path / name}: " in error
    assert words in error
    assert list(tmp_path.iterdir()) == []


def test_json_of_a_plan_stays_alone_when_it_is_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN.split(), "--json", "--plot", str(tmp_path / "a.svg")]) == 0
    assert json.loads(capsys.readouterr().out)["threadgroups"] > 0


@pytest.mark.parametrize("command", [PLAN, "profile --chip M4"])
def test_without_matplotlib_the_remedy_is_named(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(times, "predicted", None)  # it would take long
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.style", raising=False)

    assert main([*command.split(), "--plot", str(tmp_path / "a.svg")]) == 2
    assert "--plot draws with matplotlib: pip install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def chart_of(names: list[str]) -> charts.Chart:
    """Returns a chart with a series for each name."""
    samples = [sample(rows, 1.0, name=name) for rows in (1, 8) for name in names]
    found = staircase.chart("times", samples)
    assert found is not None
    return found


def test_no_two_series_look_alike() -> None:
    found = chart_of([f"arm {index}" for index in range(32)])

    figure = plots._figure([found])
    drawn = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(drawn) == 32
    text = str(svg.figures([found]))
    groups = re.findall(r'<g class="series (color\d)[^"]*">(.*?)</g>', text, re.DOTALL)
    shapes = {(color, shape_of(marks)) for color, marks in groups}
    assert len(shapes) == 32


def shape_of(marks: str) -> str:
    """Returns the first marker of a sample of a legend, or of a series."""
    points = re.search(r'<polygon points="([^"]*)"|<circle', marks)
    assert points is not None
    return (
        "circle" if points[1] is None else str(len(points[1].split())) + turn(points[1])
    )


def turn(points: str) -> str:
    """Returns the direction of a polygon's first corner from its centre."""
    corners = [tuple(map(float, each.split(","))) for each in points.split()]
    x, y = (sum(axis) / len(corners) for axis in zip(*corners, strict=True))
    return f"{math.degrees(math.atan2(corners[0][1] - y, corners[0][0] - x)):.0f}"


def test_a_page_has_the_colours_of_pictures() -> None:
    light = re.search(
        r":root \{(.*?)\}", (page.FOLDER / "page.css").read_text(), re.DOTALL
    )
    assert light is not None

    found = re.findall(r"--color(\d): (#\w+)", light[1])

    assert [int(index) for index, _ in found] == [*range(len(charts.COLORS))]
    assert [color.upper() for _, color in found] == [*charts.COLORS]


@pytest.mark.parametrize(("count", "wide"), [(1, [0]), (2, []), (3, [2]), (4, [])])
def test_a_chart_alone_in_its_line_takes_all_of_it(count: int, wide: list[int]) -> None:
    text = str(svg.figures([chart_of([f"arm {index}"]) for index in range(count)]))

    figures = text.split("<figure")[1:]
    assert [
        i for i, each in enumerate(figures) if each.startswith(' class="wide"')
    ] == wide
    for index, each in enumerate(figures):
        width = re.search(r'viewBox="0 0 (\d+)', each)
        assert width is not None
        lines = re.findall(r'x2="([\d.]+)"', each)
        assert float(width[1]) == (svg.WIDE if index in wide else svg.WIDTH)
        assert max(map(float, lines)) == float(width[1]) - svg.RIGHT


@pytest.mark.parametrize(("length", "columns"), [(10, 2), (36, 2), (60, 1)])
def test_a_legend_has_two_columns_if_they_fit(length: int, columns: int) -> None:
    found = chart_of([f"{index}" * length for index in range(5)])

    legend = plots._figure([found]).axes[0].get_legend()

    assert legend._ncols == columns
