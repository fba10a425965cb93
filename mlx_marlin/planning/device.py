"""The properties of a GPU that planning uses, whatever its back end."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol


class UnknownDeviceError(ValueError):
    """No device of a back end has a name; another back end may know it."""


class PlanningDevice(Hashable, Protocol):
    """Properties of all devices; a back end's type adds those of its cost model."""

    @property
    def backend(self) -> str:
        """The name of the back end that plans for it."""
        ...

    @property
    def name(self) -> str:
        """The name that the operating system reports."""
        ...

    @property
    def variant(self) -> str:
        """The name with what distinguishes devices of the same name."""
        ...

    @property
    def arch(self) -> str:
        """The architecture that MLX reports."""
        ...

    @property
    def cores(self) -> int:
        """Number of GPU cores or multiprocessors."""
        ...

    @property
    def bandwidth_gbs(self) -> float:
        """Stated memory bandwidth in 10^9 bytes per second."""
        ...

    @property
    def tflops(self) -> float:
        """Peak of the units that our kernels multiply with, in 10^12 per second."""
        ...

    @property
    def stock_tflops(self) -> float:
        """Peak of the fastest units that stock MLX multiplies with."""
        ...

    @property
    def figures(self) -> str:
        """The main figures of the device as text."""
        ...

    @property
    def unsupported(self) -> str | None:
        """Why none of our kernels runs on it, or None."""
        ...

    @property
    def cache_bytes(self) -> int:
        """A number of bytes of weights that no cache of it can hold."""
        ...

    def with_cores(self, cores: int) -> "PlanningDevice":
        """Returns the device with another number of cores."""
        ...

    def in_mlx(self) -> "PlanningDevice":
        """Returns the device as the environment variables of MLX change it.

        Raises:
            ValueError: If such a variable has no valid value.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How many threadgroups of a plan are resident on a core at a time.

    Attributes:
        simdgroups: Simdgroups of a threadgroup.
        max_simdgroups: Most simdgroups that a core can hold.
        threadgroups: Threadgroups of a core by what limits them: "registers" (left out
            if their number is not known), "threadgroup memory", "threads", and
            "launched threadgroups", those for each core.
        assumed: What of these figures is assumed rather than known, as text; empty if
            nothing is.
    """

    simdgroups: int
    max_simdgroups: int
    threadgroups: dict[str, int]
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
