"""What a report decides for: this process, or a chip."""

from dataclasses import dataclass, replace

import mlx.nn as nn

from mlx_marlin import guard
from mlx_marlin.backends import devices
from mlx_marlin.backends.base import Backend
from mlx_marlin.lm.known_layers import (
    has_expert_kernels,
    is_experts,
    is_heads,
    is_sharded,
    is_supported_format,
)
from mlx_marlin.lm.layer_conversion import (
    LayerConversion,
    layout_where_packed,
)
from mlx_marlin.lm.measured_models import TunedModel
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.products import serving, this_machine

DEFAULTS = LayerConversion()
"""What `optimize(model)` converts where nothing was tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a report decides for."""

    device: PlanningDevice  # The device to plan for
    # Whether this process decides, with its back end, its default device and measured
    # results. Otherwise the model decides for a GPU of this kind
    is_here: bool
    # The settings that tuning found for the model, which `optimize` uses
    tuned: TunedModel | None = None
    # The layout that tuning or the race found for the model, or None
    layout: str | None = None

    @staticmethod
    def of(chip: str | None) -> "Target":
        """Returns the target of a chip's name; None for this process."""
        if chip is None:
            return Target(device=this_machine.device(), is_here=True)
        if not isinstance(chip, str):
            raise ValueError(f"chip={chip!r}, expected a name such as 'Apple M3 Max'")
        return Target(device=devices.named(chip), is_here=False)

    @property
    def serving(self) -> serving.Place:
        """What `serve` decides for; it runs no kernels."""
        return serving.Place(
            device=self.device, is_here=self.is_here, fault=guard.known_fault
        )

    @property
    def backend(self) -> Backend:
        """The back end of the device."""
        return self.serving.backend

    @property
    def on_cpu(self) -> bool:
        """Whether calls run on the CPU."""
        return self.serving.on_cpu

    def layout_after(self, layer: nn.Module) -> str | None:
        """Returns the layout that `optimize` gives a layer of MLX's or mlx-lm's.

        None if `optimize` does not convert it.
        """
        if self.is_here:
            conversion = self._conversion
            applies = conversion is not None and conversion.applies_to(layer)
            return conversion.layout_of(layer) if conversion and applies else None
        if not self._converts(layer):
            return None
        packs = self.backend.traits.default_layout == "marlin"
        return layout_where_packed(layer) if packs else "mlx"

    def why_not(self, layer: nn.Module) -> str:
        """Returns why `optimize` does not convert a layer."""
        if self.tuned is not None and DEFAULTS.applies_to(layer):
            return self.tuned.reason
        return DEFAULTS.why_not(layer)

    @property
    def _conversion(self) -> LayerConversion | None:
        """What `optimize` converts in this process; None if stock MLX is faster."""
        if self.tuned is not None and self.tuned.settings is None:
            return None
        return replace(DEFAULTS, layout=self.layout)

    def _converts(self, layer: nn.Module) -> bool:
        if is_experts(layer):
            return has_expert_kernels(layer, self.backend.traits)
        known = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        known = known or is_heads(layer) or is_sharded(layer)
        return known and is_supported_format(layer)
