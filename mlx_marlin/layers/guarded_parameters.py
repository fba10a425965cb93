"""The base of our layers: parameters in MLX's layout, packed, or shared with others."""

from operator import itemgetter
from typing import Any, Self, TypeVar, cast
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin import state
from mlx_marlin.layers.refused_uses import RefusingModule
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.products.reference.weight import NativeWeight, as_mlx, stock_group_size
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, MODE_DEFAULTS, format_of
from mlx_marlin.weights.packed_weight import PackedWeight

NATIVE = ("weight", "scales", "biases")
"""A layer's arrays in MLX's layout."""
PACKED = ("words", "packed_scales")
"""A layer's arrays in the packed layout."""
SCALES = ("scales", "biases", "packed_scales")
"""Arrays of quantized layers that are floats in some formats."""
GLOBAL_SCALE = "global_scale"
"""An array of a packed linear layer: its global scale, float32 [2].

It occurs twice: MLX passes arrays of less than 8 bytes in another address space.
"""

Layer = TypeVar("Layer", bound=nn.Module)


def native_weight(layer: nn.Module) -> NativeWeight:
    """Returns the weight of a layer in MLX's layout."""
    format = layer.group_size, layer.bits, layer.mode
    return layer["weight"], layer["scales"], layer.get("biases"), format


def without_parameters(cls: type[Layer], layer: nn.Module) -> Layer:
    """Returns a layer without parameters, in the format and state of another."""
    result = cls.__new__(cls)
    nn.Module.__init__(result)
    result.group_size, result.bits, result.mode = (
        layer.group_size,
        layer.bits,
        layer.mode,
    )
    result.train(layer.training)
    packed = (*PACKED, GLOBAL_SCALE) if "words" in layer else ()
    result._no_grad = set(layer._no_grad).difference(packed)
    return result


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """Returns the dtype of the activations of layers whose scales are bytes.

    It is the dtype of the model's first plain floating-point parameter, such as a
    norm's weight, or else of scales. Without any it is bfloat16, to which MLX decodes
    such weights.
    """
    named = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    floats = [
        (name.rpartition(".")[2] in SCALES, array.dtype)
        for name, array in named
        if dtype_name(array.dtype) in DTYPE_BYTES and not name.endswith(GLOBAL_SCALE)
    ]
    return min(floats, key=itemgetter(0), default=(True, mx.bfloat16))[1]


MOST_CALLS = 256
"""Calls that a layer remembers."""
FIXED = {"bits", "group_size", "mode", "layout", "_n", "_k", "index", "shared"}
"""Attributes by which a layer reads its packed or joined parameters."""

Stock = TypeVar("Stock", bound=nn.Module)


