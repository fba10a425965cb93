"""CUDA devices: the properties that planning uses, and the table of known devices.

`detection` queries the machine.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from mlx_marlin.planning.device import UnknownDeviceError

ARCHITECTURE = re.compile(r"sm_\d{2,}")
"""MLX's notation of a compute capability: "sm_90" is 9.0."""
MOST_MULTIPROCESSORS = 1024
"""Upper bound of a plausible number of multiprocessors."""


CAPABILITY = (8, 0)
"""Lowest compute capability with these products for bfloat16 (NVIDIA, PTX ISA,
mma.m16n8k16)."""
CACHE_BYTES = 128 * 2**20
"""No second-level cache of an NVIDIA GPU is larger: a B200 has 126 MB, an H100 or H200
50 MB (NVIDIA's architecture papers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """An NVIDIA GPU."""

    backend: ClassVar[str] = "cuda"
    name: str  # Name in CUDA, such as "NVIDIA H200"
    variant: str  # The name with what distinguishes devices of the same name
    multiprocessors: int  # Number of streaming multiprocessors
    bandwidth_gbs: float  # Stated or measured memory bandwidth in 10^9 bytes per second
    # float16 operations of the tensor cores with float32 accumulation, without
    # sparsity, in 10^12 per second
    tflops: float
    shared_bytes: int  # Largest shared memory of a block in bytes
    arch: str  # Compute capability, such as "sm_90"

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
        """Number of multiprocessors, to which plans are distributed."""
        return self.multiprocessors

    @property
    def stock_tflops(self) -> float:
        """As `tflops`: stock MLX uses the tensor cores too."""
        return self.tflops

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        digits = self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    @property
    def figures(self) -> str:
        """The main figures of the device as text."""
        return (
            f"{self.multiprocessors} multiprocessors, {self.bandwidth_gbs:g} GB/s, "
            f"{self.tflops:g} TFLOP/s, {self.shared_bytes // 1024} KiB shared"
        )

    @staticmethod
    def named(name: str, multiprocessors: int | None = None) -> "CudaDevice":
        """Returns a device of the table."""
        known = gpus().get(key(name))
        if known is None:
            names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus().values()))
            # Only this back end can know a name with the maker's.
            is_own = name.lower().startswith("nvidia")
            error = ValueError if is_own else UnknownDeviceError
            raise error(f"device {name!r} is not one of: {names}")
        if multiprocessors in (None, known.multiprocessors):
            return known
        return known.with_cores(multiprocessors or 0)

    @property
    def unsupported(self) -> str | None:
        """Why none of our kernels runs on the device, or None."""
        if self.capability >= CAPABILITY:
            return None
        needed = ".".join(map(str, CAPABILITY))
        return (
            f"our CUDA kernels need compute capability {needed}, {self.name} has less"
        )

    @property
    def cache_bytes(self) -> int:
        """A number of bytes of weights that no cache can hold."""
        return CACHE_BYTES

    def with_cores(self, cores: int) -> "CudaDevice":
        """Returns the same device with another number of multiprocessors."""
        variant = f"{self.name} with {cores} multiprocessors"
        return replace(self, multiprocessors=cores, variant=variant)

    def in_mlx(self) -> "CudaDevice":
        """Returns the device itself: no variable of MLX changes it."""
        return self


DEFAULT = CudaDevice(
    name="unknown CUDA device",
    variant="unknown CUDA device, planned as a small one",
    multiprocessors=40,
    bandwidth_gbs=300,
    tflops=60,
    shared_bytes=99 * 1024,
    arch="sm_80",
)
"""Device to plan for on unknown hardware: a small one, so that plans fit."""


def key(name: str) -> str:
    """Returns the key of a name in the table; "H200" means "NVIDIA H200"."""
    words = name.lower().split()
    return " ".join(word for word in words if word not in ("nvidia", "geforce"))


@lru_cache(maxsize=1)
def gpus() -> dict[str, CudaDevice]:
    """Returns the known devices by `key` of all their names."""
    import json
    from importlib.resources import files

    text = files("mlx_marlin").joinpath("data/gpus.json").read_text("utf-8")
    table: dict[str, CudaDevice] = {}
    for row in json.loads(text)["gpus"]:
        excluded = ("sources", "aliases")
        figures = {field: row[field] for field in row if field not in excluded}
        gpu = CudaDevice(variant=row["name"], **figures)
        table |= dict.fromkeys(map(key, (gpu.name, *row.get("aliases", ()))), gpu)
    return table
