"""Replacements of a model's modules that can be undone."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import mlx.nn as nn

Position = tuple[Any, Any]
"""A module, dictionary or list, and a key of it."""
Positions = Sequence[Position]
"""All positions of one module, which may be shared."""
Rebuild = Callable[[list[Any]], Sequence[nn.Module]]


class Changes:
    """What a function has changed in a model, so that a failure can undo all of it.

    Replaced modules are kept by weak references, so that a large model needs memory for
    one more layer only. Undoing puts them back where something else keeps them alive,
    and otherwise makes equal ones from what replaced them.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(
        self,
        positions: Sequence[Positions],
        modules: Sequence[nn.Module],
        rebuild: Rebuild,
    ) -> None:
        """Replaces modules.

        Args:
            positions: Those of each module that is replaced.
            modules: As many, which take their positions.
            rebuild: Makes the old modules from those that are then in their positions.
        """
        old = [ref(module_at(each)) for each in positions]

        def undo() -> None:
            before = [each() for each in old]
            alive = [each for each in before if each is not None]
            if len(alive) < len(before):
                alive = [*rebuild([module_at(each) for each in positions])]
            _put(positions, alive)

        self._undo.append(undo)
        _put(positions, modules)

    def set_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Gives a module another class."""
        before = type(module)

        def undo() -> None:
            module.__class__ = before

        self._undo.append(undo)
        module.__class__ = cls

    def undo(self) -> None:
        """Undoes every change, the last one first."""
        while self._undo:
            self._undo.pop()()


def module_at(positions: Positions) -> Any:
    """Returns the module that is in all of these positions."""
    container, key = positions[0]
    return container[key]


def _put(positions: Sequence[Positions], modules: Sequence[nn.Module]) -> None:
    for of_one, module in zip(positions, modules, strict=True):
        for container, key in of_one:
            container[key] = module
