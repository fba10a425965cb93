"""mlx-lm's tools with each combination of options: what docs/mlx_lm.md says of them."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

import mlx_marlin
from support.decoder_models import SIZES, tiny
from support.mlx_lm_tools import QUANTIZERS, TOKENS, TOOLS
from support.models import assert_converted, assert_same_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "mlx_lm.md"
HEADS = {
    '`layout="marlin"`': {"layout": "marlin"},
    "`join=True`": {"join": True},
    "`trace=True`": {"trace": True},
}
SERVER = "the server, streams at a time"
"""The row of tests/cli/test_lm_server.py and of mlx-lm's own tests."""
COMBINATIONS = [
    {"layout": layout, "join": join, "trace": trace}
    for layout, join, trace in product(("mlx", "marlin"), (False, True), (False, True))
]
OPTIONS = pytest.mark.parametrize(
    "options",
    COMBINATIONS,
    ids=lambda o: "-".join(
        [o["layout"], *(name for name in ("join", "trace") if o[name])]
    ),
)

pytestmark = pytest.mark.usefixtures("_stock")


@pytest.fixture
def _stock(backend: Callable[[str], None]) -> None:
    backend("stock")


@cache
def table() -> dict[str, dict[str, str]]:
    """Returns the cells of the document's table by row and head."""
    lines = DOCUMENT.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| tool |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    _, *heads = rows[0]
    return {name: dict(zip(heads, cells, strict=True)) for name, *cells in rows[2:]}


def errors(tool: str, options: dict[str, Any]) -> list[str]:
    """Returns the remedies that the table names for a combination of options."""
    cells = table()[tool]
    active = [
        cells[head]
        for head, option in HEADS.items()
        if option.items() <= options.items()
    ]
    assert all(cell.startswith(("works", "raises: ")) for cell in active)
    return [
        cell.removeprefix("raises: ").replace("`", "")
        for cell in active
        if cell.startswith("raises")
    ]


def test_the_table_has_a_row_for_every_tool() -> None:
    assert {*table()} == {*TOOLS, *QUANTIZERS, SERVER}
    assert all([*cells] == [*HEADS] for cells in table().values())


@pytest.mark.thinned(24)
@OPTIONS
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_works_as_with_stock_or_names_the_remedy(
    tool: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = mlx_marlin.optimize(tiny("llama"), **options)
    assert_converted(model, options)
    remedies = errors(tool, options)
    if remedies:
        with pytest.raises(ValueError, match=r"MarlinLinear|MarlinPart") as raised:
            TOOLS[tool](model, tmp_path)
        assert any(remedy in str(raised.value) for remedy in remedies)
        return

    found = TOOLS[tool](model, tmp_path)

    (tmp_path / "stock").mkdir()
    expected = TOOLS[tool](tiny("llama"), tmp_path / "stock")
    for ours, stock in zip(found, expected, strict=True):
        assert mx.abs(ours - stock).max() <= 1e-5 * mx.abs(stock).max()


def plain() -> nn.Module:
    """Returns a model that is not quantized; MLX's tools know its attention."""
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", **SIZES}))
    mx.eval(model.parameters())
    return model


def has_equal_widths(model: nn.Module) -> bool:
    """Returns whether a block's q, k and v, or its gate and up, can be joined."""
    for block in model.layers:
        attention, mlp = block.self_attn, block.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        for group in (projections, (mlp.gate_proj, mlp.up_proj)):
            if len({layer.bits for layer in group}) == 1:
                return True
    return False


@OPTIONS
@pytest.mark.thinned(6)
@pytest.mark.parametrize("tool", QUANTIZERS)
def test_what_a_tool_quantized_is_converted(tool: str, options: dict[str, Any]) -> None:
    assert not errors(tool, options)
    model, stock = QUANTIZERS[tool](plain()), QUANTIZERS[tool](plain())
    expected = stock(TOKENS)

    mlx_marlin.optimize(model, **options)

    assert_converted(model, options, can_join=has_equal_widths(stock))
    found = model(TOKENS, cache=None)
    assert mx.abs(found - expected).max() <= 1e-5 * mx.abs(expected).max()
    assert_same_model(mlx_marlin.restore(model), stock)
