"""The chip that a plan is made for: cores, bandwidth and clock, from a table of chips.

Only `current` looks at the machine; everything else is data. Modules that only the
look-ups need are imported inside them: they cost a third of this package's import.
"""

import os
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache

ENVIRONMENT = "MLX_MARLIN_DEVICE"
"""Names the device to plan for: "Apple M3 Max", or with a core count after a colon."""


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
    """

    name: str
    variant: str
    generation: str
    tier: str
    cores: int
    bandwidth_gbs: float
    clock_ghz: float

    def __post_init__(self) -> None:
        if self.cores < 1 or self.bandwidth_gbs <= 0 or self.clock_ghz <= 0:
            raise ValueError(
                f"a device needs cores, bandwidth and clock above 0, got {self}"
            )

    @property
    def has_tensor_units(self) -> bool:
        """Whether the cores have matrix units that our kernels do not use (M5 on)."""
        number = self.generation.removeprefix("M")
        return number.isdecimal() and int(number) >= 5

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
            known = ", ".join(variants[-1].name for variants in chips().values())
            raise ValueError(f"device {name!r} is not one of: {known}")
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
    import json
    from importlib.resources import files

    text = files("mlx_marlin").joinpath("data/chips.json").read_text("utf-8")
    table: dict[str, tuple[Device, ...]] = {}
    for row in json.loads(text)["chips"]:
        if row["gpu_cores"] is None:  # announced, but its figures are not published
            continue
        device = Device(
            name=row["name"],
            variant=row["variant"],
            generation=row["generation"],
            tier=row["tier"],
            cores=row["gpu_cores"],
            bandwidth_gbs=row["bandwidth_gbs"],
            clock_ghz=row["gpu_clock_ghz"],
        )
        key = _key(device.name)
        same_name = (*table.get(key, ()), device)
        table[key] = tuple(sorted(same_name, key=lambda each: each.cores))
    return table


@lru_cache(maxsize=1)
def current() -> Device:
    """Returns the device to plan for.

    The environment variable MLX_MARLIN_DEVICE decides if set; else the Apple GPU that
    MLX reports, with its real core count; else `DEFAULT`.
    """
    wish = os.environ.get(ENVIRONMENT)
    if wish:
        return _parse(wish)
    name = _metal_name()
    if name is None:
        return DEFAULT
    if _key(name) in chips():
        return Device.named(name, _core_count())
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


def _parse(wish: str) -> Device:
    """Returns the device that "Apple M3 Max" or "Apple M3 Max:30" names."""
    name, colon, cores = wish.partition(":")
    if colon and not cores.strip().isdecimal():
        raise ValueError(
            f"{ENVIRONMENT}={wish!r}: expected a core count after the colon, as in "
            "'Apple M3 Max:30'"
        )
    return Device.named(name, int(cores) if colon else None)


def _metal_name() -> str | None:
    """Returns the name of the Metal device, or None where MLX has none."""
    if sys.platform != "darwin":
        return None
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    return str(mx.device_info(mx.gpu)["device_name"])


def _core_count() -> int | None:
    """Returns the GPU cores that the I/O registry states; None if it does not say."""
    import subprocess

    command = ["ioreg", "-rc", "AGXAccelerator", "-d1"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        return None  # the table's largest variant stands in
    found = re.search(r'"gpu-core-count"\s*=\s*(\d+)', answer.stdout)
    return int(found[1]) if found else None
