"""Refuses uses of a layer's parameters that stock MLX could not make sense of."""

import sys
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.native import NATIVE, PACKED
from mlx_marlin.products.dispatch import StockCalls
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, format_of
from mlx_marlin.weights.packed_weight import PackedWeight

MOST_CALLS = 256
"""Kinds of call that a layer remembers."""
NONE = StockCalls()
"""What a layer has that remembers nothing."""
SHARDING = "mlx.nn.layers.distributed"
"""The module of MLX that shards layers."""


class GuardedParameters(nn.Module):
    """A layer whose parameters may be packed, or shared with other layers.

    Such parameters have no counterpart in stock MLX. Saving, sharding and freezing
    them by the names of MLX's parameters raises, and so does replacing one by an array
    of another shape or dtype, which a kernel would read out of bounds.
    """

    layout: str = "mlx"
    _stock_calls: StockCalls = NONE
    """One object for the life of a layer: what compares attributes sees no change."""

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weight; None with `layout="mlx"`."""
        raise NotImplementedError

    def stored(self) -> str | None:
        """Returns how the parameters differ from MLX's own, or None."""
        return "packed (layout='marlin')" if self.layout == "marlin" else None

    # MLX collects the parameters of a model by the items of its modules, wherever they
    # are. Nothing else tells saving from evaluating, so the callers are looked at.
    def items(self) -> Any:
        """Returns the entries of the module, unless they are to be saved or sharded.

        Raises:
            ValueError: If `save_weights`, `mlx_lm.utils.save_model` or a function of
                `mlx.nn.layers.distributed` asks for parameters that MLX does not have.
        """
        stored = self.stored()
        use = None if stored is None else _refused_use(sys._getframe(1))
        if use is not None:
            raise ValueError(f"{type(self).__name__} is {stored}: {use}")
        return super().items()

    def __setitem__(self, name: str, value: Any) -> None:
        if self.layout == "marlin" and all(each in self for each in PACKED):
            self._check(name, value)
        super().__setitem__(name, value)
        self._note_change()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._note_change()

    def pop(self, *name: Any) -> Any:
        """Removes an entry and returns it, as `dict.pop` does."""
        self._note_change()
        return super().pop(*name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._note_change()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_stock_calls"}

    def remember_stock(self, call: tuple[object, ...], known: Any = True) -> None:
        """Remembers a call that stock MLX serves, until anything in the layer changes.

        Parameters must not be remembered: `mx.compile` replaces them unnoticed.

        Args:
            call: All that decides who serves.
            known: What is worth knowing at the next such call.
        """
        calls = self._stock_calls
        if calls is NONE:
            calls = vars(self)["_stock_calls"] = StockCalls()
        if len(calls) >= MOST_CALLS:
            calls.clear()
        calls[call] = known

    def _note_change(self) -> None:
        self._stock_calls.clear()

    def _check(self, name: str, value: Any) -> None:
        """Checks what replaces a parameter of a packed layer."""
        packed = self.packed
        if packed is None or name not in (*PACKED, "bias"):
            return
        shapes = packed.words.shape, packed.scales.shape, (*packed.batch, packed.n)
        shape = dict(zip((*PACKED, "bias"), shapes, strict=True))[name]
        stored = format_of(packed.mode, packed.bits).scale_dtypes
        dtypes = {"words": ("uint32",), "quantizers": stored}.get(name, DTYPE_BYTES)
        is_array = isinstance(value, mx.array)
        if is_array and value.shape == shape and dtype_name(value.dtype) in dtypes:
            return
        got = type(value).__name__
        if is_array:
            got = f"{dtype_name(value.dtype)} with shape {value.shape}"
        raise ValueError(
            f"{name} of a packed {type(self).__name__} must be one of {[*dtypes]} with "
            f"shape {shape}, got {got}"
        )

    def _validate_keys(self, keys: Any, strict: bool) -> Any:
        stored = self.stored()
        named = keys if isinstance(keys, list) else [keys]
        missing = [key for key in named if key in NATIVE]
        if stored is not None and missing:
            raise ValueError(
                f"keys={named!r}: {type(self).__name__} is {stored} and has no "
                f"{missing[0]!r} to train or freeze; call mlx_marlin.restore(model) "
                "first"
            )
        return super()._validate_keys(keys, strict)  # type: ignore[no-untyped-call]


def _refused_use(frame: FrameType | None) -> str | None:
    """Returns what the callers want that is refused, with the remedy, or None."""
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if code is nn.Module.save_weights.__code__ or (
            module == "mlx_lm.utils" and code.co_name == "save_model"
        ):
            return (
                "stock MLX cannot load such parameters; call "
                "mlx_marlin.restore(model) before saving"
            )
        if module == SHARDING:
            return (
                "it cannot be sharded; shard the model before "
                "mlx_marlin.optimize(model), or call mlx_marlin.restore(model) first"
            )
        frame = frame.f_back
    return None
