"""A CUDA device, as far as planning cares, and a table of those that are known.

Everything here is data; `cuda_detection` looks at the machine.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

ARCHITECTURE = re.compile(r"sm_\d{2,}")
"""How MLX spells a compute capability: "sm_90" is 9.0."""
MOST_MULTIPROCESSORS = 1024
"""No GPU has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A GPU of NVIDIA's.

    Attributes:
        name: As CUDA says it, such as "NVIDIA H200".
        variant: The name with what distinguishes this device from others of it.
        multiprocessors: Streaming multiprocessors.
        bandwidth_gbs: Memory bandwidth that the maker states, or that was measured, in
            10^9 bytes a second.
        tflops: float16 operations of the matrix units with sums in float32, without
            sparsity, in 10^12 a second.
        shared_bytes: Shared memory that one block may have.
        arch: Compute capability, "sm_90".
    """

    name: str
    variant: str
    multiprocessors: int
    bandwidth_gbs: float
    tflops: float
    shared_bytes: int
    arch: str

    def __post_init__(self) -> None:
        if not 1 <= self.multiprocessors <= MOST_MULTIPROCESSORS:
            raise ValueError(
                f"multiprocessors={self.multiprocessors}, expected 1 to "
                f"{MOST_MULTIPROCESSORS}"
            )
        for name in ("bandwidth_gbs", "tflops", "shared_bytes"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name}={value} must be above 0")
        if not ARCHITECTURE.fullmatch(self.arch):
            raise ValueError(f"arch={self.arch!r}: expected one such as 'sm_90'")

    @property
    def cores(self) -> int:
        """What plans are spread over: the multiprocessors."""
        return self.multiprocessors

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        digits = self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    @property
    def figures(self) -> str:
        """What distinguishes it, in a few words."""
        return (
            f"{self.multiprocessors} multiprocessors, {self.bandwidth_gbs:g} GB/s, "
            f"{self.tflops:g} TFLOP/s, {self.shared_bytes // 1024} KiB shared"
        )

    @staticmethod
    def named(name: str, multiprocessors: int | None = None) -> "CudaDevice":
        """Returns a device of the table.

        Args:
            name: "NVIDIA H200", "H200" or "RTX 4090".
            multiprocessors: Replaces the device's own number.

        Raises:
            ValueError: If the table does not have it.
        """
        known = gpus().get(key(name))
        if known is None:
            names = ", ".join(dict.fromkeys(each.name for each in gpus().values()))
            raise ValueError(f"device {name!r} is not one of: {names}")
        if multiprocessors in (None, known.multiprocessors):
            return known
        return known.with_multiprocessors(multiprocessors or 0)

    def with_multiprocessors(self, count: int) -> "CudaDevice":
        """Returns the same device with another number of multiprocessors."""
        variant = f"{self.name} with {count} multiprocessors"
        return replace(self, multiprocessors=count, variant=variant)


DEFAULT = CudaDevice(
    name="unknown CUDA device",
    variant="unknown CUDA device, planned as a small one",
    multiprocessors=40,
    bandwidth_gbs=300,
    tflops=60,
    shared_bytes=99 * 1024,
    arch="sm_80",
)
"""For unknown hardware: a small one, so that no plan needs more than it has."""


def key(name: str) -> str:
    """Returns how the table spells a name: "H200" means "NVIDIA H200"."""
    words = name.lower().split()
    return " ".join(word for word in words if word not in ("nvidia", "geforce"))


@lru_cache(maxsize=1)
def gpus() -> dict[str, CudaDevice]:
    """Returns the known devices by `key`, under every name that they have."""
    import json
    from importlib.resources import files

    text = files("mlx_marlin").joinpath("data/gpus.json").read_text("utf-8")
    table: dict[str, CudaDevice] = {}
    for row in json.loads(text)["gpus"]:
        apart = ("sources", "aliases")
        figures = {field: row[field] for field in row if field not in apart}
        gpu = CudaDevice(variant=row["name"], **figures)
        table |= dict.fromkeys(map(key, (gpu.name, *row.get("aliases", ()))), gpu)
    return table
