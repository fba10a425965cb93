"""Reading one tensor after the other takes the memory of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.gguf_files import Written, gguf_bytes
from support.gguf_models import CASES

TENSORS, ROWS, COLUMNS = 10, 4096, 8192
TENSOR_BYTES = ROWS * COLUMNS // 32 * 34
PROGRAM = """
import resource, sys
import mlx.core as mx
from mlx_marlin.checkpoints.gguf import read

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

tensors = read(sys.argv[1])
small = next(tensors).read()
mx.eval(small)
before = peak()
for tensor in tensors:
    weight = tensor.read()
    mx.eval(weight.codes, weight.scales)
    del weight
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes as Linux does")
def test_tensors_that_were_read_take_no_memory(tmp_path: Path) -> None:
    infos = [Written("output_norm.weight", "F32", (8,), bytes(32))]
    # The tensors' data are a hole in the file: no one has to write it.
    holes = [
        Written(f"blk.{layer}.ffn_up.weight", "Q8_0", (ROWS, COLUMNS), b"")
        for layer in range(TENSORS)
    ]
    path = tmp_path / "large.gguf"
    path.write_bytes(with_holes(infos, holes))
    os.truncate(path, path.stat().st_size + TENSORS * TENSOR_BYTES)

    grown = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert int(grown) * 1024 < 4 * TENSOR_BYTES


def with_holes(infos: list[Written], holes: list[Written]) -> bytes:
    """Returns a file that ends where the data of the last tensors begin."""
    octets = gguf_bytes(CASES["qwen2"].metadata, [*infos, *holes])
    for index, hole in enumerate(holes):
        name = hole.name.encode()
        at = octets.index(name) + len(name) + 4 + 16 + 4
        offset = 32 + index * TENSOR_BYTES
        octets = octets[:at] + offset.to_bytes(8, "little") + octets[at + 8 :]
    return octets
