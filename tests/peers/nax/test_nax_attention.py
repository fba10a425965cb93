"""MLX's attention kernels for tensor units, unmodified, on the emulator."""

import math
import struct
from dataclasses import dataclass

import mlx.core as mx
import pytest

import metal_emulator
from peers.foreign import Dispatch
from peers.mlx_products import Record, error
from peers.nax.nax_products import TOLERANCE
from support.oracles import Floats, attention, exact

pytestmark = pytest.mark.peer

BK = 32


@dataclass(frozen=True)
class Attention:
    """Queries [2, 4, q, d], keys and values [2, 2, k, d]."""

    dtype: mx.Dtype  # Of the arrays
    q: int  # Queries
    k: int  # Keys
    causal: bool = False  # Whether a query sees no later key
    # Whether numbers are added to the scores. Masks of bool are left out: clang does
    # not finish compiling their vectors of eight (docs/emulator.md)
    mask: bool = False
    d: int = 64  # Elements of a head: 64, or 256 for the kernel that splits them

    @property
    def split(self) -> bool:
        return self.d == 256

    @property
    def bq(self) -> int:
        return 32 if self.split else 64

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.d)

    def __str__(self) -> str:
        dtype = str(self.dtype).split(".")[-1]
        kind = "-causal" * self.causal + "-mask" * self.mask
        return f"{dtype}-{self.q}x{self.k}x{self.d}{kind}"

    def operands(self) -> list[mx.array]:
        """Returns queries, keys, values and, if there is one, the mask."""
        keys = mx.random.split(mx.random.key(self.q + self.k), 4)
        shapes = [(2, 4, self.q, self.d), *[(2, 2, self.k, self.d)] * 2]
        arrays = [
            mx.random.normal(shape, key=key).astype(self.dtype)
            for shape, key in zip(shapes, keys, strict=False)
        ]
        if self.mask:
            arrays.append(mx.random.normal((2, 4, self.q, self.k), key=keys[3]))
        return arrays

    def expected(self, arrays: list[mx.array]) -> Floats:
        """Returns the attention in float64."""
        q, k, v, *mask = map(exact, arrays)
        return attention(q, k, v, *mask, causal=self.causal)

    def dispatch(self, arrays: list[mx.array]) -> Dispatch:
        """MLX's own call."""
        q_blocks, k_blocks = math.ceil(self.q / self.bq), math.ceil(self.k / BK)
        q_full, k_full = self.q // self.bq, self.k // BK
        rows = ((4, self.q), (2, self.k), (2, self.k), (4, self.q))
        strides = [
            stride
            for count, length in rows
            for stride in (count * length * self.d, length * self.d, self.d)
        ]
        params = struct.pack(
            "<6if7i12q",
            *(2, 4, self.d, self.q, self.k, 2, self.scale),
            *(q_blocks, k_blocks, q_full, k_full),
            *(self.q - q_full * self.bq, self.k - k_full * BK, self.k - self.q),
            *strides,
        )
        inputs: dict[str, mx.array | int] = {
            **dict(zip(("Q", "K", "V", "mask"), arrays, strict=False)),
            "params": mx.array(list(params), dtype=mx.uint8),
        }
        if self.mask:
            mask_strides = struct.pack(
                "<3q", 4 * self.q * self.k, self.q * self.k, self.k
            )
            inputs["mask_params"] = mx.array(list(mask_strides), dtype=mx.uint8)
        sizes = (self.bq, BK, self.d)
        warps = (2, 2) if self.split else (4, 1)
        middle = sizes if self.split else (*sizes, self.d)
        return Dispatch(
            kernel="attention_nax_dsplit" if self.split else "attention_nax",
            template=(self.dtype, *middle, *warps, "float"),
            groups=(q_blocks, 4, 2),
            threads=(32, *warps),
            inputs=inputs,
            output="O",
            shape=(2, 4, self.q, self.d),
            dtype=self.dtype,
            constants={
                "align_Q": self.q % self.bq == 0,
                "align_K": self.k % BK == 0,
                "has_mask": self.mask,
                "do_causal": self.causal,
                "has_sinks": False,
                "save_lse": False,
            },
        )

    def error(self, header: str) -> float:
        """Returns the error of MLX's kernel, relative to the largest element."""
        arrays = self.operands()
        return error(self.dispatch(arrays).run(header), self.expected(arrays))


CASES = [
    Attention(mx.float16, 64, 64),
    Attention(mx.bfloat16, 50, 75, causal=True),
    Attention(mx.float32, 70, 33),
    Attention(mx.float16, 50, 75, mask=True),
    Attention(mx.bfloat16, 64, 96, causal=True, mask=True),
    Attention(mx.float16, 40, 50, d=256),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_of_float64(
    case: Attention, attention_nax_header: str, record: Record
) -> None:
    worst = case.error(attention_nax_header)
    record(case.dispatch(case.operands()).kernel, case.dtype, worst)
    assert worst <= TOLERANCE[case.dtype]


def test_traced_it_reports_nothing(attention_nax_header: str) -> None:
    with metal_emulator.emulated(trace=True):
        worst = Attention(mx.float16, 64, 40).error(attention_nax_header)
    assert worst <= TOLERANCE[mx.float16]
