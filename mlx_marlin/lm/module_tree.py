"""Finds the modules of a model, and replaces them so that an error changes nothing."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, Self, TypeVar, cast
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.layers.joined import MarlinPart, separate, whole

Position = tuple[Any, Any]
"""A module, dictionary or list, and a key of it."""
Positions = Sequence[Position]
"""All positions of one module, which may be shared."""
Rebuild = Callable[[list[Any]], Iterable[nn.Module]]
Function = TypeVar("Function", bound=Callable[..., Any])

_changing = threading.RLock()
"""Held while a model changes. There is one for all models: they may share layers."""
ADAPTED = ("linear", "embedding")
"""Names under which mlx-lm's adapters hold the layer that they adapt."""
ADAPTER = "lora_a"
"""A parameter that all of mlx-lm's adapters have."""


def one_at_a_time(change: Function) -> Function:
    """Returns a function that one thread at a time calls, of all that are so made."""

    @wraps(change)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _changing:
            return change(*args, **kwargs)

    return cast("Function", locked)


def check_model(model: object) -> None:
    """Raises a TypeError if an argument is not an `nn.Module`."""
    if isinstance(model, nn.Module):
        return
    hint = ": mlx_lm.load returns the model and its tokenizer, pass only the model"
    raise TypeError(
        f"model must be an nn.Module, got {type(model).__name__}"
        + (hint if isinstance(model, tuple) else "")
    )


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
