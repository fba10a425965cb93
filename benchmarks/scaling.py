"""Writes the tables of docs/scaling.md: memory, tokens a second, several machines.

All times are the cost model's, of the products of a pass alone, with 4-bit weights in
groups of 64 in MLX's layout and float16, and of collectives as `Link` describes them.

Usage: python -m benchmarks.scaling [--check]
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.document_table import ROOT, DocumentTable, markdown
from benchmarks.predicted import (
    MIXTURE,
    MODELS,
    Model,
    served_seconds,
    totals,
    transformer,
)
from benchmarks.speculation import devices
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.problem import problem_of

DOCUMENT = ROOT / "docs" / "scaling.md"
TABLE = DocumentTable("predicted limits", "benchmarks.scaling")
LLAMA_8B, _, DENSE_27B = MODELS
LLAMA_70B = transformer(
    "Llama 70B",
    hidden=8192,
    inner=28672,
    layers=80,
    queries=8192,
    keys=1024,
    vocabulary=128256,
)
SIZES = (LLAMA_8B, DENSE_27B, MIXTURE, LLAMA_70B)
FORMATS = {"16 bits": 16.0, "8 bits": 8.5, "4 bits": 4.5, "mxfp4": 4.25}
"""Bits of a weight with its scales and biases, which are float16 in groups of 64; mxfp4
has a byte for 32."""
STREAMS = (1, 2, 4, 8, 16, 32, 64)
MEMORY = {
    "M1": 16,
    "M1 Pro": 32,
    "M1 Max": 64,
    "M1 Ultra": 128,
    "M2": 24,
    "M2 Pro": 32,
    "M2 Max": 96,
    "M2 Ultra": 192,
    "M3": 24,
    "M3 Pro": 36,
    "M3 Max": 128,
    "M3 Ultra": 512,
    "M4": 32,
    "M4 Pro": 64,
    "M4 Max": 128,
    "M5": 32,
    "M5 Pro": 64,
    "M5 Max": 128,
    "M5 Ultra": 256,
}
"""GB of the largest configuration, by Apple's technical specifications."""
USABLE = 0.75
"""Part of the memory that the GPU may use: an assumption. `mx.device_info()` returns
a machine's own figure, `max_recommended_working_set_size`."""
CLUSTERS = ("Apple M4 Pro", "Apple M4 Max", "Apple M3 Ultra")
SHARDED = (LLAMA_8B, DENSE_27B, LLAMA_70B)
BATCHES = (1, 16)
"""Streams for which several machines are compared."""
COLUMNS_SHARDED = {2, 4}
"""Products of a `transformer`, by position, of which machines hold columns: o and down.
The last product, for the vocabulary, is not sharded; of the others they hold rows."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of machines, and MLX's algorithm for a sum over it.

    Attributes:
        latency_us: Microseconds of a message.
        gigabytes: 10^9 bytes per second in one direction.
        is_ring: Whether a sum takes 2 (machines - 1) messages in sequence, as in MLX's
            ring, or one, as with a connection of each with each.
        crossings_us: Microseconds for the two crossings between GPU and CPU.
    """

    latency_us: float
    gigabytes: float
    is_ring: bool
    crossings_us: float = 2 * 4.0

    def sum_seconds(self, machines: int, size: int) -> float:
        """Returns the seconds of a sum of arrays of so many bytes."""
        messages = 2 * (machines - 1) if self.is_ring else 1
        part = size / machines if self.is_ring else size
        message = self.latency_us * 1e-6 + part / (self.gigabytes * 1e9)
        return messages * message + self.crossings_us * 1e-6


RDMA = Link(latency_us=29, gigabytes=6.3, is_ring=False)
"""Thunderbolt 5 with RDMA (JACCL): 27 to 31 us, 6.1 to 6.5 GB/s (omlx#3118)."""
TCP = Link(latency_us=300, gigabytes=0.4, is_ring=True)
"""Thunderbolt 5 with TCP (ring): docs/scaling.md has the sources."""


def weights(model: Model) -> int:
    """Returns the quantized weights of a model, embeddings counted as the output's."""
    dense = sum(k * n * count for k, n, count in model.products)
    experts = model.experts
    if experts is None:
        return dense
    return dense + experts.count * sum(
        k * n * layers for k, n, layers in experts.products
    )


