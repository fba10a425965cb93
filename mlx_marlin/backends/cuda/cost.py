"""Cost model of the CUDA kernels.

The constants are those of the study in docs/lab: one NVIDIA H200, 4-bit weights with
groups of 128. A plan takes the longest of three times (memory traffic, limited by the
requests of its warps; instruction issue and latency of a multiprocessor; matrix
products), plus a fixed time per piece of work and per further launch. Other devices are
scaled by multiprocessors, bandwidth and throughput only.
"""

from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Prediction
from mlx_marlin.planning.work.tiles import k_tile
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_N

STATED_BANDWIDTH = 1.05
"""Asymptotic bandwidth of many warps, relative to the stated one. Together with
`WARP_BANDWIDTH` fitted to four times of reading 117 MB with 14 to 32 warps, within 2 %;
with 8 warps the model is 15 % too fast (measured, docs/lab)."""
WARP_BANDWIDTH = 5.0e9
"""Bandwidth of one warp of a multiprocessor, in bytes per second (same fit)."""
STEP_SECONDS = (450e-9, 860e-9, 1040e-9, 1225e-9)
"""Time of a warp of "mma" for 32 columns and 64 of k, by fragments_m: instructions and
the latency of its products. Measured (docs/lab, step 29): 20.2 us for 16 rows of
5120→17408 with 20 warps; 13.7 and 19.6 us for 16 and 32 rows of 14336→4096 with 16. The
first value is a guess, because memory takes longer; the third is interpolated."""
TILE_SECONDS = (58e-9, 78e-9, 105e-9, 117e-9)
"""Time of a multiprocessor in "mma_staged" for a packed tile and 128 of k, by
fragments_m: instruction issue and products. Measured (docs/lab, step 29): 8192→28672,
5120→17408 and 4096→14336 agree within 5 %. For 24 rows, 97 ns with 4 tiles side by side
and 110 with 7 (2026-11-24)."""
FILL_SECONDS = (105e-9, 130e-9, 212e-9, 295e-9)
"""Time in which four warps fill a stage, by fragments_m; it dominates if few tiles are
side by side. Measured (docs/lab): 14336→4096 in step 29; in step 44 two shapes with 24
rows and nine with 32 rows, k from 4096 to 28672, on an H200 and an H100, within 6 %."""
STAGE_SECONDS = {2: 315e-9, 3: 350e-9, 4: 376e-9, 6: 475e-9, 8: 526e-9}
"""Time of a multiprocessor in "wgmma" for four packed tiles and 128 of k, by
fragments_m: decoding and matrix products, which do not overlap. Measured (docs/lab,
step 29): 8192→28672; 5120→17408 is up to 11 % faster."""
PIECE_SECONDS = 2.5e-6
"""Time to start and end a piece of work: first loads, and adding the sums of a block's
warps (a guess)."""
FIRST_STAGE_SECONDS = 1e-6
"""Time until the first stage of x is full (fitted: with it one `TILE_SECONDS` of 16
rows serves 4096→4096 and 8192→28672, within 6 %)."""
FURTHER_LAUNCH = {"mma": 8e-6, "mma_staged": 6e-6, "wgmma": 6e-6}
"""Time of the launch that adds splits: 3 us of its own, and the time that the first
kernel needs to write its sums. Measured (docs/lab, step 43): 3 us and more, for "mma"
5. The host takes another 6 us, concurrently."""
NORM_SECONDS = 3e-6
"""Time to normalize rows, per piece of work. Measured roughly, with a clock in the
kernel that was removed (docs/lab): 1.5 to 2.7 us for one row, 3.3 us for 8."""
OWN_NORM_SECONDS = 7e-6
"""Time of a separate RMSNorm before a product: 3 us of the device and 4 us of the host
(measured, docs/lab)."""
OWN_ROPE_SECONDS = 5e-6
"""Time of a separate rope after a product, including its reshapes: fusing it saved 3 to
5 us per layer (measured, docs/lab)."""
OWN_HEAD_NORM_SECONDS = 4e-6
"""Time of a separate RMSNorm of heads, for q or for k: 2 us of the device (measured,
docs/lab) and 2 us of the host (a guess)."""
SPLIT_SECONDS = {"split_k": 6e-12, "stream_k": 12e-12}
"""Time per element of a result whose tiles are split, by strategy; that of "stream_k"
for the others. With it 64 rows of four shapes cost 7 to 9 us in addition to their
stages, and 64 rows of 5120→17408 as streams 49 us in all. Measured (docs/lab, step 43):
6.4 to 11.3 us, and 48.9 us."""
MOST_WARPS = (28, 20, 16, 16)
"""Most warps of a block of "mma" without an override, by fragments_m: more warps hide
more latency until their registers cannot hold the sums (measured, docs/lab)."""
WEIGHTS = TILE_N * 64
"""Weights of a step."""
DECODE_BANDWIDTH, DENSE_BANDWIDTH = 0.6, 0.83
"""Share of the stated bandwidth with which a weight is decoded, and read by
`mx.matmul`."""
DENSE_RATE = 0.76
"""Share of the stated operations per second that `mx.matmul` reaches."""
DECODE_SECONDS = 12e-6
"""Time of the two launches, the second of which waits for the first. With these four, a
kernel or decoding is chosen at 128 to 2,048 rows of the five products of a Llama 8B
such that none takes 10 % longer than the other would (measured, docs/cuda.md)."""


