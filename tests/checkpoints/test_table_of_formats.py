"""The sizes and kernels in docs/import.md's table of all formats are the code's."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin.weights.formats import format_of

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
    def stored(self) -> float:
        """Bytes of a weight in the file."""
        bits = self.stored_bits or self.bits
        return (bits + self.group_bits / self.group_size) / 8 + self._order

    @property
    def packed(self) -> float:
        """Bytes of a weight in our layout."""
        rows, groups = 32, K // self.group_size
        format = format_of(self.mode, self.bits)
        if format.has_super_blocks:
            groups = prod(format.records(K, self.group_size))
        scales = mx.zeros((rows, groups), getattr(mx, format.scale_dtype("float16")))
        weight = mlx_marlin.pack(
            mx.zeros((rows, K * self.bits // 32), mx.uint32),
            scales,
            scales if format.has_second_array else None,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return weight.nbytes / (rows * K) + self._order

    @property
    def _order(self) -> float:
        return 4 / N if self.reordered else 0

    @property
    def kernels(self) -> list[str]:
        """The kernel for each number of rows; stock MLX where it serves."""
        choices = [
            mlx_marlin.plan(
                m,
                N,
                K,
                mode=self.mode,
                bits=self.bits,
                group_size=self.group_size,
                layout="marlin",
                chip=CHIP,
            )
            for m in ROWS
        ]
        return [
            "MLX" if choice.reason else choice.plan.explain().split()[0]
            for choice in choices
        ]


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


def cells() -> dict[str, list[str]]:
    """Returns the cells of the table, by the first one."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("\n## Sizes and kernels\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| ([^|]+?) \|(.*)\|$", table, re.MULTILINE)
    return {
        name: [cell.strip() for cell in rest.split("|")]
        for name, rest in lines
        if name != "format" and not name.startswith("-")
    }


def test_every_format_is_in_the_table() -> None:
    assert [*cells()] == [*STORED]


@pytest.mark.parametrize("name", STORED)
def test_sizes_and_kernels_are_those_of_the_code(name: str) -> None:
    format = STORED[name]
    assert cells()[name] == [f"{format.stored:.4f}", f"{format.packed:.4f}"]
    assert format.kernels == ["gemv", "gemm_register", "gemm_register"]
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert "gemv for 1 row of x and gemm_register for 8 and 64, in each of" in text


if __name__ == "__main__":
    for name, format in STORED.items():
        print(f"| {name} | {format.stored:.4f} | {format.packed:.4f} |")
