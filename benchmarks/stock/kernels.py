"""The kernel and the grid that stock MLX 0.32.4 launches for a product.

This is the choice of `mx.quantized_matmul(transpose=True)` by format, rows, sizes and
architecture, including its errors. A format that MLX does not have is treated as the
affine format with as many bits. A batch uses the third dimension of the grid, and its k
is never split.
"""

from dataclasses import dataclass
from math import ceil

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import WORD_BITS

THREADGROUPS = 512
"""Target number of threadgroups of stock MLX when it splits k."""
WIDE_ROWS = 5
"""Most rows of a threadgroup of `qmv_wide`."""
TILE = 32
"""Rows and columns of a tile of `qmm_t`, and the smallest step of a split."""

LIMITS = {
    "ultra": (32, 18, 12),
    "M5": (33, 25, 13),
    "M3": (13, 15, 13),
    "M1": (14, 10, 6),
    "M1 Pro": (14, 10, 7),
    "A13": (18, 12, 10),
}
"""Fewest rows for which stock MLX uses a matrix kernel, for max(k, n) up to 2048, up to
4096, and larger, by the first chip with these limits. "A13" is any chip before the
M1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Division of the result by a kernel."""

    columns: int  # Columns of the result that a threadgroup computes
    simdgroups: int  # Simdgroups of a threadgroup
    # Simdgroups that a core needs to hide latency: 8 with 1 KB in flight each, 12 if
    # barriers separate loads from products (fit: two published times with 80 and 128
    # threadgroups, less 20 us for the call)
    to_fill: int


VECTOR = Geometry(columns=8, simdgroups=2, to_fill=8)
MATRIX = Geometry(columns=TILE, simdgroups=4, to_fill=12)
HALF_VECTOR = Geometry(columns=4, simdgroups=2, to_fill=8)
KERNELS = {
    "qmv_quad": Geometry(columns=64, simdgroups=1, to_fill=8),
    "qmv": VECTOR,
    "qmv_fast": VECTOR,
    "qmv_wide": VECTOR,
    "qmm_t": MATRIX,
    "qmm_t_splitk": MATRIX,
    "qmm_t_nax": Geometry(columns=64, simdgroups=4, to_fill=12),
}
FLOATING = "fp_"
"""Prefix of the names of kernels for floating-point codes."""
KERNELS |= {FLOATING + name: geometry for name, geometry in KERNELS.items()}
# 16 lanes along k; the affine kernel has 8.
KERNELS["fp_qmv_wide"] = HALF_VECTOR
# Two rows of w per simdgroup; the other kernels have four.
KERNELS |= {"fp_qmv_2": HALF_VECTOR, "fp_qmv_fast_2": HALF_VECTOR}
TWO_ROWS = ("nvfp4", "applegpu_g17s", 4096)
"""Mode, architecture and smallest n for which MLX uses the kernels with two rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockCall:
    """A launch of stock MLX for a product."""

    kernel: str  # One of `KERNELS`
    rows: int  # Rows of x that a threadgroup computes
    passes: int  # How often the whole weight is read and decoded
    split_k: int  # Number of splits of k, each with its own threadgroups
    threadgroups: int  # Threadgroups of all products and splits

    @property
    def family(self) -> str:
        """The kernel's name without the prefix and suffix for its codes."""
        return self.kernel.removeprefix(FLOATING).removesuffix("_2")

    @property
    def dispatches(self) -> int:
        """Number of kernel launches; a second one adds the splits."""
        return 1 + (self.split_k > 1)

    @property
    def geometry(self) -> Geometry:
        """Division of the result by the kernel."""
        return KERNELS[self.kernel]


