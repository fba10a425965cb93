"""Detects changes of a traced decoder block between calls.

Modules may be replaced, their settings changed, and methods of their classes patched.
The graphs of a block are valid only while it equals the snapshot that was taken when
they were chosen, and while its methods are those that MLX and mlx-lm define. Each block
is compared at each call, which takes about 2 us on the host.
"""

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

    Attributes:
        parts: Names and modules of the block's children.
        tree: All descendants of these children.
        modules: The modules of `parts` and `tree`.
        types: Classes of `modules`.
        with_arrays: The modules that have arrays.
        lengths: Number of entries of `with_arrays`; an added bias changes it.
        attributes: Attribute dictionaries of the modules that have settings, and of
            the model's arguments if they are one.
        settings: Copies of these dictionaries.
        own_of: Returns the block's own settings from its attribute dictionary.
        own: The block's own settings.
        lookups: Where calls of the block find their code.
        functions: The functions found there.
    """

    parts: tuple[tuple[str, nn.Module], ...]
    tree: tuple[Child, ...]
    modules: tuple[nn.Module, ...]
    types: list[type]
    with_arrays: tuple[nn.Module, ...]
    lengths: list[int]
    attributes: list[dict[str, Any]]
    settings: list[dict[str, Any]]
    own_of: Callable[[dict[str, Any]], Any]
    own: Any
    lookups: Lookups
    functions: list[Any]


def take_snapshot(block: nn.Module, cls: type[nn.Module], ignored: str) -> Snapshot:
    """Returns a snapshot of a block.

    Args:
        block: The block.
        cls: The block's class in mlx-lm.
        ignored: An attribute of the block that is not a setting.
    """
    parts = (*children_of(block).items(),)
    tree = tuple(entry for _, child in parts for entry in _tree(child))
    modules = *(child for _, child in parts), *(inner for *_, inner in tree)
    types = [*map(type, modules)]
    with_arrays = tuple(module for module in modules if _has_arrays(module))
    attributes = [vars(module) for module in modules if _has_settings(module)]
    attributes += _arguments(attributes)
    own_of = itemgetter(*(vars(block).keys() - {ignored, "_no_grad"}))
    lookups = lookups_of((cls, *types))
    return Snapshot(
        parts=parts,
        tree=tree,
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
        for name, child in snapshot.parts:
            if block[name] is not child:
                return False
        for parent, name, child in snapshot.tree:
            if parent[name] is not child:
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
    """Returns whether none of these functions has been patched."""
    return all(
        _is_own_method(holder) if isinstance(holder, type) else _is_own(holder, name)
        for holder, name in zip(*lookups, strict=True)
    )


def _functions_of(cls: Any) -> Iterator[tuple[ModuleType, str]]:
    """Yields the functions of mlx-lm that a class's `__call__` may refer to."""
    call = cls.__call__
    module = sys.modules.get(getattr(call, "__module__", ""))
    if module is None or type(call) is not FunctionType or not _is_of(module, "mlx_lm"):
        return
    for name in call.__code__.co_names:
        value = vars(module).get(name)
        if callable(value) and not isinstance(value, type):
            yield module, name


def _is_own_method(cls: Any) -> bool:
    """Returns whether a class's `__call__` is the one that its definition has."""
    owner = next(base for base in cls.__mro__ if "__call__" in vars(base))
    module = sys.modules.get(owner.__module__)
    if not any(_is_of(module, package) for package in PACKAGES):
        return False
    names = f"{owner.__qualname__}.__call__", ACTIVATION
    return any(_is_defined_in(module, cls.__call__, name) for name in names)


def _is_own(module: ModuleType, name: str) -> bool:
    """Returns whether a module's attribute was defined under this name."""
    value = getattr(module, name, None)
    home = sys.modules.get(getattr(value, "__module__", ""))
    if not any(_is_of(home, package) for package in PACKAGES):
        return False
    if type(value) is FunctionType:
        return _is_defined_in(home, value, name)
    # Of a function that `mx.compile` returned, only the name can be compared.
    return getattr(value, "__name__", None) == name and vars(home).get(name) is value


def _is_defined_in(module: ModuleType | None, function: Any, name: str) -> bool:
    """Returns whether a module's own code defines a function under this name.

    A wrapper may copy all attributes of a function except its globals and its code.
    """
    if module is None or type(function) is not FunctionType:
        return False
    is_here = function.__globals__ is vars(module)
    return is_here and function.__code__.co_qualname == name


def _is_of(module: ModuleType | None, package: str) -> bool:
    return module is not None and module.__name__.partition(".")[0] == package
