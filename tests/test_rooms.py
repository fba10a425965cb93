"""Where code may name a back end, what a package is, and how long signatures are."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import mlx_marlin

PACKAGE = Path(mlx_marlin.__file__).parent
OWN_FOLDERS = ("backends/metal/", "backends/cuda/")
ALLOWED = {
    "__init__.py": "the public function `variants` lists Metal's",
    "cli/doctor": "reports about machines",
    "cli/installation.py": "reports about the installation",
    "backends/registry.py": "lists the back ends",
    "backends/selection.py": "the values of MLX_MARLIN_BACKEND and MLX's devices",
    "backends/kernels.py": "names MLX's functions that make kernels",
    "backends/source.py": "suffixes of the kernels' files",
    "lm/measured_models.py": "asks macOS for the chip without MLX",
    "cli/demo.py": "descriptions by the value of MLX_MARLIN_BACKEND",
}
"""Files and folders that may name a back end, and why."""
WORD = re.compile("cuda|metal(?!_emulator)", re.IGNORECASE)
MOST = 7
"""Positional parameters of a function that has not the signature of one of MLX's."""
AS_MLX = {
    "mlx_marlin/products/matmul.py: quantized_matmul": 8,
    "mlx_marlin/products/matmul.py: why_not": 8,
    "mlx_marlin/products/experts.py: gather_qmm": 11,
    "metal_emulator/metal_kernel.py: metal_kernel": 8,
    "metal_emulator/static/check.py: check": 8,
}
"""Functions with the signature of one of MLX's, and their positional parameters."""
MOST_LINES = {
    "backends": 8514,
    "checkpoints": 5896,
    "cli": 5277,
    "evidence": 111,
    "guard": 1958,
    "layers": 1543,
    "lm": 13790,
    "measure": 1577,
    "planning": 2600,
    "products": 3261,
    "weights": 1252,
    "": 1028,
}
"""Lines of Python that a room may have; "" is the folder of the package itself. They
are lowered to what is reached: a change that needs more removes as much in its room."""
MOST_FOUND = {
    "lines of tests": 87_501,
    "lines of metal_emulator": 7_024,
    "files of mlx_marlin": 257,
    "files under 60 lines": 43,
    "thousandths of lines that import": 68,
    "public classes with the name of another": 12,
    "docstrings torn from their value": 0,
}
"""How much of each there may be: what is reached, which is only lowered."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


FILES = [
    file
    for package in (PACKAGE, PACKAGE.with_name("metal_emulator"))
    for file in sorted(package.rglob("*.py"))
]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


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


def test_only_a_back_ends_own_folder_names_it() -> None:
    unused, wrong = dict(ALLOWED), []
    for file in FILES:
        path = file.relative_to(PACKAGE.parent).as_posix().removeprefix("mlx_marlin/")
        if path.startswith((*OWN_FOLDERS, "metal_emulator/")):
            continue
        if not WORD.search(file.read_text(encoding="utf-8")):
            continue  # parsing takes longer
        found = [each for each in words(parsed(file)) if WORD.search(each[1])]
        allowed = [each for each in ALLOWED if path.startswith(each)]
        if not allowed:
            wrong += [f"{path}:{line}: {word}" for line, word in found]
        for each in allowed if found else ():
            unused.pop(each, None)
    assert not wrong, "\n".join(wrong)
    assert not unused, "no longer needed"


def test_a_package_has_several_files_and_no_logic_in_its_init_file() -> None:
    names_are_lazy = PACKAGE / "__init__.py"
    packages = [file for file in FILES if file.name == "__init__.py"]
    wrong = [
        file.as_posix()
        for file in packages
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If | ast.For)
        and file != names_are_lazy
    ]
    assert not wrong
    lonely = [
        file.parent.as_posix()
        for file in packages
        if len({each.name for each in file.parent.iterdir()} - {"__pycache__"}) < 3
    ]
    assert not lonely


def test_no_room_has_more_lines_than_its_budget() -> None:
    lines = dict.fromkeys(MOST_LINES, 0)
    for file in PACKAGE.rglob("*.py"):
        room, *below = file.relative_to(PACKAGE).parts
        count = len(file.read_text(encoding="utf-8").splitlines())
        lines[room if below else ""] += count

    assert {room: n for room, n in lines.items() if n > MOST_LINES[room]} == {}


def torn(tree: ast.Module) -> int:
    """Counts docstrings of module-level values that blank lines part from them."""
    return sum(
        isinstance(value, ast.Assign | ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and text.lineno > (value.end_lineno or 0) + 1
        for value, text in pairwise(tree.body)
    )


def test_nothing_grows_that_is_to_shrink() -> None:
    ours = [file for file in FILES if file.is_relative_to(PACKAGE)]
    tests = [*Path(__file__).parent.rglob("*.py")]
    lines = {
        file: len(file.read_text(encoding="utf-8").splitlines())
        for file in (*FILES, *tests)
    }
    importing = sum(
        node.end_lineno - node.lineno + 1
        for file in ours
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Import | ast.ImportFrom) and node.end_lineno
    )
    classes = Counter(
        node.name
        for file in ours
        for node in parsed(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    twice = [name for name, count in classes.items() if count > 1]
    all_lines = sum(lines[file] for file in ours)
    found = {
        "lines of tests": sum(lines[file] for file in tests),
        "lines of metal_emulator": sum(lines[file] for file in {*FILES} - {*ours}),
        "files of mlx_marlin": len(ours),
        "files under 60 lines": sum(lines[file] < 60 for file in ours),
        "thousandths of lines that import": 1000 * importing // all_lines,
        "public classes with the name of another": len(twice),
        "docstrings torn from their value": sum(map(torn, map(parsed, FILES))),
    }

    more = {name: n for name, n in found.items() if n > MOST_FOUND[name]}
    assert more == {}, twice


def test_every_bar_is_silent_where_standard_error_is_no_terminal() -> None:
    """`progress.bar` is the package's; examples and benchmarks have their own."""
    root = PACKAGE.parent
    others = [*root.glob("examples/*/*.py"), *root.glob("benchmarks/*.py")]
    calls = {
        f"{file.relative_to(root)}:{node.lineno}": {each.arg for each in node.keywords}
        for file in (*FILES, *others)
        if "tqdm" in file.read_text(encoding="utf-8")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tqdm"
    }
    assert [call for call in calls if call.startswith(("mlx_", "metal_"))] == [
        call for call in calls if call.startswith("mlx_marlin/progress.py")
    ]
    assert len(calls) > 4
    assert [call for call, names in calls.items() if "disable" not in names] == []


def test_only_mlxs_signatures_have_eight_or_more_positional_parameters() -> None:
    found = {}
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, Function):
                given = (*node.args.posonlyargs, *node.args.args)
                count = len([each for each in given if each.arg not in ("self", "cls")])
                if count > MOST:
                    path = file.relative_to(PACKAGE.parent).as_posix()
                    found[f"{path}: {getattr(node, 'name', 'lambda')}"] = count
    assert found == AS_MLX
