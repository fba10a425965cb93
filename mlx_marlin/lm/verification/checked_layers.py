"""The layers of a model that are compared, their weights, and their products."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.native import activation_dtype
from mlx_marlin.layers.packed_embedding import PackedEmbedding
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.known_layers import (
    is_experts,
    is_heads,
    is_marlin_experts,
    is_marlin_heads,
)
from mlx_marlin.lm.layer_conversion import LayerConversion, is_marlin_layer
from mlx_marlin.lm.module_tree import computing_layers, has_tied_head, natural_key
from mlx_marlin.lm.optimize import optimize
from mlx_marlin.lm.verification.exact_weights import ExactWeight
from mlx_marlin.products import this_machine
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES

QUANTIZED_PARTS = ("scales", "biases", "words", "packed_scales", "global_scale")
"""Last parts of the names of parameters that say nothing about activations."""


@dataclass(frozen=True, eq=False)
class CheckedLayer:
    """A layer of a model with one weight or a batch of them."""

    name: str  # Path of the module in the model
    module: Any  # The layer
    # "linear", "lookup" (an embedding's), "head" (an embedding used as the output
    # head), "experts" or "heads" (of latent attention)
    operation: str

    @property
    def is_ours(self) -> bool:
        """Whether `optimize` or `load` made the layer run on our kernels."""
        own = self._inner
        return isinstance(own, MarlinPart) or is_marlin_layer(own)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has codes."""
        return hasattr(self._inner, "bits")

    def weight(self) -> ExactWeight:
        """Returns the weight that the layer holds; packed weights are unpacked."""
        return ExactWeight(_stored(self.module))

    @property
    def heads(self) -> int:
        """Number of heads; 1 for other layers."""
        if self.operation != "heads":
            return 1
        own = self.module
        return int(own["words" if "words" in own else "scales"].shape[0])

    @property
    def bias(self) -> mx.array | None:
        """The bias [n] or [matrices, n]; None if there is none."""
        own = self._inner
        has_bias = self.operation in ("linear", "experts") and "bias" in own
        return own["bias"] if has_bias else None

    @property
    def sums(self) -> str | None:
        """Dtype in which products are added; None for that of the result.

        MLX's own products on a CPU add in the dtype of the activations.
        """
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        is_stock = not self.is_ours or this_machine.why_not(on_cpu) is not None
        return None if on_cpu and is_stock else "float32"

    @property
    def _inner(self) -> Any:
        own = self.module
        return own.linear if isinstance(own, ReorderedLinear) else own

    def product(self, x: mx.array, matrices: mx.array) -> mx.array:
        """Returns what the layer computes for rows of x, each with one of its matrices.

        `x`: activations [rows, k]; for "lookup" the tokens [rows]. For "heads" there
        are as many rows for each head, and heads alternate.
        `matrices`: uint32 [rows], the matrix of each row.
        """
        own = self.module
        match self.operation:
            case "head":
                y = own.as_linear(x)
            case "experts":
                y = own(x[:, None, None], matrices[:, None])
            case "heads":
                apart = x.reshape(-1, self.heads, x.shape[-1]).swapaxes(0, 1)
                y = own(apart).swapaxes(0, 1)
            case _:
                y = own(x)
        return y.reshape(x.shape[0], -1)  # type: ignore[no-any-return]


def checked_layers(model: nn.Module) -> Iterator[CheckedLayer]:
    """Yields the linear layers, embeddings, experts and heads of a model.

    An embedding is also an output head if the model has no layer called lm_head. Plain
    layers are among them, because a source may have them quantized.
    """
    named = [(name, module) for name, module in model.named_modules()]
    inner = {id(m.linear) for _, m in named if isinstance(m, ReorderedLinear)}
    with_head = has_tied_head(model)
    for name, module in sorted(named, key=lambda pair: natural_key(pair[0])):
        if id(module) in inner:
            continue
        for operation in _operations(module, with_head):
            yield CheckedLayer(name, module, operation)


def with_our_layers(model: nn.Module) -> nn.Module:
    """Converts a model's layers as `optimize` does by default, but one by one.

    Layers with the same input are not joined, and decoder blocks are not traced.
    """
    if any(map(LayerConversion().applies_to, computing_layers(model))):
        optimize(model, join=False, trace=False)
    return model


def dtype_of_activations(model: nn.Module) -> mx.Dtype:
    """Returns the dtype of a model's activations: that of its plain parameters."""
    named: Any = tree_flatten(model.parameters())
    for name, array in named:
        is_float = dtype_name(array.dtype) in DTYPE_BYTES
        if is_float and name.rpartition(".")[2] not in QUANTIZED_PARTS:
            return array.dtype  # type: ignore[no-any-return]
    return activation_dtype(model)


def _operations(module: nn.Module, is_tied: bool) -> tuple[str, ...]:
    if isinstance(module, nn.QuantizedEmbedding | nn.Embedding | PackedEmbedding):
        return ("lookup", "head") if is_tied else ("lookup",)
    if is_experts(module) or is_marlin_experts(module):
        return ("experts",)
    if is_heads(module) or is_marlin_heads(module):
        return ("heads",)
    if isinstance(module, ReorderedLinear):
        return _operations(module.linear, is_tied)
    if isinstance(module, nn.QuantizedLinear | nn.Linear):
        return ("linear",)
    return ()


def _stored(module: Any) -> StoredWeight | PackedLayer | mx.array:
    """Returns the weight of a layer, without decoding it."""
    if isinstance(module, ReorderedLinear):
        inner = _stored(module.linear)
        order = module.input_order
        if isinstance(inner, mx.array):
            return inner[..., mx.argsort(order)]
        if isinstance(inner, PackedLayer):
            return PackedLayer(inner.weight, order)
        return replace(inner, input_order=order)
    if type(module) in (nn.Linear, nn.Embedding):
        return module.weight  # type: ignore[no-any-return]
    packed = getattr(module, "packed", None)
    if packed is not None:
        return PackedLayer(packed)
    return StoredWeight(
        codes=module.weight,
        scales=module.scales,
        biases=getattr(module, "biases", None),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=getattr(module, "global_scale", None),
    )
