"""What a report decides for: this process, or a chip."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import devices, registry
from mlx_marlin.backends.base import Backend
from mlx_marlin.integrations.mlx_lm.known_layers import (
    has_expert_kernels,
    is_experts,
    is_heads,
    is_sharded,
    is_supported_format,
)
from mlx_marlin.integrations.mlx_lm.layer_conversion import (
    LayerConversion,
    layout_where_packed,
)
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.products import eligibility
from mlx_marlin.weights.formats import FORMATS

DEFAULTS = LayerConversion(
    layout=None, quantize=False, group_size=64, bits=4, invariant=False
)
"""What `optimize(model)` converts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a report decides for.

    Attributes:
        device: The device to plan for.
        is_here: Whether this process decides, with its back end, its default device
            and tuned results. Otherwise the model decides for a GPU of this kind.
    """

    device: PlanningDevice
    is_here: bool

    @staticmethod
    def of(chip: str | None) -> "Target":
        """Returns the target of a chip's name; None for this process.

        Raises:
            ValueError: If the chip is not known.
        """
        if chip is None:
            return Target(device=eligibility.target(), is_here=True)
        if not isinstance(chip, str):
            raise ValueError(f"chip={chip!r}, expected a name such as 'Apple M3 Max'")
        return Target(device=devices.named(chip), is_here=False)

    @property
    def backend(self) -> Backend:
        """The back end of the device."""
        return registry.of_device(self.device)

    @property
    def on_cpu(self) -> bool:
        """Whether calls run on the CPU."""
        return self.is_here and mx.default_device() == mx.Device(mx.cpu)

    def layout_after(self, layer: nn.Module) -> str | None:
        """Returns the layout that `optimize` gives a layer of MLX's or mlx-lm's.

        None if `optimize` does not convert it.
        """
        if self.is_here:
            applies = DEFAULTS.applies_to(layer)
            return DEFAULTS.layout_of(layer) if applies else None
        if not self._converts(layer):
            return None
        packs = self.backend.traits.default_layout == "marlin"
        return layout_where_packed(layer) if packs else "mlx"

    def _converts(self, layer: nn.Module) -> bool:
        if is_experts(layer):
            return has_expert_kernels(layer, self.backend.traits)
        known = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        return (known or is_heads(layer)) and is_supported_format(layer)

    def why_not_converted(self, layer: Any) -> str:
        """Returns why `optimize` does not convert a quantized layer."""
        known = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        if is_sharded(layer):
            return "optimize does not convert sharded layers"
        if not (known or is_experts(layer) or is_heads(layer)):
            return f"optimize does not convert a {type(layer).__name__}"
        format = FORMATS.get((layer.mode, layer.bits))
        if format is None:
            return f"{layer.mode} {layer.bits}-bit is not one of our formats"
        k = layer.weight.shape[-1] * 32 // layer.bits
        wrong = format.why_not(layer.group_size, k, "mlx")
        if wrong is not None:
            return wrong
        return (
            "our kernels for experts do not run here, or do not take such scales or a "
            "global scale"
        )
