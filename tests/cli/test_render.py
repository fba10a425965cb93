"""`mlx-marlin render`: pages of valid documents, of incomplete and of hostile ones."""

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import devices, planner
from mlx_marlin.cli import main, render
from mlx_marlin.cli.render import fields, page, tables
from mlx_marlin.cli.render.html import element
from mlx_marlin.measure.profiling.document import Skipped, document
from mlx_marlin.measure.profiling.profile import of_plan, of_stock
from mlx_marlin.planning.problem import Problem
from support.pictures import svg_texts
from support.processes import run_python
from support.result_documents import result

HOSTILE = "</script></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta"}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "scope", "role"),
    *("data-head", "data-value", "aria-label", "aria-hidden", "viewbox", "points"),
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height"),
    *("text-anchor", "transform"),
}
"""Attributes that a page has: none of them loads or runs anything."""
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "script", "footer"),
    *("h1", "h2", "p", "strong", "div", "span", "section", "ul", "li"),
    *("dl", "dt", "dd", "figure", "figcaption"),
    *("table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "line", "polyline", "polygon", "circle", "rect", "text"),
}


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
        found.append(of_plan(choice.plan, device, choice.prediction.seconds, origin))
        assert choice.stock
        found.append(of_stock(problem, device, choice.stock.seconds, "predicted"))
    found.append(of_plan(found[0].plan, device, 1e-9, "measured"))
    skipped = Skipped(problem=found[0].problem, kernel="gemv", reason="a reason")
    return json.loads(json.dumps(document(device, found, [skipped])))


def page_of(data: dict[str, Any]) -> str:
    _, module = render.DOCUMENTS[data["schema"]]
    return page.html(module.page(data, "a file"))


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
    text = page_of(changed)

    found = Checker(text)
    assert found.seen.count("script") == found.seen.count("style") == 1
    text.encode()
    assert "nan" not in found.texts
    assert "inf" not in found.texts


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("other", [3, "text", [1], True])
def test_lists_and_objects_that_are_something_else_are_named(
    name: str, other: object
) -> None:
    whole = DOCUMENTS[name]
    for key, value in whole.items():
        if not isinstance(value, dict | list) or (key, other) == ("notes", [1]):
            continue
        with pytest.raises(ValueError, match=rf"{key}(\[0\])? is .*, expected"):
            page_of({**whole, key: other})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_without_rows_there_is_a_page(name: str) -> None:
    kept = {key: DOCUMENTS[name][key] for key in ("schema", "version")}
    texts = Checker(page_of(kept)).texts

    assert "The document has no times." in texts
    assert "table" not in Checker(page_of(kept)).seen