def gigabytes(model: Model, bits: float = FORMATS["4 bits"]) -> float:
    """Returns the size of a model in 10^9 bytes."""
    return weights(model) * bits / 8e9


def fits(model: Model, device: Device, machines: int = 1) -> bool:
    """Returns whether a 4-bit model fits the largest configurations of a chip."""
    return gigabytes(model) < machines * USABLE * MEMORY[_name(device)]


def sharded_seconds(
    model: Model, rows: int, device: Device, machines: int, link: Link
) -> float:
    """Returns the seconds of a pass with tensor parallelism, as mlx-lm shards it.

    Each block has two sums, after o and down, of rows of the hidden size in float16.

    Args:
        model: A model made by `transformer`.
        rows: Rows of the pass.
        device: The chip of every machine.
        machines: Number of machines.
        link: Their connection.

    Raises:
        ValueError: If a product cannot be divided evenly into whole groups.
    """
    seconds = 0.0
    last = len(model.products) - 1
    for position, (k, n, count) in enumerate(model.products):
        if position in COLUMNS_SHARDED:
            k = _part(k, machines)
        elif position < last:
            n = _part(n, machines)
        seconds += count * served_seconds(problem_of(rows, n, k), device)
        if position in COLUMNS_SHARDED:
            seconds += count * link.sum_seconds(machines, rows * n * 2)
    return seconds


def _part(size: int, machines: int) -> int:
    if size % (machines * 64):
        raise ValueError(f"size={size} has no {machines} equal parts of whole groups")
    return size // machines


def pipelined_seconds(
    model: Model, rows: int, device: Device, machines: int, link: Link
) -> float:
    """Returns the seconds of a pass through machines that hold some layers each."""
    hidden = model.products[0][0]
    message = link.latency_us * 1e-6 + rows * hidden * 2 / (link.gigabytes * 1e9)
    return totals(model, rows, device)[1] + machines * message


def tables() -> str:
    """Returns the tables of the document."""
    parts = memory_table(), streams_table(), machines_table()
    return "\n\n".join(parts)


def memory_table() -> str:
    """Returns the gigabytes of models, by format."""
    lines = [
        [
            model.name,
            f"{weights(model) / 1e9:.1f}",
            *(f"{gigabytes(model, bits):.1f}" for bits in FORMATS.values()),
        ]
        for model in SIZES
    ]
    heads = [f"GB in {name}" for name in FORMATS]
    return markdown(["model", "10^9 weights", *heads], lines)


def streams_table() -> str:
    """Returns the tokens a second, by chip, model and streams."""
    lines = [
        [
            _name(device),
            f"{device.bandwidth_gbs:g}",
            f"{MEMORY[_name(device)]}",
            model.name,
            *(_rate(m, totals(model, m, device)[1]) for m in STREAMS),
        ]
        for device in devices()
        for model in SIZES
        if fits(model, device)
    ]
    return markdown(["chip", "GB/s", "GB", "model, streams", *map(str, STREAMS)], lines)


def machines_table() -> str:
    """Returns the tokens a second on several machines."""
    head = [
        *("chip", "model", "streams", "1"),
        *("2, RDMA", "2, TCP", "3 in a pipeline, RDMA", "4, RDMA"),
    ]
    return markdown(head, [*_clusters()])


def _clusters() -> Iterator[list[str]]:
    for chip in CLUSTERS:
        device = Device.named(chip)
        for model in SHARDED:
            for rows in BATCHES:
                times = {
                    1: (totals(model, rows, device)[1],),
                    2: (
                        sharded_seconds(model, rows, device, 2, RDMA),
                        sharded_seconds(model, rows, device, 2, TCP),
                    ),
                    3: (pipelined_seconds(model, rows, device, 3, RDMA),),
                    4: (sharded_seconds(model, rows, device, 4, RDMA),),
                }
                rates = [
                    _rate(rows, seconds) if fits(model, device, machines) else "-"
                    for machines, several in times.items()
                    for seconds in several
                ]
                yield [_name(device), model.name, f"{rows}", *rates]


def _rate(rows: int, seconds: float) -> str:
    rate = rows / seconds
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _name(device: Device) -> str:
    return device.name.removeprefix("Apple ")


def main(given: Sequence[str] | None = None) -> int:
    """Writes the tables; with --check returns 1 if they are not up to date."""
    return TABLE.main(DOCUMENT, tables, __doc__.splitlines()[0], given)


if __name__ == "__main__":
    sys.exit(main())