def predict(plan: CudaPlan, device: CudaDevice) -> Prediction:
    """Returns the predicted times of a plan."""
    problem, work, tiles_n = plan.problem, plan.work, plan.simdgroups_n
    longest = work.longest  # read once: slow if `minimum` moves cuts
    busy = work.threadgroups - work.idle
    blocks = -(-busy // device.multiprocessors)  # of the most loaded multiprocessor
    resident = _resident(plan, blocks)
    waves = -(-blocks // resident)
    trips = k_tile(problem.group_size) // 64
    weight_size = problem.weight_bytes / (problem.batch * problem.n * problem.k)
    read = blocks * tiles_n * longest * trips * WEIGHTS * weight_size
    share = STATED_BANDWIDTH * device.bandwidth_gbs * 1e9 / device.multiprocessors
    warps = resident * tiles_n * plan.simdgroups_k
    rate = 1 / (1 / share + 1 / (warps * WARP_BANDWIDTH))
    # All times are those of a mean multiprocessor; `busy` converts to the most loaded.
    mean = work.total / (device.multiprocessors * blocks * longest)
    elements = problem.batch * problem.m * problem.n
    sums = 8 * elements * work.pieces / work.tiles
    sums_seconds = work.is_split * sums / (device.bandwidth_gbs * 1e9)
    further = _split_seconds(plan, elements) if work.is_split else 0.0
    rows = limits.FRAGMENT_ROWS * plan.fragments_m
    columns = work.tiles // -(-problem.m // rows) * tiles_n * TILE_N
    padded = -(-problem.m // limits.FRAGMENT_ROWS) * limits.FRAGMENT_ROWS
    pieces = -(-work.pieces // busy)
    piece = PIECE_SECONDS + FIRST_STAGE_SECONDS * (plan.is_pipelined)
    piece += NORM_SECONDS * (problem.norm is not None)
    return Prediction(
        memory=mean * (read / rate + sums_seconds),
        issue=mean * waves * _issue(plan, longest * trips),
        loads=0.0,
        matrix=2 * padded * columns * problem.k / (device.tflops * 1e12),
        busy=mean,
        fill=1.0,
        dispatch=waves * pieces * piece + further,
    )


def decoded_seconds(problem: Problem, device: CudaDevice) -> float:
    """Returns the predicted seconds of decoding a weight and of `mx.matmul` with it."""
    bandwidth = device.bandwidth_gbs * 1e9
    weight = problem.n * problem.k * DTYPE_BYTES[problem.dtype]
    decode = (problem.weight_bytes + weight) / (DECODE_BANDWIDTH * bandwidth)
    arithmetic = problem.flops / (DENSE_RATE * device.tflops * 1e12)
    dense = max(arithmetic, weight / (DENSE_BANDWIDTH * bandwidth))
    return DECODE_SECONDS + decode + dense


def _split_seconds(plan: CudaPlan, elements: int) -> float:
    """Returns the seconds that splits cost besides their memory traffic."""
    default = SPLIT_SECONDS["stream_k"]
    per_element = SPLIT_SECONDS.get(plan.work.strategy, default)
    return FURTHER_LAUNCH[plan.kernel] + elements * per_element


def _resident(plan: CudaPlan, blocks: int) -> int:
    """Returns how many of a multiprocessor's blocks are resident at a time."""
    if plan.is_pipelined:
        return 1
    most = MOST_WARPS[plan.fragments_m - 1]
    return max(min(blocks, most // (plan.simdgroups_n * plan.simdgroups_k)), 1)


def _issue(plan: CudaPlan, steps: int) -> float:
    """Returns the seconds in which a block computes `steps` steps of 64 k."""
    if plan.kernel == "mma":
        return -(-steps // plan.simdgroups_k) * STEP_SECONDS[plan.fragments_m - 1]
    stages = -(-steps // 2)
    if plan.kernel == "wgmma":
        warps = limits.warp_columns("wgmma", plan.simdgroups_n)
        return warps // 4 * stages * STAGE_SECONDS[plan.fragments_m]
    tiles = plan.simdgroups_n * TILE_SECONDS[plan.fragments_m - 1]
    return stages * max(tiles, FILL_SECONDS[plan.fragments_m - 1])


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
