"""What a plan for a CUDA device should cost.

A model, with constants out of the study that docs/lab has: one NVIDIA H200, 4-bit
weights with groups of 128. A plan takes the longest of three times (memory traffic as
far as its warps can ask for it, what a multiprocessor issues and waits for, matrix
products), and a price for each piece of work and each further launch. Other devices are
scaled by multiprocessors, bandwidth and matrix units alone.
"""

from typing import NamedTuple

from mlx_marlin.backends.cuda import limits, pipelined
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import Work
from mlx_marlin.planning.work.tiles import Kernel, k_tile
from mlx_marlin.weights.formats import TILE_N

STATED_BANDWIDTH = 1.05
"""Bandwidth in the stated one's terms that any number of warps would reach, and what
one warp of a multiprocessor can have: fitted to four times that reading 117 MB took
with 14 to 32 warps, within 2 %; with 8, 15 % too fast (measured, docs/lab)."""
WARP_BANDWIDTH = 5.0e9
"""Bytes a second of one warp: the second half of that fit."""
STEP_SECONDS = (450e-9, 860e-9, 1040e-9, 1225e-9)
"""What a warp of "mma" takes for 32 columns and 64 of k, by fragments_m: instructions
and waits for its own products (measured, docs/lab, step 29: 20.2 us for 16 rows of
5120→17408 with 20 warps, 13.7 us and 19.6 for 16 and 32 rows of 14336→4096 with 16; the
first is a guess, because there memory takes longer, and the third lies between)."""
TILE_SECONDS = (58e-9, 78e-9, 97e-9, 117e-9)
"""What a multiprocessor takes in "mma_staged" for a packed tile and 128 of k, by
fragments_m: what its warps issue, and their products (measured, docs/lab, step 29:
8192→28672, 5120→17408 and 4096→14336 agree within 5 %, but 24 rows of the first, which
take 12 % longer)."""
FILL_SECONDS = (105e-9, 130e-9, 212e-9, 295e-9)
"""What filling a stage takes its four warps, which few tiles side by side wait for
(measured, docs/lab: 14336→4096 in step 29; in step 44, of tiles with 24 rows two
shapes and with 32 rows nine, k from 4096 to 28672, on an H200 and an H100, within 6 %).
"""
STAGE_SECONDS = {2: 315e-9, 3: 350e-9, 4: 376e-9, 6: 475e-9, 8: 526e-9}
"""What a multiprocessor takes in "wgmma" for four packed tiles and 128 of k, by
fragments_m: decoding and matrix products, which do not hide each other (measured,
docs/lab, step 29: 8192→28672; 5120→17408 is up to 11 % faster)."""
PIECE_SECONDS = 2.5e-6
"""To begin and end a piece of work: first loads, and the sums of a block's warps (a
guess)."""
FIRST_STAGE_SECONDS = 1e-6
"""Until the first stage of x is full, for which all others wait (fitted: with it one
`TILE_SECONDS` of 16 rows serves 4096→4096 and 8192→28672, within 6 %)."""
FURTHER_LAUNCH = {"mma": 8e-6, "mma_staged": 6e-6, "wgmma": 6e-6}
"""Seconds for the launch that adds splits up: 3 us of its own, and what products take
longer than their stages which leave it their sums (measured, docs/lab, step 43: 3
us and more; those of "mma" 5). MLX's host takes 6 beside them."""
NORM_SECONDS = 3e-6
"""For a piece of work whose rows are normalized before (measured roughly, by a clock
that was taken out, docs/lab: 1.5 to 2.7 us for one row, 3.3 for 8)."""
OWN_NORM_SECONDS = 7e-6
"""For a norm of its own before a product: 3 us of the device and 4 of the host, which
has as much to do (measured, docs/lab)."""
OWN_ROPE_SECONDS = 5e-6
"""For a rope of its own after a product, with the changes of shape that it needs: so
much, 3 to 5 us, was spared a layer with each (measured, docs/lab)."""
OWN_HEAD_NORM_SECONDS = 4e-6
"""For a norm of heads of its own, one of q and one of k: 2 us of the device (measured,
docs/lab) and as much of the host (a guess)."""
MEETING_SECONDS = {"split_k": 6e-12, "stream_k": 12e-12}
"""Seconds for each element of a result whose tiles are split, by strategy, others as
"stream_k". With them 64 rows of four shapes cost 7 to 9 us beside their stages, and 64
of 5120→17408 as streams 49 in all (measured, docs/lab, step 43: 6.4 to 11.3, and
48.9)."""
MOST_WARPS = (28, 20, 16, 16)
"""Warps of a block of "mma" by fragments_m, unless others are asked for: more warps
hide more waits, until their registers do not hold the sums (measured, docs/lab)."""
WEIGHTS = TILE_N * 64
"""Weights of a step."""


