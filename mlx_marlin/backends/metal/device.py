"""Apple GPUs: cores, bandwidth and clock, from the chip table.

`detection` queries the machine. Modules that only look-ups need are imported inside
functions, because they would take a third of this package's import time.
"""

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from mlx_marlin.planning.device import PARAVIRTUAL, UnknownDeviceError

SIZE_LETTERS = {"base": "g", "pro": "s", "max": "s", "ultra": "d"}
"""Last letter of an architecture's name, by tier; Pro and Max share one."""
MOST_CORES = 1024
"""Upper bound of a plausible core count."""
FIRST_GENERATION = 13
"""Number of the M1's generation in architecture names: applegpu_g13g."""
ALU_FLOPS = 256
"""Operations of a core per clock without tensor units, in float16 and in float32: 128
fused multiply-adds."""
ARCHITECTURE = re.compile(r".*\d\d[a-z]|air64_v\d+")
"""Architecture names. A paravirtual device states the version of its intermediate
language instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """Resources of one GPU core."""

    register_bytes: int  # Bytes of registers of all threads
    # Bytes of threadgroup memory of all threadgroups, of which one threadgroup may have
    # 32 KiB
    threadgroup_bytes: int
    max_threads: int  # Largest number of resident threads
    # float16 operations per clock of the tensor units, or 0
    tensor_flops_per_clock: int
    thread_registers: int  # Most 32-bit registers of a thread, by Apple's compiler
    has_bfloats: bool  # Whether it computes with bfloats; M1 and M2 convert them
    # False if the first three figures are those of an M2. From M3 on, registers,
    # threadgroup memory and caches share one pool, whose size Apple does not publish
    is_known: bool


ARCHITECTURE_ENVIRONMENT = "MLX_METAL_GPU_ARCH"
"""MLX's variable: the GPU architecture that it chooses its kernels for."""
CACHE_BYTES = 64 * 2**20
"""Assumed size of a chip's last cache, which Apple does not state. An Ultra has two
chips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The properties of an Apple GPU that planning uses."""

    backend: ClassVar[str] = "metal"
    name: str  # Name in Metal, such as "Apple M3 Max"
    variant: str  # The name with what distinguishes chips of the same name
    generation: str  # "M1" to "M5", or "unknown"
    tier: str  # "base", "pro", "max", "ultra", or "unknown"
    cores: int  # Number of GPU cores
    bandwidth_gbs: float  # Stated memory bandwidth in 10^9 bytes per second
    clock_ghz: float  # GPU clock in GHz
    # Architecture by which MLX chooses kernels, such as "applegpu_g15s"; empty if only
    # generation and tier are known. That of a paravirtual device ("air64_v27") does not
    # tell the generation
    arch: str = ""
    # Whether macOS has Metal's tensor operations, as from 26.2 on
    has_tensor_system: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.cores <= MOST_CORES:
            raise ValueError(f"cores={self.cores}, expected 1 to {MOST_CORES}")
        if self.bandwidth_gbs <= 0 or self.clock_ghz <= 0:
            raise ValueError(
                f"bandwidth_gbs={self.bandwidth_gbs} and clock_ghz={self.clock_ghz} "
                f"must be above 0"
            )
        if self.arch and not ARCHITECTURE.fullmatch(self.arch):
            raise ValueError(
                f"arch={self.arch!r}: expected an architecture such as 'applegpu_g15s'"
            )

    @property
    def figures(self) -> str:
        """The main figures of the device as text."""
        return (
            f"{self.cores} cores, {self.bandwidth_gbs:g} GB/s, {self.clock_ghz:g} GHz"
        )

    @property
    def unsupported(self) -> None:
        """None: our kernels run on every Apple GPU."""

    @property
    def cache_bytes(self) -> int:
        """A number of bytes of weights that no cache can hold."""
        return CACHE_BYTES * (2 if self.tier == "ultra" else 1)

    def with_cores(self, cores: int) -> "Device":
        """Returns the same chip with another number of GPU cores."""
        variant = f"{self.name} with {cores} GPU cores"
        return replace(self, cores=cores, variant=variant)

    def in_mlx(self) -> "Device":
        """Returns the chip with the architecture that MLX_METAL_GPU_ARCH names, if
        any."""
        arch = os.environ.get(ARCHITECTURE_ENVIRONMENT)
        try:
            return replace(self, arch=arch) if arch else self
        except ValueError as error:
            raise ValueError(f"{ARCHITECTURE_ENVIRONMENT}: {error}") from None

    @property
    def arch_gen(self) -> int:
        """The generation in MLX's dispatch: 13 for M1 to 17 for M5.

        MLX reads the two characters before the last; one that is no digit counts as 0
        (its device.cpp), so "air64_v27" is 2.
        """
        if self.arch:
            return int("".join(c if c.isdigit() else "0" for c in self.arch[-3:-1]))
        number = self.generation.removeprefix("M")
        return FIRST_GENERATION + (int(number) - 1 if number.isdecimal() else 0)

    @property
    def size_letter(self) -> str:
        """The size in MLX's dispatch: "p" for phones, "g", "s", or "d" for Ultra."""
        return self.arch[-1] if self.arch else SIZE_LETTERS.get(self.tier, "g")

    @property
    def has_tensor_units(self) -> bool:
        """Whether there are tensor operations, by MLX's rule: M5 and later, on 26.2.

        `gemm_tensor` and stock MLX use them. A phone has them one generation later.
        """
        first = 18 if self.size_letter == "p" else 17
        return self.has_tensor_system and self.arch_gen >= first

    @property
    def clocks(self) -> float:
        """Clocks of all cores in a second."""
        return self.cores * self.clock_ghz * 1e9

    @property
    def tflops(self) -> float:
        """Peak without tensor units, in 10^12 operations per second.

        Simdgroup matrices run on the ALUs, in float16 as fast as in float32.
        """
        return self.cores * ALU_FLOPS * self.clock_ghz / 1e3

    @property
    def stock_tflops(self) -> float:
        """Peak of the units that stock MLX uses for many rows, in 10^12 per second."""
        return self.cores * self.matrix_flops * self.clock_ghz / 1e3

    @property
    def matrix_flops(self) -> int:
        """Operations of a core per clock in the units that are best at matrices."""
        tensor = self.core.tensor_flops_per_clock if self.has_tensor_units else 0
        return max(tensor, ALU_FLOPS)

    @property
    def core(self) -> Core:
        """Resources of a core.

        An unknown generation has those of the newest known one if it has tensor units,
        else those of the oldest.
        """
        table = _cores()
        if self.generation in table:
            return table[self.generation]
        oldest, *_, newest = table.values()
        return newest if self.has_tensor_units else oldest

    @staticmethod
    def paravirtual() -> "Device":
        """Returns a virtual machine's GPU, planned as a small chip.

        It is one of the architecture that MLX_METAL_GPU_ARCH names, else an M1. Tensor
        operations give finite wrong values there (github.com/sonos/tract/issues/2548).
        """
        wish = os.environ.get(ARCHITECTURE_ENVIRONMENT, "")
        chip = (_of_architecture(wish) or chips()[key("M1")])[0]
        variant = f"{PARAVIRTUAL}, planned as {chip.variant}"
        return replace(chip, name=PARAVIRTUAL, variant=variant, has_tensor_system=False)

    @staticmethod
    def named(name: str, cores: int | None = None) -> "Device":
        """Returns a chip of the table."""
        variants = chips().get(key(name)) or _of_architecture(name)
        if not variants:
            raise UnknownDeviceError(_unknown(name))
        if cores is None:
            return variants[-1]
        for device in variants:
            if device.cores == cores:
                return device
        return variants[-1].with_cores(cores)


