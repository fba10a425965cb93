"""`mlx-marlin render RESULT.json -o FILE`: shows results as a page or a picture."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.cli.pictures import files
from mlx_marlin.cli.render import page as pages
from mlx_marlin.cli.render import profile_document, result_document
from mlx_marlin.cli.render.fields import shown
from mlx_marlin.measure.profiling import document

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
MOST_BYTES = 32 * 2**20
"""Largest file that is read."""
DOCUMENTS: dict[str, tuple[int, ModuleType]] = {
    document.SCHEMA: (document.VERSION, profile_document),
    result_document.SCHEMA: (result_document.VERSION, result_document),
}
"""Schema -> its version, and the module with `page` and `charts`."""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the arguments of the command."""
    parser = subparsers.add_parser(
        "render",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    files.check(args.output, "--output", (PAGE, *files.PICTURES))
    data, module = read(args.result)
    if args.output.suffix.lower() == PAGE:
        text = pages.html(module.page(data, _origin(args.result, data)))
        files.write(args.output, "--output", text.encode())
    else:
        from mlx_marlin.cli.pictures import plots

        charts = module.charts(data)
        if not charts:
            raise ValueError(
                f"{args.result}: no chart can be drawn of it, expected the peaks of a "
                f"device, or times of one product with several numbers of rows"
            )
        plots.save(args.output, "--output", charts)
    print(f"saved {args.output}")
    return 0


def read(path: Path) -> tuple[Mapping[str, Any], ModuleType]:
    """Reads a document.

    Args:
        path: The file.

    Returns:
        The document, and the module that renders it.

    Raises:
        ValueError: If it is not a document of a schema and version in `DOCUMENTS`.
        OSError: If it cannot be read.
    """
    content = regular_files.read(path, MOST_BYTES)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {shown(str(error))}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, str) or schema not in DOCUMENTS:
        raise ValueError(
            f"{path}: its schema is {_short(schema)}, expected one of "
            f"{', '.join(map(repr, DOCUMENTS))}"
        )
    version, module = DOCUMENTS[schema]
    if data.get("version") != version:
        raise ValueError(
            f"{path}: its version is {_short(data.get('version'))}, and this program "
            f"reads {version}"
        )
    return data, module


def _origin(path: Path, data: Mapping[str, Any]) -> str:
    return f"{shown(path.name)}, {data['schema']}, version {data['version']}"


def _short(value: Any) -> str:
    return shown(repr(value))[:60]
