"""The properties of a GPU that planning uses, whatever its back end."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

PARAVIRTUAL = "Apple Paravirtual device"
"""Metal's name of the GPU of a virtual machine, whose times say nothing."""


class UnknownDeviceError(ValueError):
    """No device of a back end has a name; another back end may know it."""


class PlanningDevice(Hashable, Protocol):
    """Properties of all devices; a back end's type adds those of its cost model."""

    @property
    def backend(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def variant(self) -> str: ...  # noqa: D102
    @property
    def arch(self) -> str: ...  # noqa: D102
    @property
    def cores(self) -> int: ...  # noqa: D102
    @property
    def bandwidth_gbs(self) -> float: ...  # noqa: D102
    @property
    def tflops(self) -> float: ...  # noqa: D102
    @property
    def stock_tflops(self) -> float: ...  # noqa: D102
    @property
    def figures(self) -> str: ...  # noqa: D102
    @property
    def unsupported(self) -> str | None: ...  # noqa: D102
    @property
    def cache_bytes(self) -> int: ...  # noqa: D102

    def with_cores(self, cores: int) -> "PlanningDevice":
        """Returns the device with another number of cores."""
        ...

    def in_mlx(self) -> "PlanningDevice":
        """Returns the device as the environment variables of MLX change it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How many threadgroups of a plan are resident on a core at a time."""

    simdgroups: int  # Simdgroups of a threadgroup
    max_simdgroups: int  # Most simdgroups that a core can hold
    # Threadgroups of a core by what limits them: "registers" (left out if their number
    # is not known), "threadgroup memory", "threads", and "launched threadgroups", those
    # for each core
    threadgroups: dict[str, int]
    # What of these figures is assumed rather than known, as text; empty if nothing is
    assumed: str = ""

    @property
    def limit(self) -> str:
        """What limits the resident threadgroups."""
        return min(self.threadgroups, key=self.threadgroups.__getitem__)

    @property
    def resident(self) -> int:
        """Resident simdgroups of a core; at least one threadgroup is."""
        return max(self.threadgroups[self.limit], 1) * self.simdgroups

    @property
    def occupancy(self) -> float:
        """Resident simdgroups over the most that a core can hold, 0 to 1."""
        return self.resident / self.max_simdgroups
