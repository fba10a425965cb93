"""The properties of a GPU that planning uses, whatever its back end."""

from collections.abc import Hashable
from typing import Protocol


class PlanningDevice(Hashable, Protocol):
    """Properties of all devices; a back end's type adds those of its cost model."""

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
    def figures(self) -> str:
        """The main figures of the device as text."""
        ...
