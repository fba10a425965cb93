"""What a traced decoder block is without its arrays, and whether it has changed.

Blocks with equal specs share their compiled graphs. The arrays of a block are inputs of
these graphs. Modules may be replaced, their settings changed, and methods of their
classes patched: a graph is valid only while its block equals the snapshot that was
taken when it was chosen, and while its methods are those that MLX and mlx-lm define.
Each block is compared at each call, which takes about 2 us on the host.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs

from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.lm.tracing.model_families import Merge

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


Shape = tuple[int, ...]
Graph = Callable[..., Any]
"""Computes results from the arrays of a call, followed by those of the modules."""
Graphs = tuple[Graph, Graph]
"""The graph before attention, and the graph after it."""
Slots = tuple[tuple[Any, ...], tuple[str, ...]]
"""Modules, and the name of an array in each of them."""
Structure = tuple[type[nn.Module], dict[str, nn.Module]]
"""The class and the children that a module has in a graph."""

SCALARS = (bool, float, int, str, type(None))
"""Types of settings that a graph may depend on."""


class NotTraceableError(Exception):
    """A block differs from what mlx-lm's own code makes. The message says how."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a model, which some modules keep as a setting."""

    text: str  # Their names and values
    value: BaseModelArgs = field(compare=False)  # A copy of them


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module without its arrays."""

    cls: type[nn.Module]  # Class of the module
    settings: tuple[tuple[str, object], ...]  # Its attributes except arrays and modules
    names: tuple[str, ...]  # Names of its arrays
    children: "ModuleSpecs" = ()  # Specs of the modules in it, by name

    def build(self, arrays: Iterator[mx.array]) -> Any:
        """Returns a module of this spec that holds the next arrays of an iterator."""
        module: Any = self.cls.__new__(self.cls)
        nn.Module.__init__(module)
        for key, value in self.settings:
            own = value.value if isinstance(value, Arguments) else value
            vars(module)[key] = own
        for name in self.names:
            module[name] = next(arrays)
        for name, child in self.children:
            module[name] = child.build(arrays)
        return module


ModuleSpecs = tuple[tuple[str, ModuleSpec], ...]
"""Specs of several modules, by name."""


@dataclass(frozen=True)
class BlockSpec:
    """What decoder blocks that share graphs have in common."""

    heads: int  # Number of query heads
    kv_heads: int  # Number of KV heads
    before: ModuleSpecs  # Modules of the graph before attention
    after: ModuleSpecs  # Modules of the graph after attention
    qkv: Shape  # Features of q, k and v if one joined layer computes them, else empty
    # How results are added to the residual. None for a plain sum
    add: Merge | None = None
    gating: Merge | None = None  # Combines gate and up. None for swiglu
    # Whether the result of attention is multiplied by the sigmoid of a gate, which the
    # query projection computes beside each head
    output_gate: bool = False
    fuse: frozenset[str] = frozenset()  # The fusions that are on
    # Both graphs, by the shapes of a call
    graphs: dict[object, Graphs] = field(
        default_factory=dict, compare=False, repr=False
    )
    # How often Python has run the code of a graph: once for each trace, and once for
    # each call that MLX transforms or does not compile
    runs: Counter[str] = field(default_factory=Counter, compare=False, repr=False)


def build(specs: ModuleSpecs, arrays: Iterable[mx.array]) -> dict[str, Any]:
    """Returns modules of these specs that hold the arrays, by name."""
    remaining = iter(arrays)
    return {name: spec.build(remaining) for name, spec in specs}


def specs_of(
    modules: dict[str, nn.Module], structure: Callable[[nn.Module], Structure]
) -> tuple[ModuleSpecs, Slots]:
    """Returns the specs of modules, and where `build` finds their arrays."""
    specs: list[tuple[str, ModuleSpec]] = []
    owners: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    for name, module in modules.items():
        own = tuple(key for key, entry in module.items() if isinstance(entry, mx.array))
        settings = _settings(module, len(own))
        cls, children = structure(module)
        inner, (inner_owners, inner_names) = specs_of(children, structure)
        specs.append((name, ModuleSpec(cls, settings, own, inner)))
        owners += (*(module for _ in own), *inner_owners)
        names += (*own, *inner_names)
    return tuple(specs), (owners, names)


def _settings(module: nn.Module, arrays: int) -> tuple[tuple[str, object], ...]:
    """Returns a module's settings."""
    settings = {key: _setting(vars(module)[key]) for key in vars(module).keys() - STATE}
    if any(type(value) not in (*SCALARS, Arguments) for value in settings.values()):
        raise NotTraceableError(f"a setting of its {type(module).__name__} may change")
    if len(module) != arrays + len(children_of(module)):
        raise NotTraceableError(f"its {type(module).__name__} has lists or others")
    return tuple(sorted(settings.items()))


def _setting(value: object) -> object:
    if not isinstance(value, BaseModelArgs):
        return value
    return Arguments(repr(vars(value)), copy(value))
