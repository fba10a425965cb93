"""The machine for which a model's settings were measured, found without MLX."""

import re
from dataclasses import dataclass

from mlx_marlin import state, versions
from mlx_marlin.backends import tuned_results
from mlx_marlin.backends.metal import detection

PACKAGES = ("mlx", "mlx-lm", "mlx-marlin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMachine:
    """What the speed of a model depends on besides the model and its settings."""

    chip: str  # Name of the chip, or ""
    cores: int  # GPU cores, or 0
    build: str  # Build of the operating system, which has the GPU compiler
    mlx: str  # Version of MLX
    mlx_lm: str  # Version of mlx-lm, or ""
    mlx_marlin: str  # Version of this package
    kernels: str  # Digest of the kernels, which may change within a version

    @property
    def slug(self) -> str:
        """The part of it that file names contain: chip and cores."""
        chip = re.sub(r"[^a-z0-9]+", "-", self.chip.lower()).strip("-") or "unknown"
        return f"{chip}-{self.cores}-cores"


@state.cache()
def here() -> ModelMachine:
    """Returns this machine. MLX is neither imported nor started."""
    mlx, mlx_lm, mlx_marlin = (versions.installed(name) or "" for name in PACKAGES)
    return ModelMachine(
        chip=detection.chip_name() or "",
        cores=detection.gpu_cores() or 0,
        build=detection.os_build(),
        mlx=mlx,
        mlx_lm=mlx_lm,
        mlx_marlin=mlx_marlin,
        kernels=tuned_results.kernels("metal"),
    )
