"""Finds modules and arrays in a model, and their positions."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.layers.joined import MarlinPart, separate, whole
from mlx_marlin.lm.module_changes import Position

ADAPTED = ("linear", "embedding")
"""Names under which mlx-lm's adapters hold the layer that they adapt."""
ADAPTER = "lora_a"
"""A parameter that all of mlx-lm's adapters have."""


def find_layers(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> list[list[Position]]:
    """Returns the positions of each wanted layer; a shared layer has several."""
    found: dict[int, list[Position]] = {}
    for container, key in _layer_positions(model):
        if wanted(container[key]):
            found.setdefault(id(container[key]), []).append((container, key))
    return [*found.values()]


def computing_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the distinct layers of a model, with joined layers as one."""
    layers = [whole(container[key]) for container, key in _layer_positions(model)]
    return [*{id(layer): layer for layer in layers}.values()]


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the distinct layers with their paths; joined layers as one."""
    tree = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    leaves = cast("list[tuple[str, nn.Module]]", tree)
    named: dict[int, tuple[list[str], nn.Module]] = {}
    for path, layer in leaves:
        paths, _ = named.setdefault(id(whole(layer)), ([], layer))
        paths.append(path)
    for paths, layer in named.values():
        is_joined = isinstance(layer, MarlinPart)
        yield (_joined_path(paths) if is_joined else paths[0]), layer


def has_tied_head(model: nn.Module) -> bool:
    """Returns whether an embedding is the output head: there is no lm_head."""
    return not any(name.endswith("lm_head") for name, _ in model.named_modules())


def natural_key(path: str) -> list[tuple[int, str]]:
    """Returns a key that sorts layer 10 after layer 9."""
    parts = path.split(".")
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def pattern(path: str) -> str:
    """Returns a path with "*" in place of numbers between dots."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def common_path(paths: list[str]) -> str:
    """Returns the path of layers that differ in numbers only.

    Numbers that are the same in all of them are kept.
    """
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(_one(set(column)) for column in columns)


def containers(tree: Any) -> Iterator[Any]:
    """Yields the distinct modules, dictionaries and lists in a model.

    Searches where `nn.Module.children` does.
    """
    found: dict[int, Any] = {}
    pending = [tree]
    while pending:
        container = pending.pop()
        if isinstance(container, dict | list) and id(container) not in found:
            found[id(container)] = container
            pending.extend(child for _, child in entries(container))
    return iter(found.values())


def modules(tree: Any) -> Iterator[nn.Module]:
    """Yields the distinct modules in a model."""
    return (found for found in containers(tree) if isinstance(found, nn.Module))


def entries(container: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the keys and values of a module, dictionary or list."""
    is_list = isinstance(container, list)
    found: Iterable[tuple[Any, Any]] = (
        enumerate(container) if is_list else container.items()
    )
    return found


def named_arrays(
    tree: Any, dtype: mx.Dtype, path: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Any, str]]:
    """Yields the arrays of a dtype in a model: their container, key and path.

    Paths are those without adapters. An array of a shared module that is converted
    meanwhile is yielded once. The parts of a joined layer have copies of their rows.
    """
    for key, entry in [*entries(tree)]:
        inner = path if key in ADAPTED and ADAPTER in tree else (*path, str(key))
        if isinstance(entry, mx.array) and entry.dtype == dtype:
            yield tree, key, ".".join(inner)
        elif isinstance(entry, MarlinPart):
            layer = separate(entry.shared)[entry.index]
            yield from named_arrays(layer, dtype, inner)
        elif isinstance(entry, dict | list):
            yield from named_arrays(entry, dtype, inner)


def _layer_positions(tree: Any) -> Iterator[Position]:
    # Searches where `nn.Module.leaf_modules` does.
    for key, child in entries(tree):
        if isinstance(child, nn.Module) and not child.children():
            yield tree, key
        elif isinstance(child, dict | list):
            yield from _layer_positions(child)


def _joined_path(paths: list[str]) -> str:
    before, dot, _ = paths[0].rpartition(".")
    return before + dot + "+".join(path.rpartition(".")[2] for path in paths)


def _one(parts: set[str]) -> str:
    return "*" if len(parts) > 1 else next(iter(parts))
