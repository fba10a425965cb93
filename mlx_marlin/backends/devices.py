"""The GPU to plan for: this machine's, or one that the environment names."""

import os
import re
import sys
from dataclasses import replace

from mlx_marlin import state
from mlx_marlin.backends.cuda import device as cuda_device
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.planning.device import PlanningDevice

ENVIRONMENT = "MLX_MARLIN_DEVICE"
"""Names the device to plan for: "Apple M3 Max", "Apple M3 Max, 30 cores" or "NVIDIA
H200"."""
ARCHITECTURE_ENVIRONMENT = "MLX_METAL_GPU_ARCH"
"""MLX's own variable: the architecture that it chooses its kernels for."""
WISH = re.compile(r"(?P<name>[^:,]+?)([:,]\s*(?P<cores>\d+)(\s*cores?)?)?")
"""How the environment names a device."""


@state.cache(maxsize=1)
def current() -> PlanningDevice:
    """Returns the device to plan for.

    The environment variable MLX_MARLIN_DEVICE decides if set; else the Apple GPU that
    MLX or the system reports, with its real core count, or the CUDA device that MLX
    computes on; else `DEFAULT`. MLX_METAL_GPU_ARCH replaces the architecture of an
    Apple GPU, as it does in MLX.

    Raises:
        ValueError: If a variable does not name a device or an architecture.
    """
    wish = os.environ.get(ENVIRONMENT)
    device = _parse(wish) if wish else _here()
    arch = os.environ.get(ARCHITECTURE_ENVIRONMENT)
    if not arch or not isinstance(device, Device):
        return device
    try:
        return replace(device, arch=arch)
    except ValueError as error:
        raise ValueError(f"{ARCHITECTURE_ENVIRONMENT}: {error}") from None


def named(name: str, cores: int | None = None) -> PlanningDevice:
    """Returns a chip of Apple's or a GPU of NVIDIA's, out of the tables.

    Args:
        name: As for `Device.named` or `CudaDevice.named`.
        cores: GPU cores or multiprocessors.

    Raises:
        ValueError: If neither table has it.
    """
    if name.lower().startswith("nvidia") or cuda_device.key(name) in cuda_device.gpus():
        return CudaDevice.named(name, cores)
    return Device.named(name, cores)


def _parse(wish: str) -> PlanningDevice:
    """Returns the device that "M3 Max", "M3 Max, 30 cores" or "M3 Max:30" names."""
    found = WISH.fullmatch(wish.strip())
    if found is None:
        raise ValueError(
            f"{ENVIRONMENT}={wish!r}: expected a chip, and its core count if need be, "
            "as in 'Apple M3 Max' or 'Apple M3 Max, 30 cores'"
        )
    cores = found["cores"]
    try:
        return named(found["name"], int(cores) if cores else None)
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}={wish!r}: {error}") from None


def _here() -> PlanningDevice:
    """Returns this machine's GPU, or what to plan for in its place."""
    if sys.platform == "darwin":
        from mlx_marlin.backends.metal import detection

        return detection.here()
    from mlx_marlin.backends.cuda import detection as cuda_detection

    return cuda_detection.here() or DEFAULT
