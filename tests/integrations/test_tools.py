"""mlx-lm's tools with each combination of options: what docs/mlx_lm.md says of them."""

from functools import cache
from itertools import product, takewhile
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
from support.profiles import sampled

DOCUMENT = Path(__file__).parents[2] / "docs" / "mlx_lm.md"
SERVER = "the server, streams at a time"
"""The row of tests/cli/test_lm.py and of mlx-lm's own tests."""
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

pytestmark = pytest.mark.usefixtures("stock", "unfused")


@cache
def table() -> dict[str, str]:
    """Returns what the document says of each tool on packed or joined layers."""
    lines = DOCUMENT.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| tool |"))
    lines = [*takewhile(lambda line: line.startswith("|"), lines[start + 2 :])]
    return dict([cell.strip() for cell in line.strip("|").split("|")] for line in lines)


def remedy(tool: str, options: dict[str, Any]) -> str | None:
    """Returns the remedy that the table names for a combination of options."""
    cell = table()[tool]
    assert cell.startswith(("works", "raises: "))
    if cell.startswith("works") or not (
        options["layout"] == "marlin" or options["join"]
    ):
        return None
    return cell.removeprefix("raises: ").replace("`", "")


def test_the_table_has_a_row_for_every_tool() -> None:
    assert {*table()} == {*TOOLS, *QUANTIZERS, SERVER}


@sampled(14)
@OPTIONS
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_works_as_with_stock_or_names_the_remedy(
    tool: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = mlx_marlin.optimize(tiny("llama"), **options)
    assert_converted(model, options)
    named = remedy(tool, options)
    if named is not None:
        with pytest.raises(ValueError, match=r"MarlinLinear|MarlinPart") as raised:
            TOOLS[tool](model, tmp_path)
        assert named in str(raised.value)
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
@sampled(4)
@pytest.mark.parametrize("tool", QUANTIZERS)
def test_what_a_tool_quantized_is_converted(tool: str, options: dict[str, Any]) -> None:
    assert remedy(tool, options) is None
    model, stock = QUANTIZERS[tool](plain()), QUANTIZERS[tool](plain())
    expected = stock(TOKENS)

    mlx_marlin.optimize(model, **options)

    assert_converted(model, options, can_join=has_equal_widths(stock))
    found = model(TOKENS, cache=None)
    assert mx.abs(found - expected).max() <= 1e-5 * mx.abs(expected).max()
    assert_same_model(mlx_marlin.restore(model), stock)
