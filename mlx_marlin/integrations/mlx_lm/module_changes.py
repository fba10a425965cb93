"""Records changes of a model's modules, so that they can be undone."""

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
    """Changes of a model that can be undone after an error.

    Replaced modules are held by weak references, so that a large model needs memory for
    one additional layer only. `undo` puts back those that are still alive, and rebuilds
    the others from their replacements.
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
            positions: The positions of each replaced module.
            modules: The replacements, as many as replaced modules.
            rebuild: Returns modules equal to the replaced ones, given their
                replacements.
        """
        references = [ref(module_at(of_one)) for of_one in positions]

        def undo() -> None:
            replaced = [reference() for reference in references]
            alive = [module for module in replaced if module is not None]
            if len(alive) < len(replaced):
                alive = [*rebuild([module_at(of_one) for of_one in positions])]
            _put(positions, alive)

        self._undo.append(undo)
        _put(positions, modules)

    def set_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Changes the class of a module."""
        before = type(module)

        def undo() -> None:
            module.__class__ = before

        self._undo.append(undo)
        module.__class__ = cls

    def record(self, undo: Callable[[], None]) -> None:
        """Records a change by the function that undoes it."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undoes all changes in reverse order."""
        while self._undo:
            self._undo.pop()()


def module_at(positions: Positions) -> Any:
    """Returns the module at these positions."""
    container, key = positions[0]
    return container[key]


def _put(positions: Sequence[Positions], modules: Sequence[nn.Module]) -> None:
    for of_one, module in zip(positions, modules, strict=True):
        for container, key in of_one:
            container[key] = module
