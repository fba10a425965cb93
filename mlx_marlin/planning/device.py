"""A GPU, as far as planning knows it without its back end."""

from collections.abc import Hashable
from typing import Protocol


class PlanningDevice(Hashable, Protocol):
    """What every device has; a back end's own type has what its cost model needs."""

    @property
    def name(self) -> str:
        """The name that the system has for it."""
        ...

    @property
    def variant(self) -> str:
        """The name with what distinguishes it from others of that name."""
        ...

    @property
    def arch(self) -> str:
        """The architecture that MLX sees."""
        ...

    @property
    def cores(self) -> int:
        """GPU cores, or multiprocessors."""
        ...

    @property
    def figures(self) -> str:
        """What distinguishes it, in a few words."""
        ...