DEFAULT = Device(
    name="unknown",
    variant="unknown device, planned as 8 cores of the first generation",
    generation="unknown",
    tier="unknown",
    cores=8,
    bandwidth_gbs=68.3,
    clock_ghz=1.278,
)
"""Device to plan for on unknown hardware: the smallest common chip, so that no plan
exceeds the hardware. Plans have several threadgroups per core and keep more cores busy
too."""


@lru_cache(maxsize=1)
def chips() -> dict[str, tuple[Device, ...]]:
    """Returns the known chips by lower-case name, each from few to many cores.

    That is the order of the file.
    """
    table: dict[str, tuple[Device, ...]] = {}
    for row in _data()["chips"]:
        figures = {field: row[field] for field in row if field != "sources"}
        device = Device(variant=f"{row['name']} {row['cores']}-core GPU", **figures)
        name = key(device.name)
        table[name] = (*table.get(name, ()), device)
    return table


def key(name: str) -> str:
    """Returns the key of a name in the table; "M3 Max" means "Apple M3 Max"."""
    words = name.lower().replace("(virtual)", "").removesuffix(" gpu").split()
    return " ".join(words if words[:1] == ["apple"] else ["apple", *words])


def _of_architecture(name: str) -> tuple[Device, ...]:
    """Returns the chips of an architecture, from few to many cores."""
    wanted = name.strip().lower()
    found = [chip for same in chips().values() for chip in same if chip.arch == wanted]
    return tuple(sorted(found, key=lambda chip: chip.cores)) if wanted else ()


def _unknown(name: str) -> str:
    """Returns the error message for an unknown chip, with the known and close names."""
    from difflib import get_close_matches

    names = [variants[-1].name for variants in chips().values()]
    short = {name.lower().removeprefix("apple "): name for name in names}
    near = get_close_matches(key(name).removeprefix("apple "), short)
    text = f"device {name!r} is not one of: {', '.join(names)}"
    return (
        f"{text}; near it: {', '.join(map(short.__getitem__, near))}" if near else text
    )


@lru_cache(maxsize=1)
def _cores() -> dict[str, Core]:
    """Returns the resources of a core by generation, the oldest first."""
    table: dict[str, Core] = {}
    for row in _data()["core"]:
        names = ("generations", "sources")
        core = Core(**{field: row[field] for field in row if field not in names})
        table |= dict.fromkeys(row["generations"], core)
    return table


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    """Returns the content of the data file, which states the source of each figure."""
    import json
    from pathlib import Path

    file = Path(__file__).parents[2] / "data" / "chips.json"
    table: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return table
