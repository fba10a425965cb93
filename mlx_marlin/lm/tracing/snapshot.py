"""Detects changes of a traced decoder block between calls.

Modules may be replaced, their settings changed, and methods of their classes patched.
The graphs of a block are valid only while it equals the snapshot that was taken when
they were chosen, and while its methods are those that MLX and mlx-lm define. Each block
is compared at each call, which takes about 2 us on the host.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs

from mlx_marlin.layers.joined import MarlinPart

STATE = {"_no_grad", "_training"}
"""Module attributes that do not affect a block's result."""
ACTIVATION = "_make_activation_module.<locals>.decorator.<locals>.<lambda>"
"""The `__call__` that MLX gives modules such as `nn.Sigmoid` (0.32.4)."""
PACKAGES = ("mlx", "mlx_lm", "mlx_marlin")
"""Packages whose methods the graphs reproduce."""

Child = tuple[nn.Module, str, nn.Module]
"""A module, the name of a child, and the child."""
Lookups = tuple[tuple[Any, ...], tuple[str, ...]]
"""Classes and modules, and the name of a function in each of them."""


@dataclass(slots=True)
class Snapshot:
    """Modules, settings and methods of a block at one time.

    It does not refer to the block itself: a reference cycle would keep the arrays of a
    model until Python's garbage collector runs.
    """

    # All descendants of the block, whose own children have the parent None
    tree: tuple[tuple[Any, ...], ...]
    modules: tuple[nn.Module, ...]  # The modules of `tree`
    types: list[type]  # Classes of `modules`
    with_arrays: tuple[nn.Module, ...]  # The modules that have arrays
    lengths: list[int]  # Number of entries of `with_arrays`; an added bias changes it
    # Attribute dictionaries of the modules that have settings, and of the model's
    # arguments if they are one
    attributes: list[dict[str, Any]]
    settings: list[dict[str, Any]]  # Copies of these dictionaries
    # Returns the block's own settings from its attribute dictionary
    own_of: Callable[[dict[str, Any]], Any]
    own: Any  # The block's own settings
    lookups: Lookups  # Where calls of the block find their code
    functions: list[Any]  # The functions found there


def take_snapshot(block: nn.Module, cls: type[nn.Module], ignored: str) -> Snapshot:
    """Returns a snapshot of a block."""
    tree = (*_tree(block),)
    modules = tuple(child for *_, child in tree)
    types = [*map(type, modules)]
    with_arrays = tuple(module for module in modules if _has_arrays(module))
    attributes = [vars(module) for module in modules if _has_settings(module)]
    attributes += _arguments(attributes)
    own_of = itemgetter(*(vars(block).keys() - {ignored, "_no_grad"}))
    lookups = lookups_of((cls, *types))
    return Snapshot(
        tree=tuple((None if own is block else own, *each) for own, *each in tree),
        modules=modules,
        types=types,
        with_arrays=with_arrays,
        lengths=[*map(len, with_arrays)],
        attributes=attributes,
        settings=[dict(values) for values in attributes],
        own_of=own_of,
        own=own_of(vars(block)),
        lookups=lookups,
        functions=[*map(getattr, *lookups)],
    )


def is_unchanged(block: nn.Module, snapshot: Snapshot) -> bool:
    """Returns whether a block equals its snapshot."""
    try:
        for parent, name, child in snapshot.tree:
            if (block if parent is None else parent)[name] is not child:
                return False
        # Lists are compared in C, which tests identity before equality.
        return (
            [*map(type, snapshot.modules)] == snapshot.types
            and [*map(len, snapshot.with_arrays)] == snapshot.lengths
            and snapshot.attributes == snapshot.settings
            and snapshot.own_of(vars(block)) == snapshot.own
            and [*map(getattr, *snapshot.lookups)] == snapshot.functions
        )
    except Exception:  # an entry is missing, or cannot be compared
        return False


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules in a module, by name."""
    return {
        name: child for name, child in module.items() if isinstance(child, nn.Module)
    }


def _tree(module: nn.Module) -> Iterator[Child]:
    """Yields all descendants of a module."""
    for name, child in children_of(module).items():
        yield module, name, child
        yield from _tree(child)


def _has_arrays(module: nn.Module) -> bool:
    return any(isinstance(entry, mx.array) for entry in module.values())


def _arguments(attributes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the attributes of the arguments of a model among settings."""
    values = [value for settings in attributes for value in settings.values()]
    found = {id(value): value for value in values if isinstance(value, BaseModelArgs)}
    return [*map(vars, found.values())]


def _has_settings(module: nn.Module) -> bool:
    # The attributes of a part are its position in a joined layer, and the layer is
    # compared itself.
    return type(module) is not MarlinPart and bool(vars(module).keys() - STATE)


def lookups_of(classes: Iterable[type]) -> Lookups:
    """Returns where calls of instances of these classes find their code.

    That is `__call__` of each class and, for classes of mlx-lm, the module-level
    functions that it refers to.
    """
    found: dict[tuple[Any, str], None] = {}
    for cls in classes:
        found[cls, "__call__"] = None
        for lookup in _functions_of(cls):
            found[lookup] = None
    return tuple(holder for holder, _ in found), tuple(name for _, name in found)


def are_original(lookups: Lookups) -> bool:
    """Returns whether none of these functions has been replaced."""
    return all(map(_is_original, *lookups))


def _functions_of(cls: Any) -> Iterator[tuple[ModuleType, str]]:
    """Yields the functions of mlx-lm that a class's `__call__` may refer to."""
    call = cls.__call__
    home = _home_of(call)
    is_mlx_lms = home is not None and home.__name__.startswith("mlx_lm.")
    if type(call) is not FunctionType or home is None or not is_mlx_lms:
        return
    for name, value in inspect.getclosurevars(call).globals.items():
        if callable(value) and not isinstance(value, type):
            yield home, name


def _is_original(holder: Any, name: str) -> bool:
    """Returns whether what a class or a module has under a name was defined there.

    A wrapper may copy all names of a function, but not its globals. Of a function that
    `mx.compile` returned, only the name can be compared.
    """
    value: Any = getattr(holder, name, None)
    home, is_function = _home_of(value), type(value) is FunctionType
    if home is None or (is_function and value.__globals__ is not vars(home)):
        return False
    if not isinstance(holder, type):
        return value.__name__ == name and vars(home).get(name) is value
    owner = next(base for base in holder.__mro__ if name in vars(base))
    names = f"{owner.__qualname__}.{name}", ACTIVATION
    is_own = owner.__module__ == home.__name__ and is_function
    return is_own and value.__qualname__ in names


def _home_of(value: Any) -> ModuleType | None:
    """Returns the module of `PACKAGES` that says it defines a function, or None."""
    name = getattr(value, "__module__", None) or ""
    return sys.modules.get(name) if name.partition(".")[0] in PACKAGES else None
