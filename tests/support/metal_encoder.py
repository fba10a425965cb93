"""Counts the dispatches and dependent levels of a graph on Metal, as MLX encodes it.

The graph is what `mx.export_function` passes to a callback. MLX 0.32.4's rules:

- Order (`eval_impl`): breadth first from the results, at most 20 arrays wide, reversed.
- Encoder (`CommandEncoder`): dispatches are concurrent. A barrier precedes one that
  reads or writes a buffer that was written since the last barrier. The barriers of a
  stream divide its dispatches into levels.
- Views share the buffer of their input: transposed, sliced, broadcast arrays always;
  reshaped ones if their strides allow it. Other operations are one dispatch, and one
  more for each strided input that their kernel cannot read.

Not modelled: freed buffers that are used again, which can add barriers; the second
dispatch of attention over many tokens; that a KV cache whose arrays something else
refers to is copied.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx

MAX_WIDTH = 20
"""MLX's default of `MLX_BFS_MAX_WIDTH`."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a graph costs the GPU in addition to its work."""

    # Names of the dispatches between two barriers, for each level
    levels: tuple[tuple[str, ...], ...]

    @property
    def dispatches(self) -> int:
        """Number of dispatches."""
        return sum(map(len, self.levels))

    @property
    def counts(self) -> tuple[int, int]:
        """Number of dispatches and of levels."""
        return self.dispatches, len(self.levels)


def encoding_of(function: Callable[..., Any], *arrays: mx.array) -> Encoding:
    """Returns how MLX encodes a function of arrays that have been computed."""
    nodes: list[dict[str, Any]] = []
    mx.export_function(nodes.append, function, *arrays)
    (outputs,) = (node["outputs"] for node in nodes if node["type"] == "outputs")
    graph = _compiled([node for node in nodes if node["type"] == "primitive"])
    encoder = _Encoder()
    for node in _in_order(graph, [name for name, *_ in outputs]):
        encoder.add(node)
    return Encoding(tuple(map(tuple, encoder.levels)))


