"""The chip that a plan is made for: cores, bandwidth and clock, from a table of chips.

Only `current` looks at the machine; everything else is data. Modules that only the
look-ups need are imported inside them: they cost a third of this package's import.
"""

import os
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mlx_marlin import cuda_device, detection
from mlx_marlin.cuda_device import CudaDevice

ENVIRONMENT = "MLX_MARLIN_DEVICE"
"""Names the device to plan for: "Apple M3 Max", "Apple M3 Max, 30 cores" or "NVIDIA
H200"."""
ARCHITECTURE_ENVIRONMENT = "MLX_METAL_GPU_ARCH"
"""MLX's own variable: the architecture that it chooses its kernels for."""

SIZE_LETTERS = {"base": "g", "pro": "s", "max": "s", "ultra": "d"}
"""How an architecture's last letter tells a chip's tier; Pro and Max share one."""
FIRST_GENERATION = 13
"""The number that Apple gives the M1 in an architecture: applegpu_g13g."""
ARCHITECTURE = re.compile(r".*\d\d[a-z]")
"""What MLX reads from one: two digits and a letter at its end."""
WISH = re.compile(r"(?P<name>[^:,]+?)([:,]\s*(?P<cores>\d+)(\s*cores?)?)?")
"""How the environment names a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What one GPU core holds.

    Attributes:
        register_bytes: Registers of all its threads.
        threadgroup_bytes: Threadgroup memory of all its threadgroups; one threadgroup
            may have 32 KiB of it.
        max_threads: Threads that it can hold, however few registers they need.
        tensor_flops_per_clock: float16 operations of its matrix units; 0 without.
        is_known: False where the first three figures are those of an M2 for want of
            others: from M3 on registers, threadgroup memory and caches share one pool
            whose size Apple does not state.
    """

    register_bytes: int
    threadgroup_bytes: int
    max_threads: int
    tensor_flops_per_clock: int
    is_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, as far as planning cares.

    Attributes:
        name: As Metal says it, such as "Apple M3 Max".
        variant: The name with what distinguishes chips of that name.
        generation: "M1" to "M5", or "unknown".
        tier: "base", "pro", "max", "ultra", or "unknown".
        cores: GPU cores.
        bandwidth_gbs: Memory bandwidth that the maker states, in 10^9 bytes a second.
        clock_ghz: GPU clock in 10^9 cycles a second.
        arch: The architecture that MLX chooses its kernels for, "applegpu_g15s"; empty
            where only generation and tier are known.
    """

    name: str
    variant: str
    generation: str
    tier: str
    cores: int
    bandwidth_gbs: float
    clock_ghz: float
    arch: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.cores <= detection.MOST_CORES:
            raise ValueError(
                f"cores={self.cores}, expected 1 to {detection.MOST_CORES}"
            )
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
        """What distinguishes it, in a few words."""
        return (
            f"{self.cores} cores, {self.bandwidth_gbs:g} GB/s, {self.clock_ghz:g} GHz"
        )

    @property
    def arch_gen(self) -> int:
        """The generation that MLX's dispatch sees: 13 for M1 to 17 for M5."""
        if self.arch:
            return int(self.arch[-3:-1])
        number = self.generation.removeprefix("M")
        return FIRST_GENERATION + (int(number) - 1 if number.isdecimal() else 0)

    @property
    def size_letter(self) -> str:
        """The size that MLX's dispatch sees: "p" phone, "g", "s", "d" for Ultra."""
        return self.arch[-1] if self.arch else SIZE_LETTERS.get(self.tier, "g")

    @property
    def has_tensor_units(self) -> bool:
        """Whether MLX uses matrix units that our kernels do not (M5 on)."""
        return self.arch_gen >= (18 if self.size_letter == "p" else 17)

    @property
    def core(self) -> Core:
        """What a core holds: as in the first generation where nothing is known."""
        table = _cores()
        if self.generation in table:
            return table[self.generation]
        oldest, *_, newest = table.values()
        return newest if self.has_tensor_units else oldest

    @staticmethod
    def named(name: str, cores: int | None = None) -> "Device":
        """Returns a chip of the table.

        Args:
            name: "Apple M3 Max" or "M3 Max". A name alone means its largest variant.
            cores: Picks the variant with so many GPU cores; when there is none, the
                largest variant with this core count instead of its own.

        Raises:
            ValueError: If the table does not have the chip.
        """
        variants = chips().get(_key(name))
        if variants is None:
            raise ValueError(_unknown(name))
        if cores is None:
            return variants[-1]
        for device in variants:
            if device.cores == cores:
                return device
        variant = f"{variants[-1].name} with {cores} GPU cores"
        return replace(variants[-1], cores=cores, variant=variant)


Target = Device | CudaDevice
"""What plans are made for."""

DEFAULT = Device(
    name="unknown",
    variant="unknown device, planned as 8 cores of the first generation",
    generation="unknown",
    tier="unknown",
    cores=8,
    bandwidth_gbs=68.3,
    clock_ghz=1.278,
)
"""For unknown hardware: the smallest common chip, so that no plan needs more than it
has; more cores than that are still kept busy by several threadgroups a core."""