def with_every_text(value: Any, text: str) -> Any:
    """Returns a document in which a text replaces all others."""
    if isinstance(value, dict):
        return {
            key: each if key in ("schema", "version") else with_every_text(each, text)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [with_every_text(each, text) for each in value]
    return text if isinstance(value, str) else value


def with_every_number(value: Any, other: object) -> Any:
    """Returns a document in which a value replaces all numbers."""
    if isinstance(value, dict):
        return {
            key: each if key == "version" else with_every_number(each, other)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [with_every_number(each, other) for each in value]
    return other if isinstance(value, int | float) else value


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(
    "number",
    [math.nan, math.inf, -math.inf, 10**400, None, True, "1"],
    ids=lambda number: f"{number}"[:5],
)
def test_what_is_no_number_is_missing(name: str, number: object) -> None:
    text = json.dumps(with_every_number(DOCUMENTS[name], number))
    found = Checker(page_of(json.loads(text)))

    assert not {"ms", "TFLOPS", "rows"} & {*found.cells}
    assert "svg" not in found.seen


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("number", [0, -1, 0.5, 5e-324, 1.7e308])
def test_extreme_numbers_are_listed_and_may_not_be_drawn(
    name: str, number: float
) -> None:
    found = Checker(page_of(with_every_number(DOCUMENTS[name], number)))

    assert "table" in found.seen
    assert "polyline" not in found.seen or number == 0.5


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_file_injects_no_markup(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "<b>x.json", tmp_path / "a.html"
    source.write_text(json.dumps(with_every_text(DOCUMENTS[name], HOSTILE)))

    assert main(["render", str(source), "-o", str(target)]) == 0
    text = target.read_text("utf-8")
    found = Checker(text)
    assert HOSTILE in found.texts
    assert found.seen.count("script") == 1
    assert "<img" not in text
    assert "b" not in found.seen
    assert "measured" not in found.cells["times"]


def test_texts_are_made_printable_and_cut() -> None:
    given = fields.Fields({"a": "x\u202e\0\n\ud800y", "b": "z" * 10**4}, "it")

    assert given.text("a") == "x    y"
    assert given.text("b") == "z" * fields.LONGEST + "..."


def test_text_is_escaped_and_elements_are_not() -> None:
    inner = element("b", "<&>", class_='"')

    assert element("p", inner, "<") == '<p><b class="&quot;">&lt;&amp;&gt;</b>&lt;</p>'


@pytest.mark.parametrize(
    ("data", "said", "kind"),
    [
        (result(), "Every time on this page is marked as measured.", "measured"),
        (result("cost model"), "Predicted: nothing on this page", "predicted"),
        (
            profiles(),
            "Some times on this page are marked as measured, others",
            "predicted",
        ),
        (
            {**profiles(), "profiles": profiles()["profiles"][:3]},
            "Nothing on this page was measured: its times are assumed or predicted",
            "predicted",
        ),
    ],
)
def test_a_notice_tells_what_was_measured(
    data: dict[str, Any], said: str, kind: str
) -> None:
    text = page_of(data)

    assert said in text
    assert f'<div class="notice {kind}">' in text


def test_rows_series_and_titles_tell_measured_from_predicted() -> None:
    both = result(most=8)
    both["products"] += result("cost model", most=8)["products"]
    text = page_of(both)
    (row, *_) = (each for each in text.split("<tr") if "cost model" in each)

    assert row.startswith(' class="predicted"')
    assert 'class="badge predicted">predicted<' in row
    assert row.count("figure") == 3
    assert "series color0 measured" in text
    assert "series color0 predicted" in text
    assert "chain clock (measured, predicted)" in text


@pytest.mark.parametrize("words", [{"method": "cost model"}, {"source": "yes"}, {}])
def test_what_is_not_known_to_be_measured_is_not_called_so(
    words: dict[str, str],
) -> None:
    data = result(most=2)
    for row in data["products"]:
        if not words:
            del row["source"]
        row.update(words)

    assert {*Checker(page_of({**data, "generation": []})).cells["times"]} == {
        "unknown",
        "measured",  # of the first token
    }


def test_an_impossible_time_is_refused_on_the_page() -> None:
    found = Checker(page_of(profiles()))

    assert found.cells["bottleneck"].count("IMPOSSIBLE") == 1
    assert any(text.startswith("IMPOSSIBLE (measured): 1 x 4") for text in found.texts)
    points = profiles()["profiles"]
    drawn = page_of(profiles()).count("TFLOPS, ") - page_of(profiles()).count("roof:")
    assert drawn == len(points) - 1


def test_times_are_compared_with_stock_of_the_same_clock_and_source() -> None:
    data = result(most=1)
    ratios = Checker(page_of(data)).cells["x stock"]
    assert ratios[:8] == ["1.7", "1.7", "1.89", "1.89", "1", "1", "0.425", "0.425"]

    for row in data["products"]:
        if row["arm"] == "mx.quantized_matmul":
            row.update(source="predicted", method="cost model")
    assert Checker(page_of(data)).cells["x stock"][0] == tables.MISSING


@pytest.mark.parametrize(
    ("stages", "said"), [([], "mlx-marlin bench"), (1, "make mac")]
)
def test_the_subtitle_names_what_made_the_file(stages: Any, said: str) -> None:
    data = result()
    if not stages:
        data["stages"] = []

    assert f'<p class="subtitle">{said}, 2026-11-24</p>' in page_of(data)


def test_rows_name_their_plans() -> None:
    """Two plans of one kernel and arm can be told apart."""
    data = profiles()
    for row in data["profiles"]:
        if row["plan"]:
            assert row["plan"] in page_of(data)
    data = result()
    plan = planner.choose(Problem(m=8, n=4096, k=4096), devices.named("M3 Max"))
    for row, loaders in zip(data["products"][:2], (0, 2), strict=True):
        row["plan"] = asdict(plan) | {"buffers": 3, "loaders": loaders}
    text = page_of(data)
    sizes = "x".join(map(str, (plan.tile.m, plan.tile.n, plan.tile.k)))
    assert f"{plan.kernel} {sizes}, " in text
    assert text.count("3 buffers, ") == 2
    assert text.count("3 buffers, 2 loaders, ") == 1
    assert f"{plan.strategy}, {plan.num_threadgroups} threadgroups" in text


def test_columns_with_one_text_are_a_line_above_the_table() -> None:
    found = Checker(page_of(result()))

    assert any(
        "format: affine 4-bit g64; dtype: float16; samples: 7" in text
        for text in found.texts
    )
    assert "format" not in found.cells
    assert {*found.cells["times"]} == {"measured"}


@given(st.floats(-1e12, 1e12), st.integers(2, 6))
def test_numbers_keep_their_digits(value: float, digits: int) -> None:
    text = tables.number(value, digits)

    assert float(text) == pytest.approx(value, rel=10.0 ** (1 - digits))
    if 1e-4 <= abs(value) < 1e9:
        assert "e" not in text


def test_the_same_file_gives_the_same_page(tmp_path: Path) -> None:
    assert page_of(profiles()) == page_of(profiles())


def test_the_page_has_no_resources_and_a_policy_that_forbids_them() -> None:
    text = page_of(profiles())

    for word in ("http:", "https:", "url(", "@import", "src=", "href=", "style="):
        assert word not in text
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_charts_of_a_document_are_saved_as_a_picture(
    name: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "a.json", tmp_path / f"a.{suffix}"
    source.write_text(json.dumps(DOCUMENTS[name]))

    assert main(["render", str(source), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"saved {target}\n"
    if suffix == "svg":
        mark = {"profile": "gemv (predicted)", "result": "ours, mlx layout (measured)"}
        assert mark[name] in svg_texts(target)
    else:
        assert target.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_hostile_texts_has_them_as_text(tmp_path: Path) -> None:
    data = with_every_text(result(most=2), "$x^{" + HOSTILE)
    source, target = tmp_path / "a.json", tmp_path / "a.svg"
    source.write_text(json.dumps(data))

    assert main(["render", str(source), "-o", str(target)]) == 0
    assert any("$x^{</script>" in text for text in svg_texts(target))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("[" * 10**5, "is not JSON"),
        ("\ud800".encode("utf-8", "surrogatepass"), "is not JSON"),
        ("[]", "its schema is None, expected one of 'mlx_marlin.profile'"),
        ("{}", "its schema is None"),
        ('{"schema": ["a"]}', "its schema is ['a']"),
        ('{"schema": "\\u001b[31m"}', "its schema is '\\x1b[31m'"),
        ('{"schema": "mlx_marlin.profile"}', "its version is None"),
        (
            '{"schema": "mlx-marlin result", "version": 2}',
            "its version is 2, and this program reads 1",
        ),
        (
            '{"schema": "mlx-marlin result", "version": 1, "products": 3}',
            "the document.products is 3, expected a list",
        ),
    ],
)
def test_other_files_are_refused(
    content: str | bytes,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "a.json"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())

    assert main(["render", str(source), "-o", str(tmp_path / "a.html")]) == 2
    printed, error = capsys.readouterr()
    assert (printed, error.count("\n")) == ("", 1)
    assert said in error
    assert [*tmp_path.iterdir()] == [source]


def test_a_document_without_charts_is_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.json"
    source.write_text(json.dumps({**result(), "products": []}))

    assert main(["render", str(source), "-o", str(tmp_path / "a.svg")]) == 2
    assert "no chart can be drawn of it" in capsys.readouterr().err


def test_a_large_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "MOST_BYTES", 100)
    source = tmp_path / "a.json"
    source.write_text(json.dumps(result()))

    assert main(["render", str(source), "-o", str(tmp_path / "a.html")]) == 2
    assert "expected at most 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("none.json", "a.html", "No such file"),
        ("a.json", "a.pdf", "expected a name that ends in .html, .svg or .png"),
        ("a.json", "none/a.html", "does not exist, expected a file in an existing"),
        ("a.json", "b.html", "is a folder, expected a file"),
    ],
)
def test_wrong_paths_are_named(
    source: str,
    target: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(result(most=1)))
    (tmp_path / "b.html").mkdir()

    status = main(["render", str(tmp_path / source), "-o", str(tmp_path / target)])
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_page_is_rendered_with_the_standard_library_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "a.json", tmp_path / "a.html"
    source.write_text(json.dumps(profiles()))
    program = f"""
import sys
for name in ("mlx", "numpy", "matplotlib", "tqdm"):
    sys.modules[name] = None
from mlx_marlin.cli import main
raise SystemExit(main(["render", {str(source)!r}, "-o", {str(target)!r}]))
"""
    answer = run_python(program)

    assert answer.returncode == 0, answer.stderr
    assert target.read_text("utf-8").startswith("<!doctype html>")
