"""Whether mlx-lm's own methods are what a decoder block runs.

Traced graphs stand for the code that MLX and mlx-lm define. Where somebody replaced a
method, or a function that it calls, the block's own code has to run.
"""

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

PACKAGES = ("mlx", "mlx_lm", "mlx_marlin")
"""Packages whose classes traced graphs stand for."""

Lookups = tuple[tuple[Any, ...], tuple[str, ...]]
"""Classes and modules, and the names of functions in them."""


def lookups(classes: Iterable[type]) -> Lookups:
    """Returns where calls of some classes' instances find their code.

    That is the method of each class and, in mlx-lm's modules, the functions that it
    refers to.
    """
    found: dict[tuple[Any, str], None] = {}
    for cls in classes:
        found[cls, "__call__"] = None
        for lookup in _functions_of(cls):
            found[lookup] = None
    return tuple(holder for holder, _ in found), tuple(name for _, name in found)


def are_original(found: Lookups) -> bool:
    """Returns whether all of these functions are those that their modules define."""
    return all(
        _is_own_method(holder) if isinstance(holder, type) else _is_own(holder, name)
        for holder, name in zip(*found, strict=True)
    )


def _functions_of(cls: Any) -> Iterator[tuple[ModuleType, str]]:
    """Yields the functions that mlx-lm's code of a class's call may refer to."""
    call = cls.__call__
    module = sys.modules.get(getattr(call, "__module__", ""))
    if module is None or type(call) is not FunctionType or not _is_of(module, "mlx_lm"):
        return
    for name in call.__code__.co_names:
        value = vars(module).get(name)
        if callable(value) and not isinstance(value, type):
            yield module, name


def _is_own_method(cls: Any) -> bool:
    """Returns whether a class's call is the one in the class's definition."""
    owner = next(each for each in cls.__mro__ if "__call__" in vars(each))
    module = sys.modules.get(owner.__module__)
    if not any(_is_of(module, package) for package in PACKAGES):
        return False
    return _is_defined_in(module, cls.__call__, f"{owner.__qualname__}.__call__")


def _is_own(module: ModuleType, name: str) -> bool:
    """Returns whether what a module has under a name was defined under this name."""
    value = getattr(module, name, None)
    home = sys.modules.get(getattr(value, "__module__", ""))
    if not any(_is_of(home, package) for package in PACKAGES):
        return False
    if type(value) is FunctionType:
        return _is_defined_in(home, value, name)
    # A function that MLX compiles says no more than its name.
    return getattr(value, "__name__", None) == name and vars(home).get(name) is value


def _is_defined_in(module: ModuleType | None, function: Any, name: str) -> bool:
    """Returns whether a module's own code defines a function, under this name.

    What wraps a function may pass for it, but for its globals and its code.
    """
    if module is None or type(function) is not FunctionType:
        return False
    is_here = function.__globals__ is vars(module)
    return is_here and function.__code__.co_qualname == name


def _is_of(module: ModuleType | None, package: str) -> bool:
    return module is not None and module.__name__.partition(".")[0] == package
