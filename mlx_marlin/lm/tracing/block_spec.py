"""Values that describe a traced decoder block without its arrays.

Blocks with equal specs share their compiled graphs. The arrays of a block are inputs of
these graphs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs

from mlx_marlin.lm.tracing.model_families import Merge
from mlx_marlin.lm.tracing.snapshot import STATE, children_of

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
