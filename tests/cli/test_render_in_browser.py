"""Pages of `mlx-marlin render` in Chromium: clicked through and photographed."""

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from mlx_marlin.cli import profiled
from mlx_marlin.cli.main import main
from support import browser
from support.browser import Browser
from support.profiles import sampled
from support.result_documents import result

CHROMIUM = browser.executable()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no Chromium to open the page: install Debian's package chromium",
)
PHONE, DESKTOP = 390, 1200
VISIBLE = "[...document.querySelectorAll('section')][0].querySelectorAll('tbody tr')"
ROWS = f"[...{VISIBLE}].filter(row => row.offsetHeight > 0)"
"""Rows of the first table that can be seen."""
SIZE = re.compile(r"(?:font|font-size): (?:[a-z]+ )*([\d.]+)px")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM
    with browser.browser(CHROMIUM, tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a page with measured and predicted times."""
    folder = tmp_path_factory.mktemp("page")
    both = result(most=4)
    both["products"] += result("cost model", most=2)["products"][:16]
    both |= {"source": "predicted", "stages": []}  # products are the first table
    source, target = folder / "result.json", folder / "result.html"
    source.write_text(json.dumps(both))
    assert main(["render", str(source), "-o", str(target)]) == 0
    return target


@pytest.fixture
def desktop(tab: Browser, page: Path) -> Iterator[Browser]:
    """Opens the page on a desktop; it requests nothing else."""
    tab.open(page, width=DESKTOP, scheme="light")
    yield tab
    assert tab.complaints() == [page.as_uri()]


def column(tab: Browser, name: str) -> list[str]:
    """Returns the texts of a column of the first table, in the order that is seen."""
    return tab.evaluate(
        f"{ROWS}.map(row => row.querySelector('[data-head=\"{name}\"]').textContent)"
    )


def photograph(tab: Browser) -> np.ndarray:
    return imread(BytesIO(tab.photograph()))[..., :3]


def head(name: str) -> str:
    """Returns JavaScript for the button of a column of the first table."""
    return (
        "[...document.querySelector('table').querySelectorAll('th button')]"
        f".find(button => button.textContent === '{name}')"
    )


@sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_page_fits_and_shows_something_in_both_schemes(
    tab: Browser, page: Path, width: int, scheme: str
) -> None:
    tab.open(page, width=width, scheme=scheme)
    picture = photograph(tab)

    assert tab.complaints() == [page.as_uri()]  # the only request
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert picture.shape[1] == width
    assert picture.shape[0] > 2000
    assert (picture.mean() > 0.8) == (scheme == "light")
    assert (picture.mean() < 0.2) == (scheme == "dark")
    # The charts are in the upper part: their lines have the colours of the series.
    upper = picture[:1500:2]
    assert len(np.unique(upper)) > 20
    assert (upper.max(axis=2) - upper.min(axis=2) > 0.4).any()
    # Nothing is wider than its box, but for tables on a desktop, which scroll.
    boxes = "h1, h2, p, dd, figcaption, li, td, figure"
    if width == PHONE:
        boxes += ", .table, tr"
    wide = tab.evaluate(
        f"[...document.querySelectorAll('{boxes}')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
        ".map(e => e.outerHTML)"
    )
    assert wide == []


def test_a_profile_beside_stock_fits_a_desktop(
    tab: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiled, "MOST_COUNTED", 0)  # counting takes a minute
    source, target = tmp_path / "profile.json", tmp_path / "profile.html"
    words = ["--chip", "M4 Max", "--compare", "stock", "--json", str(source)]
    assert main(["profile", *words]) == 0
    assert main(["render", str(source), "-o", str(target)]) == 0

    tab.open(target, width=DESKTOP, scheme="light")
    boxes = "[...document.querySelectorAll('.table')]"
    wide = f"{boxes}.filter(e => e.scrollWidth > e.clientWidth).length"
    assert tab.evaluate(f"{boxes}.length") == 3
    assert tab.evaluate(wide) == 0
    # No word is divided, and no row is higher than three lines.
    assert tab.evaluate(f"Math.max(...{ROWS}.map(row => row.offsetHeight))") < 70
    assert tab.evaluate("document.querySelectorAll('td')[0].offsetHeight") > 20


def test_texts_of_charts_have_eleven_pixels_on_a_phone(
    tab: Browser, page: Path
) -> None:
    tab.open(page, width=PHONE, scheme="light")
    images = tab.evaluate(
        "[...document.querySelectorAll('figure img')].map(e => [e.clientWidth, e.src])"
    )

    assert images
    for width, source in images:
        svg = ElementTree.fromstring(b64decode(source.partition(",")[2]))
        points = float(svg.attrib["viewBox"].split()[2])
        styles = [
            each.attrib["style"] for each in svg.iter() if "font" in str(each.attrib)
        ]
        sizes = [float(size) for text in styles for size in SIZE.findall(text)]
        assert len(sizes) >= len(styles) > 10
        assert min(sizes) * width / points >= 11


def test_clicks_sort_a_table(desktop: Browser) -> None:
    tab = desktop
    before = photograph(tab)
    unsorted = column(tab, "ms")
    tab.click(head("ms"))
    ascending = column(tab, "ms")
    tab.click(head("ms"))
    descending = column(tab, "ms")
    after = photograph(tab)

    assert ascending == sorted(unsorted, key=float) != unsorted
    assert descending == sorted(unsorted, key=float, reverse=True)
    assert tab.evaluate("document.querySelector('th[aria-sort]').ariaSort") == (
        "descending"
    )
    tab.click(head("arm"))
    assert column(tab, "arm") == sorted(column(tab, "arm"))
    assert tab.evaluate("document.querySelectorAll('th[aria-sort]').length") == 1
    assert before.shape == after.shape
    assert (before != after).any()


def test_rows_without_a_number_come_last(tab: Browser, page: Path) -> None:
    text = page.read_text("utf-8")
    value = text.split('data-head="ms" data-value="', 1)[1].split('"', 1)[0]
    changed = page.with_name("missing.html")
    changed.write_text(text.replace(f' data-value="{value}"', "", 1), "utf-8")
    tab.open(changed, width=DESKTOP, scheme="light")
    without = (
        f"{ROWS}.map(row => row.querySelector('[data-head=ms]').dataset.value)"
        ".findIndex(value => value === undefined)"
    )
    assert tab.evaluate(without) == 0

    for _ in range(2):
        tab.click(head("ms"))
        assert tab.evaluate(without) == tab.evaluate(f"{ROWS}.length") - 1


def test_typing_filters_a_table(desktop: Browser) -> None:
    tab = desktop
    before = photograph(tab)
    arms = column(tab, "arm")
    tab.click("document.querySelector('input')")
    tab.type("Quantized  predicted")
    after = photograph(tab)

    assert 0 < len(column(tab, "arm")) < len(arms)
    assert {*column(tab, "arm")} == {"mx.quantized_matmul"}
    assert {*column(tab, "times")} == {"predicted"}
    count = tab.evaluate("document.querySelector('.count').textContent")
    assert count == f"{len(column(tab, 'arm'))} of {len(arms)} rows"
    assert after.shape[0] < before.shape[0]

    tab.type(" nothing has this")
    assert column(tab, "arm") == []
    tab.evaluate(
        "(() => { const e = document.querySelector('input'); e.value = '';"
        "e.dispatchEvent(new Event('input')); })()"
    )
    assert column(tab, "arm") == arms


def test_a_phone_sorts_by_a_list(tab: Browser, page: Path) -> None:
    tab.open(page, width=PHONE, scheme="dark")
    unsorted = column(tab, "ms")
    tab.evaluate(
        "(() => { const e = document.querySelector('select');"
        "e.value = [...e.options].find(o => o.textContent === 'ms').value;"
        "e.dispatchEvent(new Event('change')); })()"
    )
    assert column(tab, "ms") == sorted(unsorted, key=float)
    tab.click("document.querySelector('.controls button')")
    assert column(tab, "ms") == sorted(unsorted, key=float, reverse=True)

    assert tab.evaluate("document.querySelector('thead').offsetHeight") == 0
    assert tab.evaluate("document.querySelector('select').offsetHeight") >= 30
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE
    assert tab.complaints() == [page.as_uri()]


def test_a_page_is_complete_without_scripts(tab: Browser, page: Path) -> None:
    tab.open(page, width=DESKTOP, scheme="light")
    rows = len(column(tab, "ms"))
    tab.open(page, width=DESKTOP, scheme="light", scripts=False)
    found = tab.call("DOM.getDocument", depth=-1)["root"]["nodeId"]

    def count(selector: str) -> int:
        nodes = tab.call("DOM.querySelectorAll", nodeId=found, selector=selector)
        return len(nodes["nodeIds"])

    assert count("section:first-of-type tbody tr") == rows
    assert count("figure img") >= 2
    assert count("input, select, button") == 0
    assert tab.complaints() == [page.as_uri()]


def test_the_policy_of_a_page_stops_other_scripts(tab: Browser, page: Path) -> None:
    changed = page.with_name("changed.html")
    script = "<script>document.title = 'changed'</script></body>"
    changed.write_text(page.read_text("utf-8").replace("</body>", script), "utf-8")
    tab.open(changed, width=DESKTOP, scheme="light")

    assert tab.evaluate("document.title") == "Results on Apple M3 Max"
    assert any("Content Security Policy" in text for text in tab.complaints())


def test_a_script_that_fails_is_noticed(tab: Browser, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.html"
    wrong.write_text("<script>absent()</script><img src='http://localhost:9/a.png'>")
    tab.open(wrong, width=DESKTOP, scheme="light")

    complaints = tab.complaints()
    assert any("absent is not defined" in text for text in complaints)
    assert "http://localhost:9/a.png" in complaints
