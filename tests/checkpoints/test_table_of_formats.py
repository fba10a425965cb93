"""The sizes, modes and kernels in docs/import.md's tables are the code's."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.checkpoints.gguf.blocks import BLOCK_TYPES, LAYOUTS, PLAIN, read_blocks
from mlx_marlin.weights.formats import format_of
from support.gguf_blocks import NUMBERS
from support.gguf_files import random_tensor

DOCUMENT = Path(__file__).parents[2] / "docs" / "import.md"
N, K, CHIP = 14336, 4096, "Apple M4 Max"
ROWS = (1, 8, 64)


@dataclass(frozen=True)
class Stored:
    """A format: what it becomes, and bits that a group takes beside its codes."""

    mode: str
    bits: int
    group_size: int
    group_bits: int
    reordered: bool = False
    stored_bits: int = 0  # if another than `bits`

    @property
    def cells(self) -> list[str]:
        """Bytes of a weight in the file and in our layout."""
        bits = self.stored_bits or self.bits
        order = 4 / N if self.reordered else 0
        stored = (bits + self.group_bits / self.group_size) / 8 + order
        format, rows = format_of(self.mode, self.bits), 32
        groups = K // self.group_size
        scales = mx.zeros((rows, groups), getattr(mx, format.scale_dtype("float16")))
        weight = mlx_marlin.pack(
            mx.zeros((rows, K * self.bits // 32), mx.uint32),
            scales,
            scales if format.has_second_array else None,
            **self.options,
        )
        return [f"{stored:.4f}", f"{weight.nbytes / (rows * K) + order:.4f}"]

    @property
    def options(self) -> dict[str, Any]:
        return {"mode": self.mode, "bits": self.bits, "group_size": self.group_size}


STORED = {
    "MLX affine, 4 bits, group 64": Stored("affine", 4, 64, 32),
    "MLX mxfp4": Stored("mxfp4", 4, 32, 8),
    "MLX mxfp8": Stored("mxfp8", 8, 32, 8),
    "MLX nvfp4": Stored("nvfp4", 4, 16, 8),
    "GPTQ, 3 bits, group 128": Stored("zero_point", 3, 128, 19),
    "GPTQ, 4 bits, group 128": Stored("zero_point", 4, 128, 20),
    "GPTQ, 4 bits, symmetric": Stored("symmetric", 4, 128, 20),
    "GPTQ, 4 bits, act-order": Stored("zero_point", 4, 128, 20, reordered=True),
    "GPTQ, 8 bits, group 128": Stored("zero_point", 8, 128, 24),
    "AWQ, 4 bits, group 128": Stored("zero_point", 4, 128, 20),
    "compressed-tensors, 4 bits, group 128": Stored("zero_point", 4, 128, 20),
    "compressed-tensors, 4 bits, symmetric": Stored("symmetric", 4, 128, 16),
    "compressed-tensors, 7 bits, symmetric": Stored(
        "zero_point", 8, 128, 16, stored_bits=7
    ),
    "compressed-tensors, nvfp4": Stored("nvfp4", 4, 16, 8),
}


def cells(pattern: str, heading: str = "") -> dict[str, list[str]]:
    """Returns the cells of a table's rows, by the first one."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.partition(heading)[2].partition("\n## ")[0] if heading else text
    rows = re.findall(rf"^\| ({pattern}) \|(.*)\|$", section, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


TYPES = cells(r"[A-Z]+\d\S*")
TABLE = cells(r"(?!format|-)[^|]+?", "\n## Sizes and kernels\n")


def test_every_format_and_type_is_in_a_table() -> None:
    assert [*TABLE] == [*STORED]
    assert {*TYPES} == {*LAYOUTS, *PLAIN}
    for name in PLAIN:
        assert float(TYPES[name][0]) == BLOCK_TYPES[NUMBERS[name]].nbytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_sizes_and_modes_of_types_are_those_of_the_code(name: str) -> None:
    stored, becomes, scales, packed = TYPES[name]
    block, random = BLOCK_TYPES[NUMBERS[name]], np.random.default_rng(0)
    written = random_tensor("w", name, (32, 1024), random)
    weight = read_blocks(memoryview(written.data), block, written.shape)
    assert float(stored) == round(block.nbytes / block.elements, 4)
    assert becomes == f"{weight.mode}, {weight.bits} bits, group {weight.group_size}"
    in_super_blocks = weight.mode in ("k_quant", "k_codebook")
    assert scales.endswith("integers") == in_super_blocks
    ours = weight.packed().nbytes / (32 * 1024)
    assert float(packed.split()[0]) == round(ours, 4)


@pytest.mark.parametrize("name", STORED)
def test_sizes_and_kernels_are_those_of_the_code(name: str) -> None:
    format = STORED[name]
    assert TABLE[name] == format.cells
    plans = [
        mlx_marlin.plan(m, N, K, layout="marlin", chip=CHIP, **format.options).plan
        for m in ROWS
    ]
    kernels = [plan.explain().split()[0] for plan in plans]
    assert kernels == ["gemv", "gemm_register", "gemm_register"]
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert "gemv for 1 row of x and gemm_register for 8 and 64, in each of" in text


if __name__ == "__main__":
    for name, format in STORED.items():
        print(f"| {name} | {' | '.join(format.cells)} |")
