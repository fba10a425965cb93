"""Records changes of a model's modules, so that they can be undone."""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, Self, TypeVar, cast
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

Position = tuple[Any, Any]
"""A module, dictionary or list, and a key of it."""
Positions = Sequence[Position]
"""All positions of one module, which may be shared."""
Rebuild = Callable[[list[Any]], Iterable[nn.Module]]
Function = TypeVar("Function", bound=Callable[..., Any])

_changing = threading.RLock()
"""Held while a model changes. There is one for all models: they may share layers."""


def one_at_a_time(change: Function) -> Function:
    """Returns a function that one thread at a time calls, of all that are so made."""

    @wraps(change)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _changing:
            return change(*args, **kwargs)

    return cast("Function", locked)


class Changes:
    """Changes of a model that can be undone after an error.

    Replaced modules are held by weak references, so that a large model needs memory for
    one additional layer only. `undo` puts back those that are still alive, and rebuilds
    the others from their replacements.

    New arrays are evaluated here: those of a stream that belongs to one thread cannot
    be evaluated in another.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Returns changes that an error inside the context undoes."""
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.undo()

    def replace(
        self,
        positions: Sequence[Positions],
        modules: Sequence[nn.Module],
        rebuild: Rebuild,
    ) -> None:
        """Replaces modules."""
        mx.eval([*modules])
        references = [ref(module_at(of_one)) for of_one in positions]

        def undo() -> None:
            replaced = [reference() for reference in references]
            alive = [module for module in replaced if module is not None]
            if len(alive) < len(replaced):
                alive = [*rebuild([module_at(of_one) for of_one in positions])]
                _put(positions, alive)
                mx.eval(alive)
            else:
                _put(positions, alive)

        self.record(undo)
        _put(positions, modules)

    def set_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Changes the class of a module."""
        before = type(module)

        def undo() -> None:
            module.__class__ = before

        self.record(undo)
        module.__class__ = cls

    def record(self, undo: Callable[[], None]) -> None:
        """Records a change by the function that undoes it."""
        self._undo.callback(undo)

    def undo(self) -> None:
        """Undoes all changes in reverse order, also after one that fails."""
        self._undo.close()


def module_at(positions: Positions) -> Any:
    """Returns the module at these positions."""
    container, key = positions[0]
    return container[key]


def _put(positions: Sequence[Positions], modules: Sequence[nn.Module]) -> None:
    for of_one, module in zip(positions, modules, strict=True):
        for container, key in of_one:
            container[key] = module
