"""The question: one quantized product, as a value.

`y[m, n] = x[m, k] @ W[n, k]^T`, with W in few bits, or a batch of such products, each
with x and W of its own. In text a shape is k→n, with the rows m beside it.
"""

from dataclasses import dataclass
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
    format_of,
)

MOST_ELEMENTS = 2**31
"""An array must have fewer: the shaders count in 32 bits."""


def largest_array(m: int, n: int, k: int, bits: int, batch: int = 1) -> int:
    """Returns the elements of a product's largest array: x, the words or the result.

    Each weight of several is padded to whole tiles when packed.
    """
    if batch > 1:
        n, k = (-(-size // tile) * tile for size, tile in ((n, TILE_N), (k, TILE_K)))
    # Odd widths are loaded by bytes where groups are short: these have to be counted.
    word = WORD_BITS // 2 if bits % 2 else WORD_BITS
    return batch * max(m * k, n * k * bits // word, m * n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A quantized matrix product, described completely enough to plan it.

    Attributes:
        m: Rows of the activations and of the result, at least 1.
        n: Rows of the weight, which are the result's columns, at least 1.
        k: Length of the sum; a multiple of `group_size`.
        batch: Products of this shape, each with a weight of its own, at least 1.
        group_size: Weights along k that share one scale; k itself for a whole row.
        bits: Bits of one code.
        mode: MLX's name of the quantization scheme.
        dtype: Of the activations and the result.
        scale_dtype: Of the scales and biases.
        layout: How the codes lie in memory: "mlx" (native) or "marlin" (packed).
        epilogue: What happens to the product before it is stored.
        invariant: Whether a row's bits must not depend on the other rows, or on m.
        global_scale: Whether the weight has one scale more for all of it.
        norm: What is added to the mean square of each row of x, which is divided by
            the root of that and multiplied by a weight [k] before, as by MLX's
            `rms_norm`; None if rows are multiplied as they are.
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
                f"of {largest} "
                f"elements, expected fewer than {MOST_ELEMENTS}"
            )
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
        parts = self.epilogue.parts
        if parts and (sum(parts) != self.n or self.batch > 1):
            raise ValueError(
                f"parts={parts} do not add up to n={self.n} of one product, got "
                f"batch={self.batch}"
            )
        if self.norm is not None and (self.norm < 0 or self.batch > 1):
            raise ValueError(
                f"norm={self.norm} must be at least 0 and of one product, got "
                f"batch={self.batch}"
            )
        rotation = self.epilogue.rotation
        if rotation is not None and (
            self.n % rotation.features or rotation.columns > self.n or self.batch > 1
        ):
            raise ValueError(
                f"rotation={rotation} needs one product of whole heads, got "
                f"n={self.n}, batch={self.batch}"
            )
        if self.epilogue.gated and (self.n % 2 or self.batch > 1):
            raise ValueError(
                f"gated=True needs one product with an even n, got n={self.n}, "
                f"batch={self.batch}"
            )

    @property
    def format(self) -> Format:
        """The row of the format table."""
        return format_of(self.mode, self.bits)

    @property
    def in_float(self) -> bool:
        """Whether weights and activations meet as float32: only a float holds either
        activations of more than 16 bits or an integer with its scale, which enters the
        fragment in groups of 16."""
        scaled = self.group_size == 16 and self.format.codes != "floating"
        return scaled or self.dtype != "float16"

    @property
    def fragment_bytes(self) -> int:
        """Bytes of a weight or activation where they meet."""
        return 4 if self.in_float else 2

    @property
    def groups(self) -> int:
        """Quantization groups along k."""
        return self.k // self.group_size

    @property
    def columns(self) -> int:
        """Columns of the result: n, or half of it where one half gates the other."""
        return self.n // 2 if self.epilogue.gated else self.n

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result: (m, n), of several products (batch, m, n)."""
        one = self.m, self.columns
        return one if self.batch == 1 else (self.batch, *one)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def code_bytes(self) -> int:
        """Bytes of the packed codes."""
        return self.batch * self.n * self.k * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and biases together."""
        size = SCALE_BYTES[self.scale_dtype]
        groups = self.batch * self.n * self.groups
        return groups * self.format.parameters * size

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
        """Least memory traffic: every operand once."""
        results = 1 + self.epilogue.operands
        operands = self.weight_bytes + self.activation_bytes
        return operands + results * self.output_bytes

    def explain(self) -> str:
        """Says in a line what is asked."""
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
    """Returns a problem, with a mode's own format where it is not said.

    Args:
        m: Rows of the activations.
        n: Features that come out.
        k: Features that go in.
        mode: MLX's name of the quantization scheme, or ours.
        bits: Bits of one code. Default: the mode's, or 4.
        group_size: Weights along k that share a scale. Default: the mode's, or 64.
        dtype: Of activations and result, and of scales that are not bytes.
        layout: "mlx" or "marlin".
        epilogue: What happens to the product before it is stored.
        invariant: Whether a row's bits must not depend on m.
        batch: Products of this shape, each with a weight of its own.
        norm: What is added to the mean square of rows that are normalized before.

    Raises:
        ValueError: If the product is not one of ours.
    """
    m, n, k = integer("m", m), integer("n", n), integer("k", k)
    batch = integer("batch", batch)
    group_size = None if group_size is None else integer("group_size", group_size)
    bits = None if bits is None else integer("bits", bits)
    for name, word in {"mode": mode, "dtype": dtype, "layout": layout}.items():
        if not isinstance(word, str):
            raise ValueError(f"{name}={word!r}, expected a name as a string")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {MODES}")
    usual_group, usual_bits = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    bits = usual_bits if bits is None else bits
    dtypes = format_of(mode, bits).scale_dtypes
    return Problem(
        m=m,
        n=n,
        k=k,
        batch=batch,
        group_size=usual_group if group_size is None else group_size,
        bits=bits,
        mode=mode,
        dtype=dtype,
        scale_dtype=dtype if dtype in dtypes else dtypes[0],
        layout=layout,
        epilogue=epilogue,
        invariant=invariant,
        norm=norm,
    )


def integer(name: str, value: object) -> int:
    """Returns an argument as an int; NumPy's integers become Python's.

    Args:
        name: The argument's name.
        value: Its value.

    Raises:
        ValueError: If it is not an integer. True and False are not.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}={value!r}, expected an integer")
    return index(value)
