"""Faults that a GPU's compiler, a driver or MLX could have, planted in kernels.

A fault changes the text of a kernel before it is built, or what the kernel returns. The
guard's digests do not see it, as they would not see a compiler's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.backends import kernels

Outputs = list[mx.array]


class Fault:
    """A fault of one kernel, and how often the kernel was built and called."""

    def __init__(self, kernel: str, kind: str) -> None:
        self.kernel, self.kind = kernel, kind
        self.built = self.called = 0

    def plant(self, patch: pytest.MonkeyPatch) -> "Fault":
        """Lets `backends` build the kernel with the fault."""
        from metal_emulator import metal_kernel

        def factory(*, name: str, **texts: Any) -> Any:
            if not name.startswith(f"marlin_{self.kernel}"):
                return metal_kernel(name=name, **texts)
            self.built += 1
            if self.kind == "factory raises":
                raise RuntimeError("[metal_kernel] the factory raised")
            return self._wrapped(metal_kernel(name=name, **self._changed(texts)))

        patch.setattr(kernels, "_factory", lambda: factory)
        return self

    def _changed(self, texts: dict[str, Any]) -> dict[str, Any]:
        if self.kind in TEXTS:
            field, change = TEXTS[self.kind]
            changed = change(texts[field])
            assert changed != texts[field]
            return texts | {field: changed}
        return texts

    def _wrapped(self, kernel: Any) -> Callable[..., Outputs]:
        def call(**arguments: Any) -> Outputs:
            self.called += 1
            if self.kind == "call raises":
                raise ValueError("[custom_kernel] the call raised\nsecond line")
            results: Outputs = kernel(**arguments)
            if self.kind in RESULTS:
                return [RESULTS[self.kind](each, self.called) for each in results]
            return results

        return call


def _unusable(y: mx.array, _: int) -> mx.array:
    """Returns an array whose evaluation raises."""
    singular = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    return y + singular[0, 0].astype(y.dtype)


def _some(y: mx.array, wrong: mx.array, where: mx.array) -> mx.array:
    return mx.where(where, wrong.astype(y.dtype), y)


def _last_column(y: mx.array) -> mx.array:
    return mx.arange(y.shape[-1]) == y.shape[-1] - 1


def _first_row(y: mx.array) -> mx.array:
    rows = mx.arange(y.size // y.shape[-1]).reshape(*y.shape[:-1], 1)
    return rows == 0


TEXTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "header does not compile": ("header", lambda text: text + "\nint broken(;\n"),
    "body does not compile": ("source", lambda text: text + "\nundeclared(1);\n"),
}
"""What is changed of a kernel's text: its field, and how."""

RESULTS: dict[str, Callable[[mx.array, int], mx.array]] = {
    "evaluation raises": _unusable,
    "wrong factor": lambda y, _: (y + y).astype(y.dtype),
    "wrong sign": lambda y, _: ~y if y.dtype == mx.uint32 else -y,
    "zeros": lambda y, _: mx.zeros_like(y),
    "lanes exchanged": lambda y, _: y[..., _exchanged(y.shape[-1])],
    "last column missing": lambda y, _: _some(y, mx.zeros_like(y), _last_column(y)),
    "last column of first row off": lambda y, _: _some(
        y, y + y + 1, mx.logical_and(_last_column(y), _first_row(y))
    ),
    "wrong shape": lambda y, _: y[..., :-1],
    "another result each time": lambda y, nth: (y + nth * (1 + y)).astype(y.dtype),
}
"""What becomes of a kernel's result, by the number of its call."""

OF_NUMBERS: dict[str, Callable[[mx.array, int], mx.array]] = {
    "infinities": lambda y, _: mx.full(y.shape, mx.inf, y.dtype),
    "NaN in one result": lambda y, _: _some(
        y, mx.full(y.shape, mx.nan), mx.logical_and(_last_column(y), _first_row(y))
    ),
}
"""Likewise of results that are no codes."""


def _exchanged(columns: int) -> mx.array:
    """Returns columns whose neighbours have changed places."""
    nth = mx.arange(columns)
    return mx.minimum(nth ^ 1, columns - 1)


RESULTS |= OF_NUMBERS
KINDS: Sequence[str] = ("factory raises", "call raises", *TEXTS, *RESULTS)
OF_CODES: Sequence[str] = [kind for kind in KINDS if kind not in OF_NUMBERS]
