"""Reading one tensor after the other takes the memory of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.gguf_blocks import SIZES
from support.gguf_cases import CASES
from support.gguf_files import Written, gguf_bytes

COLUMNS = 8192
PROGRAM = """
import resource, sys
import mlx.core as mx
from mlx_marlin.checkpoints.gguf import read
from mlx_marlin.checkpoints.quantization import Quantization
import gguf

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

tensors = read(sys.argv[1], Quantization())
small = next(tensors).read()
mx.eval(small)
before = peak()
for tensor in tensors:
    weight = tensor.read()
    mx.eval(weight.codes, weight.scales)
    del weight
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes as Linux does")
@pytest.mark.parametrize(
    ("kind", "tensors", "rows", "bits", "more"),
    [
        ("Q8_0", 6, 4096, 8.5, 0),
        ("Q2_K", 6, 4096, 2.625, 0),
        ("IQ4_XS", 6, 4096, 4.25, 0),
        ("IQ2_XXS", 2, 8192, 4.5, 200_000_000),
    ],
)
def test_tensors_that_were_read_take_no_memory(
    kind: str, tensors: int, rows: int, bits: float, more: int, tmp_path: Path
) -> None:
    """A type without kernels is decoded a few rows at a time."""
    elements, nbytes = SIZES[kind]
    nbytes *= rows * COLUMNS // elements
    infos = [Written("output_norm.weight", "F32", (8,), bytes(32))]
    # The tensors' data are a hole in the file: no one has to write it.
    holes = [
        Written(f"blk.{layer}.ffn_up.weight", kind, (rows, COLUMNS), b"")
        for layer in range(tensors)
    ]
    path = tmp_path / "large.gguf"
    path.write_bytes(with_holes(infos, holes, nbytes))
    os.truncate(path, path.stat().st_size + tensors * nbytes)

    grown = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert int(grown) * 1024 < 4 * rows * COLUMNS * bits / 8 + more


def with_holes(infos: list[Written], holes: list[Written], nbytes: int) -> bytes:
    """Returns a file that ends where the data of the last tensors begin."""
    metadata = CASES["qwen2"].metadata | {"qwen2.block_count": len(holes)}
    octets = gguf_bytes(metadata, [*infos, *holes])
    for index, hole in enumerate(holes):
        name = hole.name.encode()
        at = octets.index(name) + len(name) + 4 + 16 + 4
        offset = 32 + index * nbytes
        octets = octets[:at] + offset.to_bytes(8, "little") + octets[at + 8 :]
    return octets
