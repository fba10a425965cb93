"""The GPU to plan for: this machine's, or one that the environment names."""

import os
import re

from mlx_marlin import state
from mlx_marlin.backends import registry
from mlx_marlin.planning.device import PlanningDevice, UnknownDeviceError
from mlx_marlin.regular_files import quoted

ENVIRONMENT = "MLX_MARLIN_DEVICE"
"""Names the device to plan for: "Apple M3 Max", "Apple M3 Max, 30 cores" or "NVIDIA
H200"."""
NAME = re.compile(
    r"\s*(?P<name>[^:,]+?)"
    r"([:,]\s*(?P<cores>\d+)(\s*cores?)?"
    r"|(\s+with)?\s+(?P<units>\d+)[\s-](GPU\s+)?(cores?|multiprocessors)(\s+GPU)?)?\s*",
    re.IGNORECASE,
)
"""A device as users name it, and as `variant` does."""


@state.cache()
def current(backend: str | None = None) -> PlanningDevice:
    """Returns the device to plan for.

    It is the device that the environment variable MLX_MARLIN_DEVICE names, if it is
    set; otherwise this machine's GPU; otherwise the default device of the first back
    end. Variables of MLX that change a device are respected.
    """
    wish = os.environ.get(ENVIRONMENT)
    if not wish:
        return _detected(backend).in_mlx()
    try:
        device = named(wish, first=backend)
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}={wish!r}: {error}") from None
    return device.in_mlx()


def named(
    name: str, cores: int | None = None, first: str | None = None
) -> PlanningDevice:
    """Returns a device by its name."""
    parts = NAME.fullmatch(name)
    if parts is None:
        raise ValueError(
            f"device {quoted(name)}, expected a chip, and its core count if need be, "
            f"as in 'Apple M3 Max' or 'Apple M3 Max, 30 cores'"
        )
    own = parts["cores"] or parts["units"]
    if own is not None:
        if cores not in (None, int(own)):
            raise ValueError(f"cores={cores}, expected those of {quoted(name)}")
        cores = int(own)
    errors = []
    for backend in registry.every(first):
        try:
            found: PlanningDevice = backend.find_device(parts["name"], cores)
        except UnknownDeviceError as error:
            errors.append(error)
        else:
            return found
    raise ValueError(str(errors[0]))


def is_known(device: PlanningDevice) -> bool:
    """Returns whether a table has a device of this name."""
    try:
        named(device.name)
    except ValueError:
        return False
    return True


def _detected(name: str | None) -> PlanningDevice:
    """Returns this machine's GPU of one or any back end, or the default device."""
    for backend in [registry.named(name)] if name else registry.every():
        device: PlanningDevice | None = backend.detect_device()
        if device is not None:
            return device
    return registry.named(name or registry.FIRST).traits.default_device
