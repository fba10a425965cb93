"""Files of `mx.export_function`, read back and run where MLX has no GPU."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_emulator.dispatch import Dispatch
from metal_emulator.metal_kernel import Recorded
from mlx_marlin.products import exporting as streams

Node = dict[str, Any]


def imported(file: Path) -> Callable[..., Any]:
    """Returns the function of a file, by `mx.import_function`.

    MLX refuses to import operations of a device that is not there, so a copy of the
    file assigns them to the CPU.
    """
    if mx.is_available(mx.gpu):
        return mx.import_function(str(file))
    copy = file.with_suffix(".cpu.mlxfn")
    shutil.copyfile(file, copy)
    streams.move(copy, streams.GPU, streams.CPU)
    return mx.import_function(str(copy))


def graph(function: Callable[..., Any], *arrays: mx.array) -> list[Node]:
    """Returns the records of an imported function's graph, one kernel at most."""
    # Constants are read by a first evaluation, which ends at the kernel. A constant
    # that was not read cannot be exported again.
    with contextlib.suppress(RuntimeError):
        mx.eval(function(*arrays))
    nodes: list[Node] = []
    mx.export_function(nodes.append, lambda *inputs: function(*inputs), *arrays)
    return nodes


def kernels(nodes: list[Node]) -> list[Node]:
    """Returns the calls of custom kernels in a graph."""
    return [node for node in nodes if node.get("name") == "CustomKernel"]


def emulated(nodes: list[Node], *arrays: mx.array) -> list[mx.array]:
    """Returns the outputs of a graph of custom kernels, which the emulator runs."""
    values: dict[str, mx.array] = {}
    outputs: list[str] = []
    for node in nodes:
        if node["type"] == "inputs":
            names = [name for name, *_ in node["inputs"]]
            values.update(zip(names, arrays, strict=True))
        elif node["type"] == "constants":
            values.update(node["constants"])
        elif node["type"] == "outputs":
            outputs = [name for name, *_ in node["outputs"]]
        elif node["type"] == "primitive":
            assert node["name"] == "CustomKernel"
            _run(node, values)
    return [values[name] for name in outputs]


def _run(node: Node, values: dict[str, mx.array]) -> None:
    kernel, text, *sizes = node["arguments"][:8]
    dispatch = Dispatch(
        kernel=kernel,
        text=text,
        grid=tuple(sizes[:3]),
        threadgroup=tuple(sizes[3:]),
        info=tuple(node["arguments"][8]),
        ensure_row_contiguous=node["arguments"][9],
    )
    names, shapes, dtypes = zip(*node["outputs"], strict=True)
    inputs = [values[name] for name, *_ in node["inputs"]]
    mx.eval(inputs)
    results = Recorded.compiled(kernel, "", dispatch).run(inputs, shapes, dtypes)
    values.update(zip(names, results, strict=True))
