"""Where code may name a back end, and what a package is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mlx_marlin

PACKAGE = Path(mlx_marlin.__file__).parent
OWN_FOLDERS = ("backends/metal/", "backends/cuda/")
ALLOWED = {
    "measure/counting.py": "a clock by the cost model of Metal",
    "measure/clocks.py": "the choice of that clock",
    "__init__.py": "the public function `variants` lists Metal's",
    "cli/doctor/": "reports about machines",
    "backends/registry.py": "lists the back ends",
    "backends/selection.py": "the values of MLX_MARLIN_BACKEND and MLX's devices",
    "backends/kernels.py": "names MLX's functions that make kernels",
    "backends/source.py": "suffixes of the kernels' files",
    "lm/tuned_models/machine.py": "asks macOS for the chip without MLX",
    "cli/demo/report.py": "descriptions by the value of MLX_MARLIN_BACKEND",
}
"""Files and folders that may name a back end, and why."""
WORD = re.compile("cuda|metal(?!_emulator)", re.IGNORECASE)


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields names and strings of code with their lines, without docstrings."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield line, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.alias(name=name, asname=other):
                yield from ((line, each) for each in (name, other) if each)
            case ast.ImportFrom(module=str(name)):
                yield line, name
            case ast.keyword(arg=str(name)):
                yield line, name
            case ast.Constant(value=str(text)) if not re.search(r"\s", text):
                yield line, text  # a text with spaces is a message


def named_back_ends(text: str) -> list[str]:
    """Returns what code says of a back end, a line each."""
    found = (each for each in words(ast.parse(text)) if WORD.search(each[1]))
    return [f"{line}: {word}" for line, word in found]


def test_only_a_back_ends_own_folder_names_it() -> None:
    unused, wrong = dict(ALLOWED), []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if path.startswith(OWN_FOLDERS):
            continue
        found = named_back_ends(file.read_text(encoding="utf-8"))
        allowed = [each for each in ALLOWED if path.startswith(each)]
        if found and not allowed:
            wrong += [f"{path}:{each}" for each in found]
        for each in allowed if found else ():
            unused.pop(each, None)
    assert not wrong, "\n".join(wrong)
    assert not unused, "no longer needed"


def packages() -> Iterator[Path]:
    for name in ("mlx_marlin", "metal_emulator"):
        yield from (
            file.parent for file in (PACKAGE.parent / name).rglob("__init__.py")
        )


def test_no_init_file_has_logic() -> None:
    names_are_lazy = PACKAGE / "__init__.py"
    wrong = [
        folder.as_posix()
        for folder in packages()
        if (file := folder / "__init__.py") != names_are_lazy
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If | ast.For)
    ]
    assert not wrong


def test_a_package_has_several_files() -> None:
    lonely = [
        folder.as_posix()
        for folder in packages()
        if len([each for each in folder.iterdir() if each.name != "__pycache__"]) < 3
    ]
    assert not lonely
