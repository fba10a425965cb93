"""The pictures of a plan, in text and drawn, show what its work says."""

import json
import re
from collections import Counter, defaultdict
from itertools import repeat
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from cli.conftest import Run
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.cli.pictures import plan_picture
from mlx_marlin.cli.pictures import text as pictures
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support.pictures import chosen, svg_texts
from support.profiles import sampled
from support.strategies import devices, plans, problems

EXAMPLE = Path(__file__).parents[2] / "examples" / "seven_tiles"
LARGEST_SVG = 60_000

SEVEN = "plan 8 224 5120 --chip M4 --cores 5"
CEIL = "--strategy stripe --partition ceil --threadgroups 5 --k-parallel 1"
STRATEGIES = {
    "data_parallel": ("", 7),
    "stripe": ("--threadgroups 5 --k-parallel 1", 5),
    "split_k": ("--k-parallel 5", 35),
    "stream_k": ("--threadgroups 5", 5),
    "hybrid": ("--whole 5 --threadgroups 10", 10),
    "hytis": ("--simdgroups-n 2 --whole 2", 5),
}
"""Strategy -> how it is to cut the seven tiles, and into how many threadgroups."""


@st.composite
def wide_plans(draw: st.DrawFn) -> Plan:
    """Draws a plan with wide tiles."""
    m, width = draw(st.sampled_from([(1, 2), (8, 4), (16, 2), (16, 4), (100, 2)]))
    columns = draw(st.integers(width + 1, 60))
    return planner.make(
        Problem(m=m, n=32 * columns, k=512),
        strategy="hytis",
        simdgroups_n=width,
        whole=draw(st.integers(1, (columns - 1) // width)) * -(-m // 64),
    )


ANY = plans() | plans(of=problems(max_m=300, max_n=2000, max_k=256)) | wide_plans()
"""Plans of few tiles, all of which are shown, of many, and of wide ones."""


def owners(plan: Plan) -> dict[int, set[int]]:
    """Returns the threadgroups of each tile: all are asked what they do."""
    found: dict[int, set[int]] = defaultdict(set)
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            found[split.tile].add(threadgroup)
    return found


def named(text: str) -> set[int]:
    """Reads "3", "0-2" and "0,2-4"; of a text with "..", what it says."""
    numbers: set[int] = set()
    for part in re.split(r",|\.\.", text):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[:-1]]


def drawn(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Returns the names of the columns, and the cells of each row of tiles."""
    lines = [line for line in pictures.tile_map(plan).splitlines() if "|" in line]
    return cells(lines[0]), [cells(line) for line in lines[1:]]


@given(ANY)
def test_a_map_names_the_threadgroups_that_compute_each_tile(plan: Plan) -> None:
    (_, *columns), rows = drawn(plan)
    computed = owners(plan)

    for head, *names in rows:
        for column, name in zip(columns, names, strict=True):
            if pictures.GAP in (head, column):
                assert name == pictures.GAP
                continue
            row = int(head.removeprefix("row "))
            everyone = computed[int(column) * plan.m_tiles + row]
            assert named(name) <= everyone
            assert {min(everyone), max(everyone)} <= named(name)
            assert ".." in name or named(name) == everyone


@given(ANY)
def test_a_map_elides_the_middle_of_many_rows_and_columns(plan: Plan) -> None:
    (_, *columns), rows = drawn(plan)

    assert (columns[0], columns[-1]) == ("0", str(plan.n_tiles - 1))
    assert rows[-1][0] == f"row {plan.m_tiles - 1}"
    assert len(rows) == min(plan.m_tiles, pictures.SHOWN + 1)
    whole = [plan.columns_of(column * plan.m_tiles) for column in range(plan.n_tiles)]
    elided = sum(whole) > pictures.SHOWN * plan.tile.n
    assert (pictures.GAP in columns) == elided
    if not elided:
        assert columns == [str(column) for column in range(plan.n_tiles)]
        return
    gap = columns.index(pictures.GAP)
    half = pictures.SHOWN // 2 * plan.tile.n
    # As many as fit on each side, and at least the outermost.
    for side, sizes in ((columns[:gap], whole), (columns[gap + 1 :], whole[::-1])):
        assert sum(sizes[: len(side)]) <= half or len(side) == 1
        assert sum(sizes[: len(side) + 1]) > half


@given(ANY)
def test_a_wide_tile_spans_the_columns_that_it_replaces(plan: Plan) -> None:
    text = pictures.tile_map(plan)
    lines = [line for line in text.splitlines() if "|" in line]
    borders = [[at for at, mark in enumerate(line) if mark == "|"] for line in lines]
    (_, *columns), _ = drawn(plan)
    sizes = [
        end - begin for begin, end in zip(borders[0], borders[0][1:], strict=False)
    ]

    assert all(each == borders[0] for each in borders)
    narrow = {size for size, name in zip(sizes, columns, strict=True) if name.isdigit()}
    wide = [
        size
        for size, name in zip(sizes, columns, strict=True)
        if name.isdigit() and int(name) < plan.wide_columns
    ]
    assert all(size == plan.simdgroups_n * min(narrow) for size in wide)
    assert len(narrow) == (2 if wide else 1)


@given(ANY)
def test_idle_threadgroups_are_named(plan: Plan) -> None:
    busy = set().union(*owners(plan).values())
    idle = set(range(plan.num_threadgroups)) - busy
    said = re.search(r"^idle: (.*)$", pictures.tile_map(plan), re.MULTILINE)

    assert (said is not None) == bool(idle)
    if said:
        assert {min(idle), max(idle)} <= named(said[1]) <= idle


@given(ANY, devices())
def test_bars_hold_all_work_and_no_core_has_two_at_a_time(
    plan: Plan, device: Device
) -> None:
    bars = pictures.schedule(plan, device.cores)
    seen: Counter[tuple[int, int]] = Counter()
    free = [0] * device.cores

    for bar in bars:
        assert bar.begin == free[bar.core] == min(free)
        at = bar.begin
        for piece in bar.pieces:
            split = piece.split
            wide = plan.columns_of(split.tile) // plan.tile.n
            assert (piece.begin, piece.end) == (at, at + wide * split.k_tile_count)
            at = piece.end
            seen.update(
                (split.tile, split.k_idx + k) for k in range(split.k_tile_count)
            )
        assert bar.end == at
        free[bar.core] = at
    assert [bar.threadgroup for bar in bars] == list(range(plan.num_threadgroups))
    assert len(seen) == seen.total() == plan.work.total


@given(ANY, devices())
def test_a_timeline_lists_ranges_and_ends_within_the_predicted_time(
    plan: Plan, device: Device
) -> None:
    choice = chosen(plan, device)
    _, head, *rows = pictures.timeline(choice).splitlines()
    first_dispatch = choice.prediction.seconds - choice.prediction.dispatch
    place = head.index(" 0 ") + 1

    assert head.endswith(f" {first_dispatch * 1e6:.1f} us (model, not measured)")
    shown = [row for row in rows if re.match(r" *\d+ ", row)]
    indices = pictures.ends(plan.num_threadgroups, pictures.SHOWN)
    assert [int(row.split()[0]) for row in shown] == [
        index for index in indices if index is not None
    ]
    for row in shown:
        threadgroup = int(row.split()[0])
        begin, end = plan.work.range(threadgroup)
        said = row[:place].split()[-1]
        assert said == (f"{begin}-{end - 1}" if end > begin else "idle")
        tiles = [split.tile for split in plan.work.splits(threadgroup)]
        bars = row[place:].split("|")[1:]
        assert min(len(tiles), 1) <= len(bars) <= len(tiles)
        told = [int(name) for name in map(str.strip, bars, repeat("=-")) if name]
        assert told == [tile for tile in tiles if tile in told]
        # A range too short to be seen is one character all the same.
        assert len(row[place:]) <= pictures.WIDTH + 1


def test_a_bar_tells_whole_tiles_from_parts() -> None:
    problem = Problem(m=8, n=96, k=5760)
    plan = planner.make(problem, strategy="stream_k", num_threadgroups=2)
    rows = pictures.timeline(chosen(plan)).splitlines()[2:]

    assert re.search(r"\|0=+\|1-+$", rows[0])
    assert re.search(r"\|1-+\|2=+$", rows[1])


@given(st.sets(st.integers(0, 40)))
def test_few_threadgroups_are_named_one_and_all(threadgroups: set[int]) -> None:
    name = pictures.spans_of(sorted(threadgroups))

    if not threadgroups:
        assert name == ""
    elif ".." in name:
        assert named(name) < threadgroups
        assert {min(threadgroups), max(threadgroups)} <= named(name)
    else:
        assert named(name) == threadgroups


@sampled(2, 6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_saved_picture_names_every_threadgroup(
    strategy: str, tmp_path: Path, printed: Run
) -> None:
    path = tmp_path / "plan.svg"
    options, threadgroups = STRATEGIES[strategy]

    said = printed(f"{SEVEN} --strategy {strategy} {options} --save", path)

    assert said.endswith(f"\nsaved {path}\n")
    texts = svg_texts(path)
    assert sum(strategy in text for text in texts) == 1
    assert sum("(model, not measured)" in text for text in texts) == 2
    shown = pictures.ends(threadgroups, plan_picture.BARS)
    assert {str(index) for index in shown if index is not None} <= set(texts)


def test_a_drawn_wide_tile_spans_two_columns(tmp_path: Path, printed: Run) -> None:
    path = tmp_path / "plan.svg"
    printed(f"{SEVEN} --strategy hytis {STRATEGIES['hytis'][0]} --save", path)
    outlines = re.findall(
        r'd="M (\S+) \S+ \nL (\S+) [^"]*\nz\n"[^>]*fill: none; stroke', path.read_text()
    )
    widths = [float(right) - float(left) for left, right in outlines]

    assert len(widths) == 5
    assert widths[:2] == pytest.approx([2 * widths[2]] * 2)
    assert widths[2:] == pytest.approx([widths[2]] * 3)


@sampled(1)
@pytest.mark.parametrize("suffix", ["svg", "png", "PNG"])
def test_the_same_plan_gives_the_same_bytes_and_replaces_what_was_there(
    suffix: str, tmp_path: Path, printed: Run
) -> None:
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    second.write_bytes(b"old")
    for path in (first, second):
        assert json.loads(printed(f"{SEVEN} --all --json --save", path))["bytes"] > 0

    content = first.read_bytes()
    assert content == second.read_bytes()
    assert content.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [first, second]
    if suffix == "svg":
        assert set(STRATEGIES) <= set(svg_texts(first))
        assert b"date" not in content


def test_the_example_shows_what_is_drawn_after_other_pictures_and_settings(
    tmp_path: Path, printed: Run
) -> None:
    """Another process drew it: `python tests/document_blocks.py`."""
    with matplotlib.rc_context({"font.size": 20, "figure.constrained_layout.use": 1}):
        figure = Figure()
        figure.subplots().plot([1e-9, 1e9], label="other")
        figure.legend()
        figure.savefig(tmp_path / "other.svg", dpi=70)
        printed(f"{SEVEN} {CEIL} --save", tmp_path / "ceil.svg")

    drawn = (tmp_path / "ceil.svg").read_bytes()
    assert drawn == (EXAMPLE / "ceil.svg").read_bytes()


def test_a_large_product_is_drawn_elided(tmp_path: Path, printed: Run) -> None:
    path = tmp_path / "plan.svg"
    printed("plan 500 9000 4096 --strategy stream_k --groups 2 --save", path)

    texts = svg_texts(path)
    assert "..." in texts
    assert "281" in texts  # the last column of tiles
    assert path.stat().st_size < 4 * LARGEST_SVG


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_other(
    step: str, tmp_path: Path, refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.svg"
    path.write_text("kept")

    def half(target: Path, content: bytes | Path) -> None:
        with target.open("wb") as file:
            file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(Path, step, half)

    assert f"--save {path}: cannot be written" in refused(f"{SEVEN} --save", path)
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]
