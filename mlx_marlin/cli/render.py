"""`mlx-marlin render RESULT.json -o FILE`: shows results as a page or a picture."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.cli import documents, output
from mlx_marlin.cli.page import Page, html
from mlx_marlin.cli.pictures import figures
from mlx_marlin.measure import profiling, result_file
from mlx_marlin.measure.privacy import redacted

DESCRIPTION = """
Render a result of `mlx-marlin profile --json`, `mlx-marlin bench --json` or
`make mac` as one HTML page without external resources, or its charts as a picture.
"""
EPILOG = """
examples:
  mlx-marlin profile --compare stock --json profile.json
  mlx-marlin render profile.json -o profile.html
  mlx-marlin render profile.json -o roofline.png
"""
PAGE = ".html"
DOCUMENTS: dict[str, Callable[[Any, str], Page]] = {
    profiling.SCHEMA: documents.profile_page,
    result_file.SCHEMA: documents.result_page,
}
"""Schema -> what makes the page of a document, with the charts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "result", type=Path, metavar="RESULT.json", help="the result to render"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        required=True,
        help=".html for the page; .svg or .png for its charts",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page or the picture and returns 0."""
    output.check_file(args.output, "--output", (PAGE, *output.PICTURES))
    schema, document = read(args.result)
    is_page = args.output.suffix.lower() == PAGE
    with _refusal(args.result):
        page = DOCUMENTS[schema](document, f"{args.result.name}, {schema}")
        text = html(page).encode("utf-8", "replace") if is_page else b""
    if is_page:
        output.write_file(args.output, "--output", text)
    elif page.charts:
        figures.save(args.output, "--output", lambda: figures.figure(page.charts))
    else:
        raise ValueError(
            f"{args.result}: no chart can be drawn of it, expected the peaks of a "
            f"device, or times of one product with several numbers of rows"
        )
    print(f"saved {args.output}")
    return 0


def read(path: Path) -> tuple[str, Any]:
    """Reads a document."""
    content = regular_files.read(path, result_file.MOST_BYTES)
    with _refusal(path):
        data = json.loads(content, parse_constant=result_file.refuse)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema == result_file.SCHEMA:
            return schema, result_file.decoded(data)
        if schema != profiling.SCHEMA:
            known = ", ".join(map(repr, DOCUMENTS))
            shown = regular_files.quoted(schema, 60)
            raise ValueError(f"its schema is {shown}, expected one of {known}")
        if data.get("version") != profiling.VERSION:
            version = regular_files.quoted(data.get("version"), 60)
            raise ValueError(f"its version is {version}, expected {profiling.VERSION}")
        return schema, data


@contextmanager
def _refusal(path: Path) -> Iterator[None]:
    """Refuses a file whose content is not what its schema says."""
    try:
        with regular_files.decoding():
            yield
    except ValueError as error:
        reason = redacted(str(error))
        raise ValueError(f"{path} is not what we write: {reason}") from error