class CandidateConfig(NamedTuple):
    """A plan before it is one: which are compared are many."""

    kernel: Kernel
    fragments_m: int
    work: Work
    tiles_n: int
    """simdgroups_n"""
    warps_k: int
    """simdgroups_k"""


def prediction(
    problem: Problem, config: CandidateConfig, device: CudaDevice
) -> Prediction:
    """Returns what the model says about a way to compute a product."""
    work, tiles_n = config.work, config.tiles_n
    longest = work.longest  # where a minimum moves cuts, all of them are looked at
    busy = work.threadgroups - work.idle
    each = -(-busy // device.multiprocessors)  # of the fullest multiprocessor
    resident = _resident(config, each)
    turns = -(-each // resident)
    trips = k_tile(problem.group_size) // 64
    step_bytes = problem.weight_bytes / (problem.batch * problem.n * problem.k)
    read = each * tiles_n * longest * trips * WEIGHTS * step_bytes
    share = STATED_BANDWIDTH * device.bandwidth_gbs * 1e9 / device.multiprocessors
    warps = resident * tiles_n * config.warps_k
    rate = 1 / (1 / share + 1 / (warps * WARP_BANDWIDTH))
    # All times are a mean multiprocessor's, which the fullest one's stretch.
    mean = work.total / (device.multiprocessors * each * longest)
    elements = problem.batch * problem.m * problem.n
    sums = 8 * elements * work.pieces / work.tiles
    met = work.is_split * sums / (device.bandwidth_gbs * 1e9)
    further = _further(config, elements) if work.is_split else 0.0
    rows = limits.FRAGMENT_ROWS * config.fragments_m
    columns = work.tiles // -(-problem.m // rows) * tiles_n * TILE_N
    padded = -(-problem.m // limits.FRAGMENT_ROWS) * limits.FRAGMENT_ROWS
    pieces = -(-work.pieces // busy)
    begun = PIECE_SECONDS + FIRST_STAGE_SECONDS * (config.kernel in pipelined.KERNELS)
    begun += NORM_SECONDS * (problem.norm is not None)
    return Prediction(
        memory=mean * (read / rate + met),
        issue=mean * turns * _issue(config, longest * trips),
        loads=0.0,
        matrix=2 * padded * columns * problem.k / (device.tflops * 1e12),
        busy=mean,
        fill=1.0,
        dispatch=turns * pieces * begun + further,
    )


def _further(config: CandidateConfig, elements: int) -> float:
    """Returns the seconds that splits cost beside what is moved for them."""
    runs = MEETING_SECONDS["stream_k"]
    each = MEETING_SECONDS.get(config.work.strategy, runs)
    return FURTHER_LAUNCH[config.kernel] + elements * each


def _resident(config: CandidateConfig, each: int) -> int:
    """Returns how many of a multiprocessor's blocks it has at a time."""
    if config.kernel in pipelined.KERNELS:
        return 1
    most = MOST_WARPS[config.fragments_m - 1]
    return max(min(each, most // (config.tiles_n * config.warps_k)), 1)


def _issue(config: CandidateConfig, steps: int) -> float:
    """Returns the seconds of a block's `steps` of 64 values of k."""
    if config.kernel == "mma":
        return -(-steps // config.warps_k) * STEP_SECONDS[config.fragments_m - 1]
    stages = -(-steps // 2)
    if config.kernel == "wgmma":
        warps = pipelined.columns("wgmma", config.tiles_n)
        return warps // 4 * stages * STAGE_SECONDS[config.fragments_m]
    tiles = config.tiles_n * TILE_SECONDS[config.fragments_m - 1]
    return stages * max(tiles, FILL_SECONDS[config.fragments_m - 1])
