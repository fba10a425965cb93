"""Prints how fast blocks of each type of GGUF become rows of codes.

    python benchmarks/gguf_reading.py [--megabytes 64]

Process time of one thread, the best of five, of random blocks with finite scales.
"""

import argparse
import time

import mlx.core as mx
import numpy as np

from mlx_marlin.checkpoints.gguf.blocks import (
    BLOCK_TYPES,
    LAYOUTS,
    BlockType,
    read_blocks,
)

COLUMNS = 4096
RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    megabytes = parser.parse_args().megabytes
    for block in BLOCK_TYPES.values():
        if block.name in LAYOUTS:
            print(f"{block.name:6} {speed(block, megabytes):6.0f} MB/s")


def speed(block: BlockType, megabytes: int) -> float:
    """Returns megabytes of blocks a second."""
    row = COLUMNS // block.elements * block.nbytes
    rows = megabytes * 10**6 // row
    # Bytes below 64 are finite in every format of scales.
    data = np.random.default_rng(0).integers(0, 64, rows * row, dtype=np.uint8)
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        weight = read_blocks(memoryview(data), block, (rows, COLUMNS))
        mx.eval(weight.codes, weight.scales)
        best = min(best, time.process_time() - start)
    return data.nbytes / best / 1e6


if __name__ == "__main__":
    main()