def _compiled(graph: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a graph with each swiglu as one operation, as `mx.compile` makes it.

    An exported graph has the operations of compiled functions one by one.
    """
    makers = {name: node for node in graph for name, *_ in node["outputs"]}
    dropped: list[int] = []
    for node in graph:
        if node["name"] != "Multiply":
            continue
        silu = makers.get(node["inputs"][0][0], {"name": ""})
        if silu["name"] != "Multiply":
            continue
        gate, factor = silu["inputs"]
        sigmoid = makers.get(factor[0], {"name": ""})
        if sigmoid["name"] == "Sigmoid" and sigmoid["inputs"] == [gate]:
            node |= {"name": "swiglu", "inputs": [gate, node["inputs"][1]]}
            dropped += [id(silu), id(sigmoid)]
    return [node for node in graph if id(node) not in dropped]


def _in_order(
    graph: list[dict[str, Any]], outputs: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the operations in the order in which MLX evaluates them."""
    makers = {name: node for node in graph for name, *_ in node["outputs"]}
    inputs_of = [[name for name, *_ in node["inputs"]] for node in graph]
    # Arrays that one operation makes are evaluated together.
    uses = Counter(
        id(makers[name]) for names in (*inputs_of, outputs) for name in names
        if name in makers
    )  # fmt: skip
    # MLX makes one array that depends on the results, and starts there.
    tape: list[list[str]] = [[name for name in outputs if name in makers]]
    order: list[dict[str, Any]] = []
    waiting: list[tuple[list[str], int]] = []
    at = 0
    while at < len(tape) or waiting:
        names, first = (tape[at], 0) if at < len(tape) else waiting.pop()
        at += at < len(tape)
        for index in range(first, len(names)):
            if len(tape) - at >= MAX_WIDTH:
                waiting.append((names, index))
                break
            node = makers[names[index]]
            uses[id(node)] -= 1
            if not uses[id(node)]:
                order.append(node)
                tape.append([name for name, *_ in node["inputs"] if name in makers])
    assert len(order) == len(graph), "every operation is needed, and evaluated once"
    return reversed(order)


@dataclass(frozen=True, slots=True)
class _View:
    """An array of the graph: the buffer that holds it, and its strides."""

    buffer: object
    shape: Shape
    strides: Shape

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-contiguous; the stride of a single element is free."""
        return all(
            size == 1 or stride == own
            for size, stride, own in zip(
                self.shape, self.strides, _strides(self.shape), strict=True
            )
        )


@dataclass
class _Encoder:
    levels: list[list[str]] = field(default_factory=lambda: [[]])
    arrays: dict[str, _View] = field(default_factory=dict)
    written: set[object] = field(default_factory=set)

    def add(self, node: dict[str, Any]) -> None:
        """Encodes an operation."""
        inputs = [self._input(name, shape) for name, shape, _ in node["inputs"]]
        name, outputs = node["name"], node["outputs"]
        if name in VIEWS:
            views = VIEWS[name](inputs[0], node["arguments"], outputs)
            if views is None:  # a reshaped array with other strides
                views = [self._copy(inputs[0], shape) for _, shape, _ in outputs]
            self.arrays.update(zip((own for own, *_ in outputs), views, strict=True))
        elif name == "SliceUpdate":  # in the memory of its first input
            own = outputs[0][0]
            self.arrays[own] = inputs[0]
            self._dispatch(name, inputs[1:], [inputs[0].buffer])
        else:
            self._compute(node, inputs)

    def _compute(self, node: dict[str, Any], inputs: list[_View]) -> None:
        name = node["name"]
        if name == "CustomKernel":
            name = node["arguments"][0].removeprefix("custom_kernel_")
        if name in CONTIGUOUS or (
            name != node["name"] and node["arguments"][9]  # ensure_row_contiguous
        ):
            inputs = [
                own if own.is_contiguous else self._copy(own, own.shape)
                for own in inputs
            ]
        for own, shape, _ in node["outputs"]:
            self.arrays[own] = _new(shape)
        buffers = [self.arrays[own].buffer for own, *_ in node["outputs"]]
        self._dispatch(name, inputs, buffers)

    def _copy(self, view: _View, shape: Shape) -> _View:
        copy = _new(shape)
        self._dispatch("copy", [view], [copy.buffer])
        return copy

    def _dispatch(
        self, name: str, inputs: Sequence[_View], outputs: Sequence[object]
    ) -> None:
        touched = {own.buffer for own in inputs} | {*outputs}
        if touched & self.written:
            self.levels.append([])
            self.written.clear()
        self.levels[-1].append(name)
        self.written.update(outputs)

    def _input(self, name: str, shape: Shape) -> _View:
        if name not in self.arrays:  # computed before
            self.arrays[name] = _new(shape)
        return self.arrays[name]


def _new(shape: Shape) -> _View:
    return _View(object(), tuple(shape), _strides(shape))


def _strides(shape: Shape) -> Shape:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


Outputs = Sequence[tuple[str, Shape, Any]]


def _reshaped(view: _View, _: Any, outputs: Outputs) -> list[_View] | None:
    (_, shape, _) = outputs[0]
    if not view.is_contiguous:
        return None
    return [_View(view.buffer, tuple(shape), _strides(shape))]


def _inserted(view: _View, arguments: Any, outputs: Outputs) -> list[_View]:
    (_, shape, _) = outputs[0]
    axes = {axis % len(shape) for axis in arguments[0]}
    own = iter(view.strides)
    strides = tuple(1 if axis in axes else next(own) for axis in range(len(shape)))
    return [_View(view.buffer, tuple(shape), strides)]


def _removed(view: _View, arguments: Any, outputs: Outputs) -> list[_View]:
    axes = {axis % len(view.shape) for axis in arguments[0]}
    kept = [axis for axis in range(len(view.shape)) if axis not in axes]
    strides = tuple(view.strides[axis] for axis in kept)
    return [_View(view.buffer, tuple(outputs[0][1]), strides)]


def _transposed(view: _View, arguments: Any, outputs: Outputs) -> list[_View]:
    strides = tuple(view.strides[axis] for axis in arguments[0])
    return [_View(view.buffer, tuple(outputs[0][1]), strides)]


def _sliced(view: _View, arguments: Any, outputs: Outputs) -> list[_View]:
    steps = zip(view.strides, arguments[2], strict=True)
    strides = tuple(stride * step for stride, step in steps)
    return [_View(view.buffer, tuple(outputs[0][1]), strides)]


def _parts(view: _View, _: Any, outputs: Outputs) -> list[_View]:
    return [_View(view.buffer, tuple(shape), view.strides) for _, shape, _ in outputs]


def _broadcast(view: _View, _: Any, outputs: Outputs) -> list[_View]:
    shape = tuple(outputs[0][1])
    added = len(shape) - len(view.shape)
    strides = tuple(
        0 if axis < added or view.shape[axis - added] != size
        else view.strides[axis - added]
        for axis, size in enumerate(shape)
    )  # fmt: skip
    return [_View(view.buffer, shape, strides)]


VIEWS: dict[str, Callable[[_View, Any, Outputs], list[_View] | None]] = {
    "Broadcast": _broadcast,
    "ExpandDims": _inserted,
    "Flatten": _reshaped,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Split": _parts,
    "Squeeze": _removed,
    "StopGradient": _parts,
    "Transpose": _transposed,
    "Unflatten": _reshaped,
}
"""Operations that compute nothing, by the names of MLX's primitives."""
CONTIGUOUS = ("GatherQMM", "QuantizedMatmul")
"""Operations of MLX that copy strided inputs."""
