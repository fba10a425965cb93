"""Tables as HTML."""

from mlx_marlin.cli.render.html import Markup, element
from mlx_marlin.tables import (
    FIGURES,
    KEPT,
    SOURCE,
    SOURCES,
    Table,
    Value,
    columns,
    is_number,
    text,
)

LONG = 18
"""Characters from which the text of a cell is broken into lines."""
MISSING = "\N{EN DASH}"
BADGES = {"IMPOSSIBLE": "failed", "timed out": "failed"} | {
    name: name for name in (*SOURCES, "passed", "failed")
}
"""Texts that are highlighted, and the class."""


def section(table: Table) -> Markup:
    """Returns a table with its heading; nothing without rows."""
    if not table.rows:
        return Markup("")
    kept, same = columns(table)
    numbers = {head for head in kept if any(is_number(r[head]) for r in table.rows)}
    heads = [
        element("th", head, scope="col", class_="number" if head in numbers else None)
        for head in kept
    ]
    rows = [
        element(
            "tr",
            *(_cell(head, row[head], head in numbers) for head in kept),
            class_=row.get(SOURCE),
        )
        for row in table.rows
    ]
    parts = [element("h2", table.title)]
    if same:
        parts.append(element("p", same, class_="same"))
    drawn = element(
        "table", element("thead", element("tr", *heads)), element("tbody", *rows)
    )
    return element("section", *parts, element("div", drawn, class_="table"))


def _cell(head: str, value: Value, is_right: bool) -> Markup:
    """Returns a cell; a phone shows the name of the column beside it."""
    shown = text(value)
    badge = BADGES.get(shown) if head in KEPT else None
    classes = {
        "number": is_right,
        "figure": head in FIGURES,
        "long": len(shown) > LONG,
        "missing": not shown,
    }
    return element(
        "td",
        element("span", shown, class_=f"badge {badge}") if badge else shown or MISSING,
        class_=" ".join(name for name, applies in classes.items() if applies) or None,
        data_head=head,
        data_value=repr(value) if is_number(value) else None,
    )
