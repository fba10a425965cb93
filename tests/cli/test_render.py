"""`mlx-marlin render`: pages of valid documents, of incomplete and of hostile ones."""

import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.conftest import Run
from mlx_marlin import regular_files, tables
from mlx_marlin.backends import devices, planner
from mlx_marlin.cli import documents, page, plan, tune
from mlx_marlin.cli import render as command
from mlx_marlin.cli.pictures import figures
from mlx_marlin.evidence.codec import encoded
from mlx_marlin.measure import result_file
from mlx_marlin.measure.profiling import Profile, Skipped, document
from mlx_marlin.measure.rows import (
    CANDIDATE,
    FirstTokenRow,
    GenerationRow,
    ProductRow,
    Timing,
)
from mlx_marlin.measure.timing import Spread
from mlx_marlin.planning.problem import Problem
from support.pictures import svg_texts
from support.processes import run_python
from support.result_documents import result

HOSTILE = "</script></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "img"}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "scope"),
    *("data-head", "data-value", "src", "alt"),
}
"""Attributes that a page has: `src` of an image holds it, none loads or runs more."""
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "script", "footer"),
    *("h1", "h2", "p", "strong", "div", "span", "section", "ul", "li"),
    *("dl", "dt", "dd", "figure", "img"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


Render = Callable[..., Path]
IMAGE = "data:image/svg+xml;base64,"


class Checker(HTMLParser):
    """Reads a page and checks that its elements are closed and harmless."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.cells: dict[str, list[str]] = {}
        self.head = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= ATTRIBUTES
        assert (dict(attrs).get("src") or IMAGE).startswith(IMAGE)
        self.seen.append(tag)
        if tag == "td":
            self.head = dict(attrs)["data-head"] or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "td":
            self.head = ""

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)
            if self.head:
                self.cells.setdefault(self.head, []).append(data)


def profiles() -> dict[str, Any]:
    """Returns a document of `profile`: predicted, assumed, measured, impossible."""
    device = devices.named("M4 Max")
    found = []
    for m, origin in ((1, "predicted"), (8, "assumed"), (32, "measured")):
        problem = Problem(m=m, n=4096, k=4096)
        choice = planner.compare(problem, device=device)
        found += [
            Profile(
                problem=problem,
                plan=plan,
                device=device,
                seconds=choice.prediction.seconds,
                origin=origin,
            )
            for plan in (choice.plan, None)
        ]
    found.append(replace(found[0], seconds=1e-9, origin="measured"))
    skipped = Skipped(problem=found[0].problem, kernel="gemv", reason="a reason")
    return json.loads(json.dumps(document(device, found, [skipped])))


def page_of(data: dict[str, Any]) -> str:
    """Returns the page of a document."""
    with TemporaryDirectory() as folder:
        source, target = Path(folder, "a.json"), Path(folder, "a.html")
        source.write_text(json.dumps(data))
        command.run(Namespace(result=source, output=target))
        return target.read_text("utf-8")


@pytest.fixture
def render(tmp_path: Path, printed: Run) -> Render:
    """Returns what renders a document to a file, and returns it."""

    def run(data: dict[str, Any], target: str, source: str = "a.json") -> Path:
        path = tmp_path / target
        (tmp_path / source).write_text(json.dumps(data))
        assert printed("render", tmp_path / source, "-o", path) == f"saved {path}\n"
        return path

    return run


@pytest.fixture
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out charts, which take long to draw."""
    monkeypatch.setattr(figures, "content", lambda *_: b"")


DOCUMENTS = {"profile": profiles(), "result": result(most=2)}

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([HOSTILE, "measured", "predicted", "-->", "\u202e\0\ud800\ufffe"]),
    st.text(max_size=20),
    st.integers() | st.sampled_from([0, -1, 10**400]),
    st.floats() | st.sampled_from([0.0, 5e-324, 1.7e308, -0.0]),
)


DROP = object()


def holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each object and list of a document with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        if key not in ("schema", "version"):
            yield value, key
            if isinstance(value[key], dict | list):
                yield from holders(value[key])


