"""The GPU to plan for: this machine's, or one that the environment names."""

import os
import re

from mlx_marlin import state
from mlx_marlin.backends import registry
from mlx_marlin.planning.device import PlanningDevice, UnknownDeviceError

ENVIRONMENT = "MLX_MARLIN_DEVICE"
"""Names the device to plan for: "Apple M3 Max", "Apple M3 Max, 30 cores" or "NVIDIA
H200"."""
WISH = re.compile(r"(?P<name>[^:,]+?)([:,]\s*(?P<cores>\d+)(\s*cores?)?)?")
"""Format of that variable."""


@state.cache()
def current(backend: str | None = None) -> PlanningDevice:
    """Returns the device to plan for.

    It is the device that the environment variable MLX_MARLIN_DEVICE names, if it is
    set; otherwise this machine's GPU; otherwise the default device of the first back
    end. Variables of MLX that change a device are respected.

    Args:
        backend: The back end in use. Others are imported only if the variable names a
            device that this one does not know.

    Raises:
        ValueError: If a variable does not name a device or an architecture.
    """
    wish = os.environ.get(ENVIRONMENT)
    if not wish:
        return _detected(backend).in_mlx()
    try:
        device = parse(wish, backend)
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}={wish!r}: {error}") from None
    return device.in_mlx()


def named(
    name: str, cores: int | None = None, first: str | None = None
) -> PlanningDevice:
    """Returns a device by its name.

    Args:
        name: A name such as "Apple M3 Max", "M3 Max", "NVIDIA H200" or "H200".
        cores: GPU cores or multiprocessors. Default: the largest variant's.
        first: The back end to ask first.

    Raises:
        ValueError: If no back end knows the name.
    """
    errors = []
    for backend in registry.every(first):
        try:
            found: PlanningDevice = backend.find_device(name, cores)
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


def parse(text: str, first: str | None = None) -> PlanningDevice:
    """Returns the device that "M3 Max", "M3 Max, 30 cores" or "M3 Max:30" names.

    Args:
        text: The name.
        first: The back end to ask first.

    Raises:
        ValueError: If the text does not name a device.
    """
    found = WISH.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            "expected a chip, and its core count if need be, as in 'Apple M3 Max' or "
            "'Apple M3 Max, 30 cores'"
        )
    cores = found["cores"]
    return named(found["name"], int(cores) if cores else None, first)


def _detected(name: str | None) -> PlanningDevice:
    """Returns this machine's GPU of one or any back end, or the default device."""
    for backend in [registry.named(name)] if name else registry.every():
        device: PlanningDevice | None = backend.detect_device()
        if device is not None:
            return device
    return registry.named(name or registry.FIRST).traits.default_device
