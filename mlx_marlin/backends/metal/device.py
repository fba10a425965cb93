"""The Apple GPU that a plan is made for: cores, bandwidth and clock, from a table.

Everything here is data; `detection` looks at the machine. Modules that only the
look-ups need are imported inside them: they cost a third of this package's import.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

SIZE_LETTERS = {"base": "g", "pro": "s", "max": "s", "ultra": "d"}
"""How an architecture's last letter tells a chip's tier; Pro and Max share one."""
MOST_CORES = 1024
"""No GPU has more; a larger number is not a core count."""
FIRST_GENERATION = 13
"""The number that Apple gives the M1 in an architecture: applegpu_g13g."""
ARCHITECTURE = re.compile(r".*\d\d[a-z]")
"""What MLX reads from one: two digits and a letter at its end."""


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
        variants = chips().get(key(name))
        if variants is None:
            raise ValueError(_unknown(name))
        if cores is None:
            return variants[-1]
        for device in variants:
            if device.cores == cores:
                return device
        variant = f"{variants[-1].name} with {cores} GPU cores"
        return replace(variants[-1], cores=cores, variant=variant)


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
        name = key(device.name)
        same_name = (*table.get(name, ()), device)
        table[name] = tuple(sorted(same_name, key=lambda each: each.cores))
    return table


def key(name: str) -> str:
    """Returns how the table spells a name: "M3 Max" means "Apple M3 Max"."""
    words = name.lower().replace("(virtual)", "").removesuffix(" gpu").split()
    return " ".join(words if words[:1] == ["apple"] else ["apple", *words])


def _unknown(name: str) -> str:
    """Says that the table does not have a chip, what it has, and what is near."""
    from difflib import get_close_matches

    names = [variants[-1].name for variants in chips().values()]
    short = {each.lower().removeprefix("apple "): each for each in names}
    near = get_close_matches(key(name).removeprefix("apple "), short)
    text = f"device {name!r} is not one of: {', '.join(names)}"
    return (
        f"{text}; near it: {', '.join(map(short.__getitem__, near))}" if near else text
    )


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
