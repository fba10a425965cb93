"""Chooses the back end that runs our kernels in this process.

It is Metal or CUDA if MLX has such a device, the emulator if MLX has none, and stock
MLX if the emulator cannot run either.
"""

import os
import warnings
from typing import Any

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import registry
from mlx_marlin.backends.base import Backend, Traits

BACKENDS = ("metal", "cuda", "emulator", "stock")
ON_GPU = ("metal", "cuda")
"""Back ends on a GPU, where stock MLX can serve a call too."""
DEVICES = {"metal": "Metal", "cuda": "CUDA"}
"""Their names in messages."""
ENVIRONMENT = "MLX_MARLIN_BACKEND"


@state.cache()
def backend() -> str:
    """Returns the name of the back end: "metal", "cuda", "emulator" or "stock".

    `MLX_MARLIN_BACKEND` overrides the choice. The result is cached.
    """
    name, reason = choice()
    if name == "stock" and forced_backend() is None and not _default_is_gpu():
        warnings.warn(
            f"mlx_marlin: stock MLX serves every call, because {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return name


def active() -> Backend:
    """Returns the back end; Metal's interface stands in for "emulator" and "stock"."""
    return registry.named(backend())


def of_plan(plan: Any) -> Backend:
    """Returns the back end that has the kernels of a plan.

    It is the active one for plans that are the same in all back ends.
    """
    return registry.named(plan.backend or backend())


def traits() -> Traits:
    """Returns the traits of the back end."""
    return registry.named(backend()).traits


@state.cache()
def choice() -> tuple[str, str]:
    """Returns the name of the back end, and the reason for the choice."""
    wish = forced_backend()
    if wish is not None:
        return wish, f"{ENVIRONMENT}={wish!r} is set"
    # The default device does not matter: it may be another one at the next call.
    for name in ON_GPU:
        if has_device(name):
            return name, f"MLX has a {DEVICES[name]} device"
    if _default_is_gpu():
        return "stock", "MLX's default device is a GPU without Metal and CUDA"
    import metal_emulator

    reason = metal_emulator.unavailable()
    if reason is None:
        return "emulator", "MLX has no GPU here, and the emulator can compile kernels"
    return "stock", (f"there is no Metal here and the emulator cannot run: {reason}")


@state.cache()
def forced_backend() -> str | None:
    """Returns the back end that `MLX_MARLIN_BACKEND` names, or None."""
    wish = os.environ.get(ENVIRONMENT)
    if wish and wish not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT}={wish!r} is not one of {', '.join(BACKENDS)}")
    return wish or None


def has_device(name: str) -> bool:
    """Returns whether MLX has a device for a back end of `ON_GPU`."""
    return bool(getattr(mx, name).is_available())


def missing() -> str | None:
    """Returns why the requested back end cannot run on this machine, or None.

    Graphs of its kernels can still be built and exported.
    """
    wish = forced_backend()
    if wish not in ON_GPU or has_device(wish):
        return None
    others = [name for name in BACKENDS if name not in ON_GPU or has_device(name)]
    return (
        f"{ENVIRONMENT}={wish!r} needs a {DEVICES[wish]} device, and MLX has none "
        f"here: expected {', '.join(others)}, or no value"
    )


def may_hand_over() -> bool:
    """Returns whether a call may go to stock MLX because that is faster.

    It may if stock MLX runs on the same GPU and no back end is forced.
    """
    return backend() in ON_GPU and forced_backend() is None


def _default_is_gpu() -> bool:
    return mx.default_device() != mx.Device(mx.cpu)