@pytest.mark.usefixtures("_no_charts")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 10**4), st.just(DROP) | leaves), max_size=12),
    st.sampled_from([*DOCUMENTS]),
)
def test_any_leaves_give_a_valid_page(
    changes: list[tuple[int, Any]], name: str
) -> None:
    changed = deepcopy(DOCUMENTS[name])
    for index, leaf in changes:
        known = [*holders(changed)]
        if not known:
            break
        holder, key = known[index % len(known)]
        if leaf is DROP:
            del holder[key]
        elif not isinstance(holder[key], dict | list | NoneType):
            holder[key] = leaf
    try:
        text = page_of(changed)
    except ValueError:
        return  # refused
    found = Checker(text)
    assert found.seen.count("script") == found.seen.count("style") == 1


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("other", [3, "text", [1], True])
def test_lists_and_objects_that_are_something_else_are_refused(
    name: str, other: object
) -> None:
    whole = DOCUMENTS[name]
    for key, value in whole.items():
        if isinstance(value, dict | list) and (key, other) != ("notes", [1]):
            with pytest.raises(ValueError, match=r"a\.json is not "):
                page_of({**whole, key: other})


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.usefixtures("_no_charts")
def test_without_rows_there_is_a_page(name: str) -> None:
    whole = DOCUMENTS[name]
    kept = {key: [] if isinstance(whole[key], list) else whole[key] for key in whole}
    predicted = {"source": "predicted"} if name == "result" else {}
    found = Checker(page_of(kept | predicted))

    assert "The document has no times." in found.texts
    assert "table" not in found.seen


