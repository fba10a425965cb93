"""How many blocks of a plan are resident on a multiprocessor at a time."""

from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning.device import Residency

MANY_WARPS, FEW_WARPS = 64, 48
"""Most warps of a multiprocessor: of compute capability 8.0, 9 and 10, and of the
others (NVIDIA, CUDA C++ Programming Guide, technical specifications)."""
RESERVED_BYTES = 1024
"""Shared memory that the system takes for each block. A multiprocessor has as much more
than the most that one block may use (likewise)."""


def residency(plan: CudaPlan, device: CudaDevice) -> Residency:
    """Returns how many blocks are resident; registers are left out.

    The compiler decides the registers of a thread, and nothing here asks it.
    """
    has_many = device.capability == (8, 0) or device.capability[0] in (9, 10)
    warps = MANY_WARPS if has_many else FEW_WARPS
    busy = plan.work.threadgroups - plan.work.idle
    shared = device.shared_bytes + RESERVED_BYTES
    return Residency(
        simdgroups=plan.simdgroups,
        max_simdgroups=warps,
        threadgroups={
            "launched threadgroups": -(-busy // device.multiprocessors),
            "threadgroup memory": shared // (plan.threadgroup_bytes + RESERVED_BYTES),
            "threads": warps // plan.simdgroups,
        },
        assumed="no limit by registers",
    )
