"""The table of types in docs/import.md is what the code does."""

import re
from pathlib import Path

import numpy as np

from mlx_marlin.checkpoints.gguf.block_types import BLOCK_TYPES
from mlx_marlin.checkpoints.gguf.blocks import LAYOUTS, PLAIN, read_blocks
from support.gguf_blocks import NUMBERS
from support.gguf_files import random_tensor

DOCUMENT = Path(__file__).parents[3] / "docs" / "import.md"


def rows() -> dict[str, list[str]]:
    """Returns the cells of the table of types, by the first one."""
    text = DOCUMENT.read_text(encoding="utf-8")
    lines = re.findall(r"^\| ([A-Z]+\d\S*) \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in lines}


def test_every_type_is_in_the_table() -> None:
    assert set(rows()) == {*LAYOUTS, *PLAIN}


def test_sizes_and_modes_are_those_of_the_code() -> None:
    random = np.random.default_rng(0)
    for name, (stored, becomes, scales, packed) in rows().items():
        block = BLOCK_TYPES[NUMBERS[name]]
        assert float(stored) == round(block.nbytes / block.elements, 4), name
        if name not in LAYOUTS:
            continue
        written = random_tensor("w", name, (32, 1024), random)
        weight = read_blocks(memoryview(written.data), block, written.shape)
        wanted = f"{weight.mode}, {weight.bits} bits, group {weight.group_size}"
        assert becomes == wanted, name
        in_super_blocks = weight.mode in ("k_quant", "k_codebook")
        assert scales.endswith("integers") == in_super_blocks, name
        ours = weight.packed().nbytes / (32 * 1024)
        assert float(packed.split()[0]) == round(ours, 4), name
