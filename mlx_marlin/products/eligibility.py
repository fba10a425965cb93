"""Why stock MLX serves a call: what our kernels, or the device here, cannot do.

Each reason is a sentence that `why_not` returns.
"""

import os

from mlx_marlin.backends import devices, planner, selection
from mlx_marlin.backends.cuda import device as cuda_device
from mlx_marlin.backends.cuda import mma
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.devices import Target
from mlx_marlin.backends.metal import device
from mlx_marlin.planning.measurement import Result
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem, largest_array
from mlx_marlin.products.request import Kind
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS


def not_here(on_cpu: bool) -> str | None:
    """Says why no kernel of ours can run; None if they can."""
    backend = selection.backend()
    if backend == "stock":
        return "no back end here runs our kernels, or MLX_MARLIN_BACKEND says stock"
    if on_cpu and selection.may_hand_over():
        return "the call runs on the CPU"
    return None


def not_ours(kind: Kind) -> str | None:
    """Says what of a call our kernels do not compute; None if they could."""
    if not kind.transpose and kind.layout == "mlx":
        return "our kernels multiply by the transposed weight only"
    known = FORMATS.get((kind.mode, kind.bits))
    # A packed weight has been checked.
    packed = kind.layout == "marlin"
    if known is None or not (packed or kind.group_size in known.group_sizes):
        return (
            f"{kind.mode} {kind.bits}-bit with group size {kind.group_size} is not "
            f"one of our formats"
        )
    if kind.k % known.k_multiple(kind.group_size):
        return f"our kernels take {kind.mode} with a k that is a multiple of " + (
            f"{known.k_multiple(kind.group_size)}, and k={kind.k}"
        )
    if dtype_name(kind.dtype) not in DTYPE_BYTES:
        return f"our kernels do not compute in {dtype_name(kind.dtype)}"
    batch, m, n = kind.sizes
    if kind.epilogue.gated and selection.backend() != "cuda":
        return "our Metal kernels have no gate in their epilogue"
    if kind.epilogue.rotation is not None and selection.backend() != "cuda":
        return "our Metal kernels rotate no heads"
    if kind.norm is not None and selection.backend() != "cuda":
        return "our Metal kernels take rows as they are"
    of_rows = kind.norm is not None or kind.epilogue.rotation is not None
    if of_rows and len(kind.x_shape) == 1:
        return "our kernels normalize and rotate rows of a matrix"
    if largest_array(m, n, kind.k, kind.bits, batch) >= MOST_ELEMENTS:
        return "our kernels count in 32 bits, and an array is too large for that"
    return None


def not_on_cuda(problem: Problem, transpose: bool) -> str | None:
    """Says what our CUDA kernels lack for a problem; None if they run here, or Metal's.

    `transpose` is whether the product is x @ w.T.
    """
    if selection.backend() != "cuda":
        return None
    if not transpose and problem.batch > 1:
        return "our CUDA kernels multiply a batch by transposed weights only"
    return too_old() or mma.why_not(problem)


def too_old() -> str | None:
    """Says why no kernel of ours runs on the device here; None if they do."""
    here = target()
    if not isinstance(here, CudaDevice) or here.capability >= mma.CAPABILITY:
        return None
    needed = ".".join(map(str, mma.CAPABILITY))
    return f"our CUDA kernels need compute capability {needed}, {here.name} has less"


def faster_elsewhere(problem: Problem, measured: Result | None) -> str | None:
    """Says why stock MLX is the faster; None if it is not, or speed is no reason.

    `measured` is what tuning found for the problem.
    """
    if not selection.may_hand_over():
        return None
    if measured is not None:
        return measured.reason
    return planner.stock_reason(problem, target())


def refuse_variance(invariant: bool, reason: str) -> None:
    """Raises a ValueError if an invariant product would go to stock MLX."""
    if invariant:
        raise ValueError(
            f"invariant=True cannot be kept, because stock MLX would serve the call: "
            f"{reason}"
        )


def target() -> Target:
    """Returns the device that plans are made for: one that the back end runs on.

    Raises:
        ValueError: If MLX_MARLIN_DEVICE names one that it does not.
    """
    here = devices.current()
    on_cuda = selection.backend() == "cuda"
    if isinstance(here, CudaDevice) == on_cuda:
        return here
    wish = os.environ.get(devices.ENVIRONMENT)
    if wish:
        expected = "a CUDA device" if on_cuda else "an Apple chip"
        raise ValueError(
            f"{devices.ENVIRONMENT}={wish!r}: expected {expected}, because our kernels "
            f"run on {selection.backend()}"
        )
    return cuda_device.DEFAULT if on_cuda else device.DEFAULT
