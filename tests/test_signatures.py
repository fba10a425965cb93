"""How many positional parameters our functions have."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("mlx_marlin", "metal_emulator")
MOST = 7
AS_MLX = {
    "mlx_marlin/products/matmul.py: quantized_matmul": 8,
    "mlx_marlin/products/matmul.py: why_not": 8,
    "mlx_marlin/products/experts/matmul.py: gather_qmm": 11,
    "metal_emulator/metal_kernel.py: metal_kernel": 8,
    "metal_emulator/static/check.py: check": 8,
}
"""Functions with the signature of one of MLX's, and their positional parameters."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def positional(function: Function) -> int:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len([name for name in names if name not in ("self", "cls")])


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, Function):
            name = getattr(node, "name", "lambda")
            label = f"{path.relative_to(ROOT).as_posix()}: {name}"
            yield label, positional(node)


def test_only_mlxs_signatures_have_eight_or_more_positional_parameters() -> None:
    found = {
        label: count
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for label, count in functions(path)
        if count > MOST
    }
    assert found == AS_MLX
