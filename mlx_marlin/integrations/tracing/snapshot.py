"""What a decoder block consists of, compared at every call.

Modules may be replaced, their settings changed, and methods of their classes patched.
Every block of every token pays for the comparison: about 2 us on the host.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.integrations.tracing.methods import Lookups, lookups
from mlx_marlin.layers.joined import MarlinPart

STATE = {"_no_grad", "_training"}
"""Attributes of every module that change no result of a block."""
Owned = tuple[nn.Module, str, nn.Module]
"""A module, a name in it, and the module under this name."""


@dataclass(slots=True)
class Snapshot:
    """A block's modules, settings and methods at some time.

    The block itself is not in it: a reference cycle would keep a model's arrays until
    Python's garbage collector runs.

    Attributes:
        parts: The name of each module in the block, and the module.
        tree: All modules in these, at any depth.
        types: The class of each of all these modules.
        with_arrays: Modules with arrays.
        lengths: The number of entries of each of these; one more may be a bias.
        attributes: The attribute dictionaries of modules with settings.
        settings: Copies of these dictionaries.
        own_of: Returns a block's own settings from its attribute dictionary.
        own: These settings.
        lookups: Where the code of their calls is found.
        functions: What is found there.
    """

    parts: tuple[tuple[str, nn.Module], ...]
    tree: tuple[Owned, ...]
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


def take_snapshot(block: nn.Module, cls: type[nn.Module], left: str) -> Snapshot:
    """Returns what a block consists of now.

    Args:
        block: The block.
        cls: mlx-lm's class of it.
        left: An attribute of the block that is no setting.
    """
    parts = (*children_of(block).items(),)
    tree = tuple(entry for _, child in parts for entry in _tree(child))
    modules = *(child for _, child in parts), *(inner for *_, inner in tree)
    types = [*map(type, modules)]
    with_arrays = tuple(each for each in modules if _has_arrays(each))
    attributes = [vars(each) for each in modules if _has_settings(each)]
    own_of = itemgetter(*(vars(block).keys() - {left, "_no_grad"}))
    found = lookups((cls, *types))
    return Snapshot(
        parts=parts,
        tree=tree,
        modules=modules,
        types=types,
        with_arrays=with_arrays,
        lengths=[*map(len, with_arrays)],
        attributes=attributes,
        settings=[dict(each) for each in attributes],
        own_of=own_of,
        own=own_of(vars(block)),
        lookups=found,
        functions=[*map(getattr, *found)],
    )


def is_unchanged(block: nn.Module, seen: Snapshot) -> bool:
    """Returns whether a block is still what it was when a snapshot was taken."""
    try:
        for name, child in seen.parts:
            if block[name] is not child:
                return False
        for owner, name, child in seen.tree:
            if owner[name] is not child:
                return False
        # Lists are compared in C, and what is identical is equal.
        return (
            [*map(type, seen.modules)] == seen.types
            and [*map(len, seen.with_arrays)] == seen.lengths
            and seen.attributes == seen.settings
            and seen.own_of(vars(block)) == seen.own
            and [*map(getattr, *seen.lookups)] == seen.functions
        )
    except Exception:  # something is gone, or cannot be compared
        return False


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules in a module, by their names."""
    return {name: each for name, each in module.items() if isinstance(each, nn.Module)}


def _tree(module: nn.Module) -> Iterator[Owned]:
    """Yields all modules in a module, at any depth."""
    for name, child in children_of(module).items():
        yield module, name, child
        yield from _tree(child)


def _has_arrays(module: nn.Module) -> bool:
    return any(isinstance(each, mx.array) for each in module.values())


def _has_settings(module: nn.Module) -> bool:
    # A part's attributes are its place in a joined layer, which is compared itself.
    return type(module) is not MarlinPart and bool(vars(module).keys() - STATE)
