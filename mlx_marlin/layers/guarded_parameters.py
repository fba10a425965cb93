"""Layers whose parameters stock MLX cannot read, and the errors for such uses."""

from typing import Any, Self
from weakref import WeakValueDictionary

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.layers.native import GLOBAL_SCALE, NATIVE, PACKED
from mlx_marlin.layers.refused_uses import RefusingModule
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, MODE_DEFAULTS, format_of
from mlx_marlin.weights.packed_weight import PackedWeight

MOST_CALLS = 256
"""Calls that a layer remembers."""
FIXED = frozenset(
    ("bits", "group_size", "mode", "layout", "index", "shared", "_n", "_k")
) | {"input_dims", "output_dims", "num_embeddings", "dims"}
"""Attributes by which a layer reads its packed or joined parameters."""


class GuardedParameters(RefusingModule):
    """A layer whose parameters may be packed, or shared with other layers.

    Such parameters have no counterpart in stock MLX. It is an error to save, shard or
    freeze them by the names of MLX's parameters, and to replace one by an array of
    another shape or dtype, or to change the format, because a kernel would read wrong
    numbers or out of bounds.
    """

    # Slots are invisible to code that compares or copies attributes. Reading a slot
    # touches no other object, which would cost more than the look-up with cold caches.
    __slots__ = ("_known_weight", "_last_stock_call", "_stock_calls")

    layout: str = "mlx"
    _known_weight: PackedWeight | None
    _last_stock_call: object
    _stock_calls: dict[object, Any]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Returns a layer that remembers no calls."""
        layer = super().__new__(cls)
        object.__setattr__(layer, "_known_weight", None)
        object.__setattr__(layer, "_last_stock_call", None)
        object.__setattr__(layer, "_stock_calls", {})
        return layer

    group_size: int
    bits: int
    mode: str

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weight, or all of them as a batch; None with `layout="mlx"`."""
        if self.layout == "mlx":
            return None
        words, scales = self["words"], self["packed_scales"]
        operand = self.get(GLOBAL_SCALE, scales)
        known = self._known_weight
        # `mx.compile` replaces parameters without calling a method of the layer.
        if (
            known is not None
            and known.words is words
            and known.scales is scales
            and known.biases_or_global_scale is operand
        ):
            return known
        n, k = self._features()
        weight = PackedWeight.from_operand(
            words,
            scales,
            operand,
            n=n,
            k=k,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        object.__setattr__(self, "_known_weight", weight)
        return weight

    @property
    def is_packed_only(self) -> bool:
        """Whether the weight is packed, and MLX has no layer in its format."""
        if self.layout == "mlx":
            return False
        sizes = format_of(self.mode, self.bits).group_sizes
        known = self.mode in MODE_DEFAULTS and self.group_size in sizes
        return not known or GLOBAL_SCALE in self

    def _features(self) -> tuple[int, int]:
        """Returns n and k of the packed weight.

        Subclasses that can be packed define it. It is not an `abstractmethod`: joined
        layers never are, and `dict`, the base of modules, does not enforce it.
        """
        raise NotImplementedError

    def stored(self) -> str | None:
        """Returns how the parameters differ from MLX's own, or None."""
        return "packed (layout='marlin')" if self.layout == "marlin" else None

    def why_not(self, use: str) -> str | None:
        """Returns why the layer is not saved or sharded, or None."""
        stored = self.stored()
        return None if stored is None else f"{type(self).__name__} is {stored}: {use}"

    def __setitem__(self, name: str, value: Any) -> None:
        if self.layout == "marlin" and all(parameter in self for parameter in PACKED):
            self._check(name, value)
        super().__setitem__(name, value)
        self.forget_stock()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.forget_stock()

    def pop(self, *name: Any) -> Any:
        """Removes an entry and returns it, as `dict.pop` does."""
        self.forget_stock()
        return super().pop(*name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and name in vars(self) and self.stored() is not None:
            raise TypeError(
                f"{name} of a {type(self).__name__} cannot be set, because the layer "
                f"is {self.stored()}: set it after mlx_marlin.restore(model)"
            )
        if name == GLOBAL_SCALE and name in self:
            self._check(name, value)  # MLX removes an entry that becomes no array
        super().__setattr__(name, value)
        self.forget_stock()

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # a copy has its own memory

    def remember_stock(self, call: object, known: Any = True) -> None:
        """Remembers a call that stock MLX serves, until anything in the layer changes.

        `state.reset` drops it too. The value must not hold parameters, because
        `mx.compile` replaces them unnoticed.

        Args:
            call: Everything that decides who serves.
            known: A value for the next such call.
        """
        calls = self._stock_calls
        if len(calls) >= MOST_CALLS:
            calls.clear()
        calls[call] = known
        _remembering[id(self)] = self

    def is_stock_call(self, call: object) -> bool:
        """Returns whether a call is remembered, and makes it the last one."""
        if call not in self._stock_calls:
            return False
        object.__setattr__(self, "_last_stock_call", call)
        return True

    def forget_stock(self) -> None:
        """Drops the calls that stock MLX serves, and the packed weight."""
        object.__setattr__(self, "_known_weight", None)
        object.__setattr__(self, "_last_stock_call", None)
        self._stock_calls.clear()

    def _check(self, name: str, value: Any) -> None:
        """Raises a ValueError if a value does not fit a parameter of a packed layer."""
        packed = self.packed
        names = (*PACKED, "bias", GLOBAL_SCALE)
        if packed is None or name not in names:
            return
        bias = (*packed.batch, packed.n)
        scale = (2,) if packed.mode == "nvfp4" and not packed.batch else None
        shapes = packed.words.shape, packed.scales.shape, bias, scale
        shape = dict(zip(names, shapes, strict=True))[name]
        stored = format_of(packed.mode, packed.bits).scale_dtypes
        dtypes = {
            "words": ("uint32",),
            "packed_scales": stored,
            GLOBAL_SCALE: ("float32",),
        }.get(name, DTYPE_BYTES)
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


class _Layers(WeakValueDictionary[int, GuardedParameters]):
    """Layers that remember calls, by their ids: modules cannot be hashed."""

    def clear(self) -> None:
        """Makes the layers drop their calls."""
        # References, because listing them is one step, which no other thread
        # interrupts.
        for reference in self.valuerefs():
            layer = reference()
            if layer is not None:
                layer.forget_stock()


_remembering = state.register(_Layers())
