"""Stand-ins for the kernel factories of `mx.fast`, and for a terminal."""

import io
from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Recorder:
    """Records which kernels are built and called; their results are zeros."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> Callable[..., list[mx.array]]:
        self.built.append(options)

        def kernel(**call: Any) -> list[mx.array]:
            self.called.append(call)
            outputs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(*each) for each in outputs]

        return kernel


class Terminal(io.StringIO):
    """A stream that keeps what is written, as a terminal shows it."""

    def isatty(self) -> bool:
        return True
