"""Runs a Metal kernel on the CPU, counts its accesses, and finds a planted race.

Run it from the repository's root:

    python examples/own_kernel/run.py
"""

import mlx.core as mx
from transpose import WITH_RACE, transpose

from metal_emulator import Counters, EmulatorError, emulated, trace


def accesses(found: Counters) -> str:
    """Returns the accesses of every memory, one line each."""
    lines = []
    for memory in found.memories():
        cost = f"{memory.lines_128} lines of 128 bytes"
        if memory.space == "threadgroup":
            cost = f"{memory.bank_cycles} bank cycles"
        lines.append(f"  {memory.memory:<4}  {memory.accesses} accesses, {cost}")
    return "\n".join(lines)


x = mx.arange(64.0 * 96).reshape(64, 96)
with emulated(workers=1):
    print("correct:", mx.array_equal(transpose(x), x.T).item())
    for pitch in (32, 33):
        (found,) = trace(transpose, x, pitch=pitch)
        print(f"\n{pitch} floats from row to row of the tile:\n{accesses(found)}")

    y = transpose(x, source=WITH_RACE)
    print("\nwithout the last barrier, correct:", mx.array_equal(y, x.T).item())
    try:
        trace(transpose, x, source=WITH_RACE)
    except EmulatorError as error:
        print(f"in trace mode: {error}")