def stock_call(problem: Problem, device: Device) -> StockCall:
    """Returns the launch of stock MLX for `mx.quantized_matmul(transpose=True)`."""
    if problem.m >= _vector_limit(problem, device):
        return _matrix_call(problem, device)
    kernel, rows = _vector_kernel(problem, device)
    kernel = _named(kernel, problem, device)
    passes = ceil(problem.m / rows)
    return StockCall(
        kernel=kernel,
        rows=rows,
        passes=passes,
        split_k=1,
        threadgroups=problem.batch * passes * ceil(problem.n / KERNELS[kernel].columns),
    )


def stock_split(problem: Problem) -> int:
    """Returns the number of splits of k of stock MLX's matrix kernel.

    The number that gives 512 threadgroups is lowered until it divides the groups along
    k: 11008→2048 with groups of 128 has 2 splits instead of 8.
    """
    step = max(problem.group_size, TILE)
    tiles = ceil(problem.n / TILE) * ceil(problem.m / TILE)
    split = min(max(1, THREADGROUPS // tiles), problem.k // step)
    while problem.k % (split * step):
        split -= 1
    return split


def _vector_limit(problem: Problem, device: Device) -> int:
    """Returns the fewest rows for which stock MLX uses a matrix kernel."""
    small, middle, large = LIMITS[_limits_of(device)]
    longest = max(problem.n, problem.k)
    return small if longest <= 2048 else middle if longest <= 4096 else large


def _limits_of(device: Device) -> str:
    """Returns the key of `LIMITS` for a device."""
    number, letter = device.arch_gen, device.size_letter
    if letter == "d":
        return "ultra"
    if number == 13 and letter == "s":
        return "M1 Pro"
    first = ((17, "M5"), (15, "M3"), (13, "M1"))
    return next((name for least, name in first if number >= least), "A13")


def _vector_kernel(problem: Problem, device: Device) -> tuple[str, int]:
    """Returns the kernel for few rows and the rows of a threadgroup."""
    bits = problem.bits
    if problem.k in (64, 128) and bits & (bits - 1) == 0:
        return "qmv_quad", 1
    if problem.m > 1 and (is_floating(problem) or device.arch_gen >= 15):
        passes = ceil(problem.m / WIDE_ROWS)
        return "qmv_wide", ceil(problem.m / passes)
    step = _pack_factor(bits) * (1 if bits == 2 else 2) * 32
    return "qmv" if problem.k % step else "qmv_fast", 1


def codes_at_a_time(bits: int) -> int:
    """Returns the codes of a row that a lane of `qmv_fast` loads at a time."""
    return _pack_factor(bits) * (1 if bits <= 2 else 2)


def is_floating(problem: Problem) -> bool:
    """Returns whether codes are floating-point, for which MLX has separate kernels."""
    return problem.format.codes == "floating"


def _pack_factor(bits: int) -> int:
    """Returns the codes of a pack: those of a word, or the fewest that fill bytes."""
    return {3: 8, 5: 8, 6: 4}.get(bits, WORD_BITS // bits)


def _named(kernel: str, problem: Problem, device: Device) -> str:
    """Returns the name of a kernel for the codes of a problem."""
    if not is_floating(problem):
        return kernel
    mode, arch, least = TWO_ROWS
    two = (problem.mode, device.arch) == (mode, arch) and problem.n >= least
    return FLOATING + kernel + "_2" * (two and kernel in ("qmv", "qmv_fast"))


def _matrix_call(problem: Problem, device: Device) -> StockCall:
    """Returns the launch for many rows; split kernels do not use the tensor units."""
    split = stock_split(problem) if problem.batch == 1 else 1
    nax = split == 1 and device.has_tensor_units and problem.k % 64 == 0
    kernel = "qmm_t_nax" if nax else "qmm_t" if split == 1 else "qmm_t_splitk"
    rows = 2 * TILE if nax and problem.m > TILE else TILE
    passes = ceil(problem.m / rows)
    columns = KERNELS[kernel].columns
    return StockCall(
        kernel=_named(kernel, problem, device),
        rows=rows,
        passes=passes,
        split_k=split,
        threadgroups=problem.batch * passes * ceil(problem.n / columns) * split,
    )
