"""A part of a document that a script writes, between two markers.

<!-- TITLE: python -m MODULE -->
...
<!-- end of TITLE -->
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class DocumentTable:
    """The generated part of a document.

    Attributes:
        title: Title in the markers.
        module: Name of the script's module.
    """

    title: str
    module: str

    @property
    def begin(self) -> str:
        """The marker before the generated part."""
        return f"<!-- {self.title}: python -m {self.module} -->"

    @property
    def end(self) -> str:
        """The marker after it."""
        return f"<!-- end of {self.title} -->"

    def replaced(self, text: str, table: str) -> str:
        """Returns a text with the part between its markers replaced.

        Raises:
            ValueError: If the text does not have both markers once, in order.
        """
        before, begin, rest = text.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end or self.begin in rest or self.end in after:
            raise ValueError(
                f"expected {self.begin} and {self.end} once, in this order"
            )
        return f"{before}{self.begin}\n{table}\n{self.end}{after}"

    def main(
        self,
        document: Path,
        table: Callable[[], str],
        description: str,
        given: Sequence[str] | None,
    ) -> int:
        """Writes the table; with --check returns 1 if it is not up to date.

        Args:
            document: The document.
            table: Makes the text between the markers.
            description: What the script does.
            given: The command line's arguments; None for those of the process.
        """
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}", description=description
        )
        parser.add_argument(
            "--check", action="store_true", help="change nothing, compare only"
        )
        args = parser.parse_args(given)
        text = document.read_text(encoding="utf-8")
        wanted = self.replaced(text, table())
        if args.check:
            command = f"run python -m {self.module}"
            print("up to date" if wanted == text else command)
            return int(wanted != text)
        document.write_text(wanted, encoding="utf-8")
        return 0


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def line(cells: Sequence[str]) -> str:
    """Returns a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
