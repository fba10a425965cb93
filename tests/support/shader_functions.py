"""Calls single functions of the shaders with numbers that no test array could reach.

An offset beyond 2**32 cannot be tested by reading an array that large. These kernels
include the shaders' own text, call one function for each thread and return its result.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import metal_emulator
from mlx_marlin.backends.metal import launches, source
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights import layout

LENGTH = 64
"""Calls of a dispatch; one length for all, so that a kernel is compiled once."""
TIME_LIMIT = 2.0
"""Seconds that a threadgroup may take; it takes thousandths."""
Numbers = Sequence[int]


def balanced_cuts(part: Numbers, parts: Numbers, total: Numbers) -> list[int]:
    """Returns `balanced_cut` of `lib/work.metal` for each triple."""
    return _called(
        "balanced_cut",
        source.kernel_source("reduce").header,
        "out[i] = marlin::balanced_cut(part[i], parts[i], total[i]);",
        {"part": part, "parts": parts, "total": total},
    )[: len(part)]


def owners(work: Work, positions: Numbers) -> list[tuple[int, int, int]]:
    """Returns `range_owner` for each k tile, and where its range begins and ends."""
    found = _called(
        "range_owner",
        source.kernel_source("reduce").header,
        "const marlin::Work work = marlin::read_work(shape, schedule);\n"
        "const uint member = marlin::range_owner(position[i], work);\n"
        "out[3 * i] = member;\n"
        "out[3 * i + 1] = marlin::range_cut(member, work);\n"
        "out[3 * i + 2] = marlin::range_cut(member + 1, work);",
        {"position": positions},
        results=3,
        numbers=_numbers_of(work),
    )
    rows = np.reshape(found, (-1, 3))[: len(positions)].tolist()
    return [(member, begin, end) for member, begin, end in rows]


def expert_offsets(expert: Numbers, size: Numbers) -> list[int]:
    """Returns `offset_of_expert` of `lib/gather.metal` for each pair."""
    found = _called(
        "offset_of_expert",
        source.kernel_source("gather").header,
        "const ulong offset = marlin::offset_of_expert(expert[i], size[i]);\n"
        + _stored("offset", 2, 0),
        {"expert": expert, "size": size},
        results=2,
    )
    return _joined(found)[: len(expert)]


def repack_offsets(
    positions: Sequence[tuple[int, int, int]], *, n: int, k: int, bits: int
) -> list[tuple[int, int]]:
    """Returns where the run of each threadgroup begins, in rows and in tiles."""
    template = launches.repack_template(bits, layout.order_of_group(64))
    x, y, z = zip(*positions, strict=True)
    found = _called(
        f"block_of_threadgroup_{bits}",
        source.kernel_source("pack").header,
        f"typedef marlin::Codes<{', '.join(map(str, template.values()))}> C;\n"
        "const uint3 position = uint3(x[i], y[i], z[i]);\n"
        "const marlin::Block block =\n"
        "    marlin::block_of_threadgroup<C>(shape, position);\n"
        + _stored("block.native", 4, 0)
        + _stored("block.packed", 4, 2),
        {"x": x, "y": y, "z": z},
        results=4,
        numbers={"shape": (n, k)},
    )
    offsets = _joined(found)
    pairs = zip(offsets[::2], offsets[1::2], strict=True)
    return [*pairs][: len(positions)]


def _numbers_of(work: Work) -> dict[str, Numbers]:
    """Returns what `read_work` reads, without the sizes of a product."""
    return {
        "shape": (0, 0, 0, 0, 1, work.k_tiles, work.group_tiles),
        "schedule": (
            work.whole,
            work.ranges,
            work.slices,
            work.minimum,
            work.groups,
            int(work.partition == "ceil"),
            1,
        ),
    }


def _stored(value: str, results: int, first: int) -> str:
    """Returns the statements that store a number of 64 bits as two words."""
    return (
        f"out[{results} * i + {first}] = uint({value});\n"
        f"out[{results} * i + {first + 1}] = uint({value} >> 32);\n"
    )


def _joined(words: Numbers) -> list[int]:
    """Returns the numbers of 64 bits that `_stored` stored."""
    low, high = words[::2], words[1::2]
    return [a | b << 32 for a, b in zip(low, high, strict=True)]


def _called(
    name: str,
    header: str,
    body: str,
    inputs: dict[str, Numbers],
    *,
    results: int = 1,
    numbers: dict[str, Numbers] | None = None,
) -> list[int]:
    """Runs a body once for each element of the inputs, which are repeated to LENGTH."""
    kernel = metal_emulator.metal_kernel(
        name=f"call_{name}",
        input_names=[*inputs, *(numbers or {})],
        output_names=["out"],
        source=f"const uint i = thread_position_in_grid.x;\n{body}",
        header=header,
    )
    arrays: list[Any] = [
        mx.array(np.resize(np.array(values, np.uint32), LENGTH))
        for values in inputs.values()
    ]
    arrays += [mx.array(values, mx.int32) for values in (numbers or {}).values()]
    # A wrong cut may let the search for its owner run for ever.
    with metal_emulator.emulated(time_limit=TIME_LIMIT):
        (out,) = kernel(
            inputs=arrays,
            output_shapes=[(results * LENGTH,)],
            output_dtypes=[mx.uint32],
            grid=(LENGTH, 1, 1),
            threadgroup=(32, 1, 1),
        )
    found: list[int] = out.tolist()
    return found