class GuardedParameters(RefusingModule):
    """A layer whose parameters may be packed, or shared with other layers.

    With `layout="mlx"` they are MLX's own. With `layout="marlin"` they are `words` and
    `packed_scales`, and `global_scale` if the weight has one; reading `weight`,
    `scales` or `biases` unpacks them.

    Such parameters have no counterpart in stock MLX. It is an error to save, shard or
    freeze them by the names of MLX's parameters, and to replace one by an array of
    another shape or dtype, or to change the format, because a kernel would read wrong
    numbers or out of bounds.
    """

    # Slots are invisible to code that compares or copies attributes. Reading a slot
    # touches no other object, which would cost more than the look-up with cold caches.
    __slots__ = ("_known_weight", "_last_stock_call", "_stock_calls")

    layout: str = "mlx"
    invariant: bool = False
    group_size: int
    bits: int
    mode: str
    _n: int
    _k: int
    _known_weight: PackedWeight | None
    _last_stock_call: object
    _stock_calls: dict[object, Any]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Returns a layer that remembers no calls."""
        layer = super().__new__(cls)
        object.__setattr__(layer, "_stock_calls", {})
        layer.forget_stock()
        return layer

    @classmethod
    def _of_packed(cls, packed: PackedWeight) -> Self:
        """Returns a layer with a packed weight, which is frozen as MLX's are."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._no_grad.update(NATIVE)
        layer._take(packed)
        return layer

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
        format = {name: getattr(self, name) for name in ("group_size", "bits", "mode")}
        weight = PackedWeight.from_operand(
            words, scales, operand, n=self._n, k=self._k, **format
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

    def native(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Returns codes, scales and biases, or None for biases, in MLX's layout.

        A global scale of a linear layer is not among them.
        """
        packed = self.packed
        if packed is None:
            return self["weight"], self["scales"], self.get("biases")
        words, scales, *biases = unpack(packed)
        return words, scales, biases[0] if biases else None

    def keep_packed(
        self,
        global_scale: mx.array | None = None,
        codebook: mx.array | None = None,
    ) -> None:
        """Packs the layer's arrays, which are in MLX's layout, in place."""
        format = {name: getattr(self, name) for name in ("group_size", "bits", "mode")}
        packed = pack(
            *self.native(), global_scale=global_scale, codebook=codebook, **format
        )
        self._take(packed)

    def _take(self, packed: PackedWeight) -> None:
        """Replaces the layer's weight by a packed one."""
        arrays = {"words": packed.words, "packed_scales": packed.scales}
        if packed.global_scale is not None:
            arrays[GLOBAL_SCALE] = packed.biases_or_global_scale
        others = {n: each for n, each in dict.items(self) if n not in NATIVE}
        self.clear()
        dict.update(self, arrays | others)
        self.group_size, self.bits, self.mode = (
            packed.group_size,
            packed.bits,
            packed.mode,
        )
        self._n, self._k, self.layout = packed.n, packed.k, "marlin"
        self.freeze(keys=[*arrays])

    def _in_mlxs_layout(self, cls: type[Stock]) -> Stock | None:
        """Returns a layer of MLX's with the same arrays; None if it has no such groups.

        A zero point becomes a bias, rounded to the scales' dtype.
        """
        packed = self.packed
        size = self.group_size if packed is None else stock_group_size(packed)
        if size is None:
            return None
        layer = without_parameters(cls, self)
        layer.group_size = size
        if self.mode not in MODE_DEFAULTS:
            layer.mode = "affine"
        native = self.native() if packed is None else (*as_mlx(packed), None)
        for name, array in zip(NATIVE, native, strict=False):
            setattr(layer, name, array)
        for name, array in dict.items(self):
            if name not in (*NATIVE, *PACKED):
                layer[name] = array
        return layer

    def stored(self) -> str | None:
        """Returns how the parameters differ from MLX's own, or None."""
        return "packed (layout='marlin')" if self.layout == "marlin" else None

    def why_not(self, use: str) -> str | None:
        """Returns why the layer is not saved or sharded, or None."""
        stored = self.stored()
        return None if stored is None else f"{type(self).__name__} is {stored}: {use}"

    def __getattr__(self, name: str) -> Any:
        if name not in NATIVE or self.layout == "mlx":
            return super().__getattr__(name)
        if name == "scales" and GLOBAL_SCALE in self:
            raise ValueError(
                f"scales of a {type(self).__name__} with a global scale do not give "
                f"its weight: use mlx_marlin.dequantize(layer.packed)"
            )
        return self.native()[NATIVE.index(name)]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and name in vars(self) and self.stored() is not None:
            raise TypeError(
                f"{name} of a {type(self).__name__} cannot be set, because the layer "
                f"is {self.stored()}: set it after mlx_marlin.restore(model)"
            )
        if name in NATIVE and self.layout == "marlin":
            raise TypeError(
                f"{name} of a layer with layout='marlin' cannot be set, because its "
                f"parameters are {' and '.join(PACKED)}: set {name} of the layer that "
                f"to_stock() returns and make a new one with from_quantized"
            )
        if name == GLOBAL_SCALE and name in self and self.layout == "marlin":
            self._check(name, value)  # MLX removes an entry that becomes no array
        super().__setattr__(name, value)
        self.forget_stock()

    def __setitem__(self, name: str, value: Any) -> None:
        if self.layout == "marlin" and all(parameter in self for parameter in PACKED):
            self._check(name, value)
        super().__setitem__(name, value)
        self.forget_stock()

    def __delitem__(self, name: str) -> None:
        self.pop(name)

    def pop(self, *name: Any) -> Any:
        """Removes an entry and returns it, as `dict.pop` does."""
        self.forget_stock()
        return super().pop(*name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # a copy has its own memory

    def remember_stock(self, call: object, known: Any = True) -> None:
        """Remembers a call that stock MLX serves, until anything in the layer changes.

        `state.reset` drops it too. The value must not hold parameters, because
        `mx.compile` replaces them unnoticed.
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
        assert packed is not None
        stored = format_of(self.mode, self.bits).scale_dtypes
        scale = (2,) if packed.mode == "nvfp4" and not packed.batch else None
        expected = {
            "words": (packed.words.shape, ("uint32",)),
            "packed_scales": (packed.scales.shape, stored),
            GLOBAL_SCALE: (scale, ("float32",)),
            "bias": ((*packed.batch, packed.n), (*DTYPE_BYTES,)),
        }
        if name not in expected:
            return
        shape, dtypes = expected[name]
        got = type(value).__name__
        if isinstance(value, mx.array):
            dtype = dtype_name(value.dtype)
            if value.shape == shape and dtype in dtypes:
                return
            got = f"{dtype} with shape {value.shape}"
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
