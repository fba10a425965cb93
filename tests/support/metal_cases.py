"""Metal that has to run in the emulator and to pass the static check."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import mlx.core as mx

from metal_emulator import check
from support.metal_sources import Array, run


def run_checked(source: str, *inputs: mx.array, **options: Any) -> Array:
    """Runs a kernel as `metal_sources.run` does, and checks the same kernel."""
    grid, group = options.get("grid", 32), options.get("threadgroup", 32)
    check(
        name="checked",
        input_names=list("abcdefgh"[: len(inputs)]),
        output_names=["out"],
        source=source,
        header=options.get("header", ""),
        calls=[
            {
                "inputs": list(inputs),
                "output_shapes": [options.get("shape", (32,))],
                "output_dtypes": [options.get("dtype", mx.float32)],
                "grid": (grid, 1, 1),
                "threadgroup": (group, 1, 1),
                "template": options.get("template"),
            }
        ],
    )
    return run(source, *inputs, **options)


class Values:
    """What expressions are worth: all of them are one kernel."""

    def __init__(
        self,
        expressions: Iterable[str],
        *inputs: mx.array,
        dtype: mx.Dtype = mx.float32,
        before: str = "",
        header: str = "",
        threads: int = 1,
    ) -> None:
        self._expressions = list(expressions)
        self._inputs = inputs
        self._dtype = dtype
        self._before = before
        self._header = header
        self._threads = threads

    def __getitem__(self, expression: str) -> Any:
        """Returns an expression's value, or its values in several threads [threads]."""
        values = self._values[self._expressions.index(expression)]
        return values[0] if self._threads == 1 else values

    @cached_property
    def _values(self) -> Array:
        lines = (
            f"out[{j * self._threads} + thread_index_in_threadgroup] = {each};"
            for j, each in enumerate(self._expressions)
        )
        return run_checked(
            "\n".join([self._before, *lines]),
            *self._inputs,
            header=self._header,
            shape=(len(self._expressions), self._threads),
            dtype=self._dtype,
            grid=self._threads,
            threadgroup=self._threads,
        )