def with_every(kind: Any, value: Any, other: object) -> Any:
    """Returns a document in which a value replaces all others of a kind."""
    if isinstance(value, dict):
        return {
            key: each if key in ("schema", "version") else with_every(kind, each, other)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [with_every(kind, each, other) for each in value]
    return other if isinstance(value, kind) else value


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("number", [math.nan, 10**400, None, "1"])
def test_what_is_no_number_is_refused(name: str, number: object) -> None:
    with pytest.raises(ValueError, match=r"a\.json"):
        page_of(with_every(int | float, DOCUMENTS[name], number))


def test_a_hostile_file_injects_no_markup(render: Render) -> None:
    data = profiles()
    data["device"]["variant"] = HOSTILE
    for row in (*data["profiles"], *data["skipped"]):
        hostile = with_every(str, row, HOSTILE)
        row.update({key: hostile[key] for key in ("problem", "kernel")})

    text = render(data, "a.html", "<b>x.json").read_text("utf-8")

    found = Checker(text)
    assert any(HOSTILE in text for text in found.texts)
    assert found.seen.count("script") == 1
    assert "<img src=x" not in text
    assert "b" not in found.seen


def test_a_file_cannot_invent_a_source_of_times() -> None:
    data = profiles()
    data["profiles"][0]["origin"] = "clocked"

    with pytest.raises(ValueError, match="a time is 'clocked', expected one of"):
        page_of(data)


@pytest.mark.parametrize(
    ("data", "said", "kind"),
    [
        (result(), "measured.<", "measured"),
        (result("cost model"), "predicted. Nothing was measured.", "predicted"),
        (profiles(), "assumed or measured or predicted.<", "predicted"),
        (
            {**profiles(), "profiles": profiles()["profiles"][:3]},
            "assumed or predicted. Nothing was measured.",
            "predicted",
        ),
    ],
)
def test_a_notice_tells_what_was_measured(
    data: dict[str, Any], said: str, kind: str
) -> None:
    text = page_of(data)

    assert f"The times on this page are {said}" in text
    assert f'<div class="notice {kind}">' in text


def test_rows_and_titles_tell_measured_from_predicted() -> None:
    both = result(most=8)
    both["products"] += result("cost model", most=8)["products"]
    text = page_of(both | {"source": "predicted"})
    (row, *_) = (each for each in text.split("<tr") if "cost model" in each)

    assert row.startswith(' class="predicted"')
    assert 'class="badge predicted">predicted<' in row
    assert row.count("figure") == 3
    assert "chain clock (measured, predicted)" in text


def test_an_impossible_time_is_refused_on_the_page() -> None:
    found = Checker(page_of(profiles()))

    assert found.cells["bottleneck"].count("IMPOSSIBLE") == 1
    assert any(text.startswith("IMPOSSIBLE (measured): 1 x 4") for text in found.texts)
    (chart,) = documents.profile_charts(profiles())
    drawn = sum(len(one.marks) for one in chart.series if one.style == "points")
    assert drawn == len(profiles()["profiles"]) - 1


def test_times_are_compared_with_stock_of_the_same_clock_and_source() -> None:
    data = result(most=1)
    ratios = Checker(page_of(data)).cells["x stock"]
    expected = [1.7, 1.7, 1.89, 1.89, 1, 1, 0.425, 0.425]
    assert [*map(float, ratios[:8])] == pytest.approx(expected, rel=0.01)

    for row in data["products"]:
        if row["arm"] == "mx.quantized_matmul":
            row["timing"]["method"] = "cost model"
    data["source"] = "predicted"
    assert Checker(page_of(data)).cells["x stock"][0] == page.MISSING


@pytest.mark.parametrize(
    ("stages", "said"), [([], "mlx-marlin bench"), (1, "make mac")]
)
def test_the_subtitle_names_what_made_the_file(stages: Any, said: str) -> None:
    data = result()
    if not stages:
        data["stages"] = []

    assert f'<p class="subtitle">{said}, 2026-11-24</p>' in page_of(data)


def test_stages_come_first_and_candidates_are_told_apart() -> None:
    data = result()
    row = next(each for each in data["products"] if each["arm"] == "ours")
    names = ["stripe slices=4, gemv 4 rows", "split_k slices=2, gemv 4 rows"]
    added = [row | {"arm": f"{CANDIDATE}: {name}"} for name in names]
    added.append(added[0] | {"problem": row["problem"] | {"m": 2}})
    data["products"] += added

    text = page_of(data)
    titles = re.findall("<h2>([^<]*)", text)
    assert titles.index("Stages") < titles.index("Products")
    assert all(f"{CANDIDATE}: {name}" in text for name in names)
    # The chart has the fastest of them, as one line.
    drawn = [
        series
        for chart in documents.result_charts(read(data))
        for series in chart.series
        if series.name.startswith(CANDIDATE)
    ]
    assert [len(each.marks) for each in drawn] == [2]

    data["stages"] = []
    assert '<p class="subtitle">mlx-marlin tune, ' in page_of(data)


def read(data: dict[str, Any]) -> result_file.ResultFile:
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.json")
        path.write_text(json.dumps(data))
        return result_file.read(path)


@pytest.mark.parametrize("make", [profiles, result])
def test_a_file_is_read_once(
    make: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file could take its place between two reads."""
    read, seen = regular_files.read, []

    def counted(path: Path, most: int) -> bytes:
        seen.append(path.name)
        return read(path, most)

    monkeypatch.setattr(regular_files, "read", counted)
    page_of(make())
    assert seen == ["a.json"]


def test_rows_name_their_plans() -> None:
    """Two plans of one kernel and arm can be told apart."""
    data = profiles()
    found = Checker(page_of(data))
    plans = {row["plan"] for row in data["profiles"] if row["plan"]}
    assert {*found.cells["plan"]} == plans
    assert len(found.cells["plan"]) == len(plans)  # one was profiled twice
    data = result()
    plan = planner.choose(Problem(m=8, n=4096, k=4096), devices.named("M3 Max"))
    (row, *_) = (each for each in data["products"] if each["problem"]["m"] == 8)
    row["plan"] = encoded(plan)
    del row["plan"]["problem"]
    assert Checker(page_of(data)).cells["plan"] == [plan.explain()]


def test_columns_with_one_text_are_a_line_above_the_table() -> None:
    found = Checker(page_of(result()))

    assert any(
        "format: affine 4-bit g64; dtype: float16; samples: 7" in text
        for text in found.texts
    )
    assert "format" not in found.cells
    assert {*found.cells["times"]} == {"measured"}


@pytest.mark.parametrize(
    ("value", "text"), [(123456.7, "123457"), (0.12345, "0.1235"), (8, "8"), (0, "0")]
)
def test_numbers_keep_four_digits(value: float, text: str) -> None:
    assert tables.text(value) == text


def test_without_matplotlib_a_page_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.style", raising=False)
    found = Checker(page_of(profiles()))

    assert any(
        "charts are missing: --output draws with" in text for text in found.texts
    )
    assert "img" not in found.seen
    assert "table" in found.seen


def test_a_page_is_always_the_same_and_has_a_policy_that_forbids_resources() -> None:
    text = page_of(profiles())

    assert page_of(profiles()) == text
    for word in ("http:", "https:", "url(", "@import", "href=", "style="):
        assert word not in text
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_charts_of_a_document_are_saved_as_a_picture(name: str, render: Render) -> None:
    mark = {
        "profile": "ours: gemv (predicted)",
        "result": "ours, mlx layout (measured)",
    }

    assert mark[name] in svg_texts(render(DOCUMENTS[name], "a.svg"))
    assert render(DOCUMENTS[name], "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_hostile_texts_has_them_as_text(render: Render) -> None:
    data = profiles()
    data["device"]["variant"] = "$x^{" + HOSTILE

    assert any("$x^{</script>" in text for text in svg_texts(render(data, "a.svg")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not what we write"),
        ("[" * 10**5, "is not what we write"),
        ("\ud800".encode("utf-8", "surrogatepass"), "is not what we write"),
        ("[]", "its schema is None, expected one of 'mlx_marlin.profile'"),
        ("{}", "its schema is None"),
        ('{"schema": ["a"]}', "its schema is ['a']"),
        ('{"schema": "\\u001b[31m"}', "its schema is '\\x1b[31m'"),
        ('{"schema": "mlx_marlin.profile"}', "its version is None"),
        (
            '{"schema": "mlx_marlin.profile", "version": 1}',
            "a.json is not what we write: KeyError: 'device'",
        ),
        (
            '{"schema": "mlx-marlin result", "version": 1}',
            "its version is 1, and this one reads 2",
        ),
        (
            '{"schema": "mlx-marlin result", "version": 2, "products": 3}',
            "the file has not the fields machine, date",
        ),
    ],
)
def test_other_files_are_refused(
    content: str | bytes, said: str, tmp_path: Path, refused: Run
) -> None:
    source = tmp_path / "a.json"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())

    assert said in refused("render", source, "-o", tmp_path / "a.html")
    assert [*tmp_path.iterdir()] == [source]


def test_a_document_without_charts_is_no_picture_and_a_large_file_no_document(
    tmp_path: Path, refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.json"
    kept = {"products": [], "generation": [], "first_tokens": [], "source": "predicted"}
    source.write_text(json.dumps({**result(), **kept}))

    said = refused("render", source, "-o", tmp_path / "a.svg")
    assert "no chart can be drawn of it" in said
    monkeypatch.setattr(result_file, "MOST_BYTES", 100)
    assert "expected at most 100" in refused("render", source, "-o", tmp_path / "a.svg")


def test_a_page_is_rendered_with_the_standard_library_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "a.html"
    source.write_text(json.dumps(profiles()))
    program = f"""
import sys
for name in ("mlx", "numpy", "matplotlib", "tqdm"):
    sys.modules[name] = None
from mlx_marlin import regular_files, tables
from mlx_marlin.cli.main import main
raise SystemExit(main(["render", {str(source)!r}, "-o", {str(target)!r}]))
"""
    answer = run_python(program)

    assert answer.returncode == 0, answer.stderr
    assert target.read_text("utf-8").startswith("<!doctype html>")


def test_facts_without_a_value_are_left_out() -> None:
    assert page._facts([("commit", "")]) == ""
    found = page._facts([("commit", ""), ("chip", "Apple M3")])
    assert found == "<dl><div><dt>chip</dt><dd>Apple M3</dd></div></dl>"


def test_times_are_in_the_units_of_their_heads() -> None:
    long, short = (
        Timing(seconds=seconds, method="wall time", range=seconds / 10, samples=9)
        for seconds in (0.25, 0.0125)
    )
    names = {"model": "m", "arm": "ours", "prompt_tokens": 100}
    decoded = GenerationRow(**names, streams=4, new_tokens=8, prompt=long, step=short)
    first = FirstTokenRow(**names, cold=long, warm=short)
    problem = Problem(m=4, n=64, k=256)
    product = ProductRow(problem=problem, arm="ours", clock="chain", timing=short)

    cells = documents._generation(decoded)
    assert (cells["ms to first token"], cells["ms a step"]) == (250, 12.5)
    assert (cells["prompt tokens/s"], cells["generated tokens/s"]) == (1600, 320)
    cells = documents._first_token(first)
    assert (cells["cold, ms"], cells["warm, ms"]) == (250, 12.5)
    cells = documents._product(product, long)
    assert (cells["ms"], cells["range, ms"], cells["x stock"]) == (12.5, 1.25, 20)
    device = {"variant": "", "cores": 8, "tflops": 10.0, "stock_tflops": 5.0}
    facts = dict(documents._facts(device | {"bandwidth_gbs": 400.0}))
    assert facts["ridge point"] == "25 FLOP/byte"


def test_microseconds_of_plans_are_told() -> None:
    device = devices.named("M3 Max")
    choice = planner.compare(Problem(m=4, n=4096, k=4096), device=device)
    us = choice.prediction.seconds * 1_000_000
    assert f", {us:.1f} us (model, not measured)" in plan.heading(choice)
    assert tune._predicted(choice.plan, device) == pytest.approx(us)
    outcome: Any = SimpleNamespace(
        arms={choice.plan: Spread(median=12e-6, range=3e-6, samples=9)},
        **dict.fromkeys(("failed", "wrong"), ()),
        result=None,
        is_noisy=False,
    )
    clock: Any = SimpleNamespace(name="wall time")
    said = tune.measurements(choice.plan.problem, outcome, clock)
    assert re.search(r"\b12\.?0* +1\.50*\b", said), said
