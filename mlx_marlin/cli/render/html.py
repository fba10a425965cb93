"""HTML by construction: text is escaped unless `element` returned it."""

from html import escape

VOID = ("img", "meta")
"""Elements without content, which have no end tag."""


class Markup(str):
    """HTML, in contrast to a text, which has to be escaped."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Returns an element."""
    listed = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    content = "".join(map(_escaped, children))
    end = "" if tag in VOID else f"</{tag}>"
    return Markup(f"<{tag}{listed}>{content}{end}")


def joined(*children: str) -> Markup:
    """Returns elements and texts, the latter escaped, one after the other."""
    return Markup("".join(map(_escaped, children)))


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child)