@lru_cache(maxsize=1)
def chips() -> dict[str, tuple[Device, ...]]:
    """Returns the known chips by lower-case name, variants from small to large."""
    table: dict[str, tuple[Device, ...]] = {}
    for row in _data()["chips"]:
        figures = {field: row[field] for field in row if field != "sources"}
        device = Device(variant=f"{row['name']} {row['cores']}-core GPU", **figures)
        key = _key(device.name)
        same_name = (*table.get(key, ()), device)
        table[key] = tuple(sorted(same_name, key=lambda each: each.cores))
    return table


@lru_cache(maxsize=1)
def current() -> Target:
    """Returns the device to plan for.

    The environment variable MLX_MARLIN_DEVICE decides if set; else the Apple GPU that
    MLX or the system reports, with its real core count, or the CUDA device that MLX
    computes on; else `DEFAULT`. MLX_METAL_GPU_ARCH replaces the architecture of an
    Apple GPU, as it does in MLX.

    Raises:
        ValueError: If a variable does not name a device or an architecture.
    """
    wish = os.environ.get(ENVIRONMENT)
    device = _parse(wish) if wish else _here()
    arch = os.environ.get(ARCHITECTURE_ENVIRONMENT)
    if not arch or isinstance(device, CudaDevice):
        return device
    try:
        return replace(device, arch=arch)
    except ValueError as error:
        raise ValueError(f"{ARCHITECTURE_ENVIRONMENT}: {error}") from None


def named(name: str, cores: int | None = None) -> Target:
    """Returns a chip of Apple's or a GPU of NVIDIA's, out of the tables.

    Args:
        name: As for `Device.named` or `CudaDevice.named`.
        cores: GPU cores or multiprocessors.

    Raises:
        ValueError: If neither table has it.
    """
    if name.lower().startswith("nvidia") or cuda_device.key(name) in cuda_device.gpus():
        return CudaDevice.named(name, cores)
    return Device.named(name, cores)


def _here() -> Target:
    """Returns this machine's chip, or what to plan for in its place."""
    if sys.platform != "darwin":
        from mlx_marlin import cuda_detection

        return cuda_detection.here() or DEFAULT
    name, arch = _metal()
    if _key(name) not in chips():  # a virtual machine's GPU is called otherwise
        name = detection.chip_name() or name
    if _key(name) in chips():
        device = Device.named(name, detection.gpu_cores())
    else:
        device = _newer(name) if name else DEFAULT
    return replace(device, arch=arch) if ARCHITECTURE.fullmatch(arch) else device


def _newer(name: str) -> Device:
    """Returns the default with the name and generation of a chip not in the table."""
    generation = re.match(r"Apple (M\d+)\b", name)
    return replace(
        DEFAULT,
        name=name,
        variant=f"{name}, not in the table, planned as {DEFAULT.cores} cores",
        generation=generation[1] if generation else DEFAULT.generation,
    )


def _key(name: str) -> str:
    """Returns how the table spells a name: "M3 Max" means "Apple M3 Max"."""
    words = name.lower().replace("(virtual)", "").removesuffix(" gpu").split()
    return " ".join(words if words[:1] == ["apple"] else ["apple", *words])


def _unknown(name: str) -> str:
    """Says that the table does not have a chip, what it has, and what is near."""
    from difflib import get_close_matches

    names = [variants[-1].name for variants in chips().values()]
    short = {each.lower().removeprefix("apple "): each for each in names}
    near = get_close_matches(_key(name).removeprefix("apple "), short)
    text = f"device {name!r} is not one of: {', '.join(names)}"
    return (
        f"{text}; near it: {', '.join(map(short.__getitem__, near))}" if near else text
    )


def _parse(wish: str) -> Target:
    """Returns the device that "M3 Max", "M3 Max, 30 cores" or "M3 Max:30" names."""
    found = WISH.fullmatch(wish.strip())
    if found is None:
        raise ValueError(
            f"{ENVIRONMENT}={wish!r}: expected a chip, and its core count if need be, "
            "as in 'Apple M3 Max' or 'Apple M3 Max, 30 cores'"
        )
    cores = found["cores"]
    try:
        return named(found["name"], int(cores) if cores else None)
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}={wish!r}: {error}") from None


def _metal() -> tuple[str, str]:
    """Returns the Metal device's name and architecture, empty where MLX has none."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return "", ""
    info = mx.device_info(mx.gpu)
    return str(info.get("device_name", "")), str(info.get("architecture", ""))


@lru_cache(maxsize=1)
def _cores() -> dict[str, Core]:
    """Returns what a core holds, by generation, the oldest first."""
    table: dict[str, Core] = {}
    for row in _data()["core"]:
        names = ("generations", "sources")
        core = Core(**{field: row[field] for field in row if field not in names})
        table |= dict.fromkeys(row["generations"], core)
    return table


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    """Returns the data file: figures, each with its source beside it."""
    import json
    from importlib.resources import files

    text = files("mlx_marlin").joinpath("data/chips.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
