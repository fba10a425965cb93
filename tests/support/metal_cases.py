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
    """What scalar expressions are worth: all of them are one kernel.

    Args:
        expressions: In Metal.
        dtype: Of the values.
        before: Statements that the expressions follow.
        header: What stands before the kernel.
    """

    def __init__(
        self,
        expressions: Iterable[str],
        dtype: mx.Dtype = mx.float32,
        before: str = "",
        header: str = "",
    ) -> None:
        self._expressions = list(expressions)
        self._dtype = dtype
        self._before = before
        self._header = header

    def __getitem__(self, expression: str) -> Any:
        """Returns the value of an expression."""
        return self._values[self._expressions.index(expression)]

    @cached_property
    def _values(self) -> Array:
        lines = (f"out[{j}] = {each};" for j, each in enumerate(self._expressions))
        return run_checked(
            "\n".join([self._before, *lines]),
            header=self._header,
            shape=(len(self._expressions),),
            dtype=self._dtype,
            grid=1,
            threadgroup=1,
        )
