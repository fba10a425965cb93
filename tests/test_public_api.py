"""What users import: the names, their docstrings, and nothing that they did not ask."""

import subprocess
import sys
from inspect import getdoc, isclass, signature

import pytest

import mlx_marlin

NAMES = sorted(mlx_marlin.__all__)
ONE_ARGUMENT = ("exporting", "read_checkpoint", "restore")
"""Names with one argument that needs a description."""


def run(program: str, **environment: str) -> str:
    """Returns what a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(mlx_marlin, name)

    doc = getdoc(value)
    assert doc is not None
    first, *rest = doc.splitlines()
    assert first.endswith(".")
    named = [each for each in signature(value).parameters if each != "self"]
    if name != "why_not":  # takes the arguments of quantized_matmul
        section = "Attributes:" if name == "PackedWeight" else "Args:"
        assert (section in rest) == (len(named) > 1 or name in ONE_ARGUMENT)
        assert all(f" {each}" in doc for each in named if section in rest)
    members = vars(value).items() if isclass(value) else ()
    for member, function in members:
        if not member.startswith("_") and (callable(function) or member == "packed"):
            assert getdoc(getattr(value, member)), f"{name}.{member}"


FIRST = f"""
import os
import mlx.core, mlx.nn
for name in {NAMES}:
    if not os.fork():  # a process that has not imported the package yet
        scope = {{}}
        exec(f"from mlx_marlin import {{name}}", scope)
        # A submodule of the same name would take its place.
        import mlx_marlin, mlx_marlin.planning.plan, mlx_marlin.products.matmul
        found = getattr(mlx_marlin, name)
        os._exit(not (callable(found) and found is scope[name]))
    print(name if os.wait()[1] else "", end="")
"""


@pytest.mark.slow
def test_each_name_can_be_imported_first() -> None:
    assert run(FIRST) == ""


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'matmul'"):
        mlx_marlin.matmul  # noqa: B018


SERVE = """
import mlx.core as mx, mlx.nn as nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.QuantizedLinear(64, 64), nn.QuantizedEmbedding(64, 64)]
native = mx.quantize(mx.ones((8, 64)))
import sys
before = {*sys.modules}
import mlx_marlin
mlx_marlin.quantized_matmul(mx.ones((3, 64)), *native)
mlx_marlin.unpack(mlx_marlin.pack(*native))
mlx_marlin.quantize(mx.ones((8, 64)), symmetric=True)
mlx_marlin.plan(8, 4096, 4096).explain()
model = mlx_marlin.optimize(Model(), layout="marlin")
mlx_marlin.restore(model)
"""


@pytest.mark.parametrize("program", ["before = set(); import mlx_marlin", SERVE])
def test_neither_importing_nor_serving_takes_in_what_it_does_not_need(
    program: str,
) -> None:
    ending = "\nimport sys\nprint(*sorted({*sys.modules} - before))"

    loaded = run(program + ending, MLX_MARLIN_BACKEND="stock").split()

    roots = {each.split(".")[0] for each in loaded}
    assert "mlx_marlin" in roots
    assert not roots & {"numpy", "mlx_lm", "tqdm", "transformers", "rich", "elftools"}
    assert not [each for each in loaded if each.startswith("metal_emulator")]


def test_planning_takes_in_no_mlx() -> None:
    program = (
        "import mlx_marlin, sys; print(mlx_marlin.plan(8, 4096, 4096).explain()); "
        "print(*sorted(sys.modules))"
    )

    explained, loaded = run(program).splitlines()

    assert explained.startswith("gemm_register")
    assert "mlx" not in loaded.split()
    assert "mlx.core" not in loaded.split()


def test_without_any_extra_stock_answers_after_one_warning() -> None:
    program = """
import sys, warnings
for name in ("numpy", "elftools", "ziglang"):
    sys.modules[name] = None
import mlx.core as mx, mlx_marlin

native = mx.quantize(mx.ones((8, 64)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for rows in (1, 2, 3):
        y = mlx_marlin.quantized_matmul(mx.ones((rows, 64)), *native)
        assert mx.allclose(y, mx.full((rows, 8), 64.0))
print(len(caught), caught[0].category.__name__, caught[0].message)
"""
    if sys.platform == "darwin":
        pytest.skip("Metal needs no extra")

    count, category, message = run(program).split(maxsplit=2)

    assert (count, category) == ("1", "RuntimeWarning")
    assert "stock MLX serves every call" in message
