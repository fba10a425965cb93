"""Which back end runs our kernels in this process.

Metal or CUDA where MLX has a device of it, the emulator on a CPU-only MLX, stock MLX
where none can run.
"""

import os
import warnings

import mlx.core as mx

from mlx_marlin import state

BACKENDS = ("metal", "cuda", "emulator", "stock")
ON_GPU = ("metal", "cuda")
"""Those where stock MLX runs on the same GPU."""
DEVICES = {"metal": "Metal", "cuda": "CUDA"}
"""What these are called."""
ENVIRONMENT = "MLX_MARLIN_BACKEND"


@state.cache()
def backend() -> str:
    """Returns what runs our kernels here: "metal", "cuda", "emulator" or "stock".

    `MLX_MARLIN_BACKEND` overrides the choice. Asked once per process.
    """
    name, reason = choice()
    if name == "stock" and forced_backend() is None and not _default_is_gpu():
        warnings.warn(
            f"mlx_marlin: stock MLX serves every call, because {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return name


@state.cache()
def choice() -> tuple[str, str]:
    """Returns the back end and why it is that one."""
    wish = forced_backend()
    if wish is not None:
        return wish, f"{ENVIRONMENT}={wish!r} is set"
    # Whatever the default device is now: it may be another one at the next call.
    for name in ON_GPU:
        if has_device(name):
            return name, f"MLX has a {DEVICES[name]} device"
    if _default_is_gpu():
        return "stock", "MLX's default device is a GPU without Metal and CUDA"
    from mlx_marlin import emulator

    reason = emulator.unavailable()
    if reason is None:
        return "emulator", "MLX has no GPU here, and the emulator can compile kernels"
    return "stock", (f"there is no Metal here and the emulator cannot run: {reason}")


@state.cache()
def forced_backend() -> str | None:
    """Returns the back end that `MLX_MARLIN_BACKEND` asks for, if any.

    Raises:
        ValueError: If it names none of ours.
    """
    wish = os.environ.get(ENVIRONMENT)
    if wish and wish not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT}={wish!r} is not one of {', '.join(BACKENDS)}")
    return wish or None


def has_device(name: str) -> bool:
    """Returns whether MLX has a device for a back end of `ON_GPU`."""
    return bool(getattr(mx, name).is_available())


def missing() -> str | None:
    """Returns why the back end that is forced cannot compute here, or None.

    Graphs of its kernels can still be built and exported.
    """
    wish = forced_backend()
    if wish not in ON_GPU or has_device(wish):
        return None
    others = [each for each in BACKENDS if each not in ON_GPU or has_device(each)]
    return (
        f"{ENVIRONMENT}={wish!r} needs a {DEVICES[wish]} device, and MLX has none "
        f"here: expected {', '.join(others)}, or no value"
    )


def may_hand_over() -> bool:
    """Whether stock MLX, or MLX's plain product, may serve what is faster there.

    It runs on the same GPU then, and nobody insists on a back end to see it run.
    """
    return backend() in ON_GPU and forced_backend() is None


def _default_is_gpu() -> bool:
    return mx.default_device() != mx.Device(mx.cpu)
