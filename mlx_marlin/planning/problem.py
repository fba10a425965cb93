"""A problem: the complete description of one quantized matrix product.

`y[m, n] = x[m, k] @ W[n, k]^T` with a quantized W, or a batch of such products with an
x and a W each. In messages a shape is written k→n, after the number of rows.
"""

from dataclasses import dataclass, replace
from operator import index

from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.weights.formats import (
    DTYPE_BYTES,
    LAYOUTS,
    MODE_DEFAULTS,
    MODES,
    SCALE_BYTES,
    TILE_K,
    TILE_N,
    WORD_BITS,
    Format,
    defaults_of,
    format_of,
)

INVARIANT_ROWS = 8
"""Rows for which the splits of an invariant product are chosen, whatever its m."""
MOST_ELEMENTS = 2**31
"""Upper bound, exclusive, of an array's elements: the shaders index with 32 bits."""


def largest_array(m: int, n: int, k: int, bits: int, batch: int = 1) -> int:
    """Returns the elements of a product's largest array: x, the codes or the result.

    In a batch, packed weights are padded to whole tiles.
    """
    if batch > 1:
        n, k = (-(-size // tile) * tile for size, tile in ((n, TILE_N), (k, TILE_K)))
    # Codes of odd widths are loaded in smaller units than words if groups are short.
    word = WORD_BITS // 2 if bits % 2 else WORD_BITS
    return batch * max(m * k, n * k * bits // word, m * n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A quantized matrix product: all that a plan depends on, except the device.

    Attributes:
        m: Rows of the activations and of the result, at least 1.
        n: Rows of the weight and columns of the result, at least 1.
        k: Columns of the activations and of the weight, a multiple of `group_size`.
        batch: Number of products, each with its own weight, at least 1.
        group_size: Weights along k that share one scale; k for a whole row.
        bits: Bits of a code.
        mode: Quantization mode, with MLX's name.
        dtype: Dtype of the activations and the result.
        scale_dtype: Dtype of the scales and biases.
        layout: Memory layout of the codes: "mlx" (native) or "marlin" (packed).
        epilogue: Operations on the product before it is stored.
        invariant: Whether a row of the result must be bitwise independent of m and of
            the other rows.
        global_scale: Whether the weight has one additional scale for all groups.
        norm: RMSNorm epsilon of the rows of x, or None. The weight [k] is an array of
            the call.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"
    dtype: str = "float16"
    scale_dtype: str = "float16"
    layout: str = "mlx"
    epilogue: Epilogue = PLAIN
    invariant: bool = False
    global_scale: bool = False
    norm: float | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_format()
        self.epilogue.check_product(self.n, self.batch)
        if self.norm is not None and (self.norm < 0 or self.batch > 1):
            raise ValueError(
                f"norm={self.norm} must be at least 0 and of one product, got "
                f"batch={self.batch}"
            )

    def _check_sizes(self) -> None:
        if self.m < 1 or self.n < 1 or self.k < 1:
            raise ValueError(
                f"m, n and k must be at least 1, got m={self.m}, n={self.n}, k={self.k}"
            )
        if self.batch < 1:
            raise ValueError(f"batch={self.batch} must be at least 1")
        largest = largest_array(self.m, self.n, self.k, self.bits, self.batch)
        if largest >= MOST_ELEMENTS:
            raise ValueError(
                f"m={self.m}, n={self.n}, k={self.k}, batch={self.batch} make an array "
                f"of {largest} elements, expected fewer than {MOST_ELEMENTS}"
            )

    def _check_format(self) -> None:
        format = format_of(self.mode, self.bits)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} is not one of {[*LAYOUTS]}")
        if self.layout not in format.layouts:
            raise ValueError(
                f"layout={self.layout!r} is not one of {format.layouts}, in which "
                f"{self.mode} weights lie"
            )
        wrong = format.why_not(self.group_size, self.k, self.layout)
        if wrong is not None:
            raise ValueError(wrong)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {[*DTYPE_BYTES]}")
        if self.scale_dtype not in format.scale_dtypes:
            raise ValueError(
                f"scale_dtype={self.scale_dtype!r} is not one of "
                f"{[*format.scale_dtypes]}"
            )
        if self.global_scale and self.mode != "nvfp4":
            raise ValueError(f"global_scale=True is for nvfp4, got mode={self.mode!r}")

    @property
    def format(self) -> Format:
        """The row of the format table."""
        return format_of(self.mode, self.bits)

    @property
    def in_float(self) -> bool:
        """Whether weights and activations are multiplied as float32.

        Needed for activations other than float16, for numbers of a codebook, and for
        integer codes in groups of 16, whose fragments hold scaled weights.
        """
        return self.widens or self.dtype != "float16"

    @property
    def widens(self) -> bool:
        """Whether no half holds the operands that weights become."""
        scaled = self.group_size == 16 and self.format.codes != "floating"
        return scaled or self.format.has_codebook

    @property
    def fragment_bytes(self) -> int:
        """Bytes of a weight or an activation in a fragment."""
        return 4 if self.in_float else 2

    @property
    def groups(self) -> int:
        """Quantization groups along k."""
        return self.k // self.group_size

    @property
    def columns(self) -> int:
        """Columns of the result: n, or n / 2 with a gated epilogue."""
        return self.n // 2 if self.epilogue.gated else self.n

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result: (m, columns), or (batch, m, columns) for a batch."""
        one = self.m, self.columns
        return one if self.batch == 1 else (self.batch, *one)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes."""
        return self.batch * self.n * self.k * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and biases."""
        records, elements = self.format.records(self.k, self.group_size)
        size = SCALE_BYTES[self.scale_dtype]
        return self.batch * self.n * records * elements * size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the quantized weight: codes, scales and biases."""
        return self.code_bytes + self.scale_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations."""
        return self.batch * self.m * self.k * DTYPE_BYTES[self.dtype]

    @property
    def output_bytes(self) -> int:
        """Bytes of the result."""
        return self.batch * self.m * self.columns * DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Minimal memory traffic: every operand and result once."""
        results = 1 + self.epilogue.operands
        operands = self.weight_bytes + self.activation_bytes
        return operands + results * self.output_bytes

    def explain(self) -> str:
        """Returns a one-line description of the problem."""
        rows = "row" if self.m == 1 else "rows"
        parts = [
            f"{self.m} {rows} of {self.k}→{self.n}",
            f"each of {self.batch} weights" if self.batch > 1 else "",
            f"{self.mode} {self.bits}-bit",
            f"group {self.group_size}",
            f"{self.dtype} with {self.scale_dtype} scales",
            "a global scale" if self.global_scale else "",
            f"{self.layout} layout",
            "" if self.norm is None else f"normalized rows (eps {self.norm:g})",
            self.epilogue.explain(),
            "the same bits for any m" if self.invariant else "",
        ]
        return ", ".join(filter(None, parts))


def in_stock_mlx(problem: Problem) -> Problem | None:
    """Returns the closest product that stock MLX has, or None.

    Integers without biases become affine ones of as many bits. MLX has no codebooks,
    and not all group sizes.
    """
    mode = problem.mode if problem.mode in MODE_DEFAULTS else "affine"
    sizes = format_of(mode, problem.bits).group_sizes
    if problem.format.has_codebook or problem.group_size not in sizes:
        return None
    scales = format_of(mode, problem.bits).scale_dtypes
    scale_dtype = problem.scale_dtype
    if scale_dtype not in scales:  # of super-blocks
        scale_dtype = problem.dtype
    return replace(problem, mode=mode, layout="mlx", scale_dtype=scale_dtype)


def problem_of(
    m: int,
    n: int,
    k: int,
    *,
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
    dtype: str = "float16",
    layout: str = "mlx",
    epilogue: Epilogue = PLAIN,
    invariant: bool = False,
    batch: int = 1,
    norm: float | None = None,
) -> Problem:
    """Returns a problem; the mode determines what is not given of the format.

    `dtype`: dtype of the activations, the result, and scales that are not bytes.
    """
    m, n, k = _integer("m", m), _integer("n", n), _integer("k", k)
    batch = _integer("batch", batch)
    group_size = None if group_size is None else _integer("group_size", group_size)
    bits = None if bits is None else _integer("bits", bits)
    for name, value in {"mode": mode, "dtype": dtype, "layout": layout}.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r}, expected a name as a string")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {MODES}")
    default_group, bits = defaults_of(mode, bits)
    return Problem(
        m=m,
        n=n,
        k=k,
        batch=batch,
        group_size=default_group if group_size is None else group_size,
        bits=bits,
        mode=mode,
        dtype=dtype,
        scale_dtype=format_of(mode, bits).scale_dtype(dtype),
        layout=layout,
        epilogue=epilogue,
        invariant=invariant,
        norm=norm,
    )


def _integer(name: str, value: object) -> int:
    """Returns an argument as a Python int; raises ValueError for bool and others."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}={value!r}, expected an integer")
    return index(value)
