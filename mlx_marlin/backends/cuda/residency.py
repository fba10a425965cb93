"""How many blocks of a plan are resident on a multiprocessor at a time."""

from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning.device import Residency

MAX_WARPS = {(8, 0): 64, (9, 0): 64, (10, 0): 64}
"""Most warps of a multiprocessor by compute capability (NVIDIA, CUDA C++ Programming
Guide, technical specifications)."""
FEWEST_MAX_WARPS = 48
"""Those of every other compute capability from 8.0 on."""
RESERVED_BYTES = 1024
"""Shared memory that the system takes for each block. A multiprocessor has as much more
than the most that one block may use (likewise)."""


def residency(plan: CudaPlan, device: CudaDevice) -> Residency:
    """Returns how many blocks are resident; registers are left out.

    The compiler decides the registers of a thread, and nothing here asks it.
    """
    warps = MAX_WARPS.get(device.capability, FEWEST_MAX_WARPS)
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
