"""mlx-dspark's `multirow_attn`, unmodified, on the emulator, traced for races."""

from dataclasses import dataclass

import mlx.core as mx
import pytest

import metal_emulator
from peers import dspark
from peers.foreign import reports
from peers.mlx_products import TOLERANCE, Record, error
from support.oracles import attention, exact

pytestmark = pytest.mark.peer


@dataclass(frozen=True, kw_only=True)
class Case:
    """An attention of `rows` queries over the last of `keys` keys."""

    heads: tuple[int, int]
    features: int
    rows: int
    keys: int
    causal: bool = True
    batch: int = 1
    spare: int = 0

    def __str__(self) -> str:
        heads = "x".join(map(str, self.heads))
        mask = "causal" if self.causal else "all"
        size = f"{self.batch}x{self.rows}x{self.keys}x{self.features}"
        return f"{heads}-{size}-{mask}-spare{self.spare}"


CASES = (
    Case(heads=(4, 1), features=64, rows=1, keys=16),
    Case(heads=(4, 4), features=64, rows=2, keys=17, causal=False),
    Case(heads=(6, 2), features=128, rows=4, keys=129, batch=2),
    Case(heads=(8, 2), features=128, rows=7, keys=300, spare=20),
    Case(heads=(4, 2), features=256, rows=5, keys=100, causal=False),
    Case(heads=(6, 1), features=256, rows=16, keys=273, spare=15),
    Case(heads=(3, 1), features=24, rows=16, keys=31),
    Case(heads=(16, 1), features=8, rows=16, keys=270, causal=False),
    # More tiles of rows than a threadgroup has simdgroups.
    Case(heads=(20, 1), features=256, rows=16, keys=40),
)


def drawn(case: Case, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values; the cache has places that are not filled yet."""
    mx.random.seed(case.rows + case.keys)
    heads, shared = case.heads
    q = mx.random.normal((case.batch, heads, case.rows, case.features)).astype(dtype)
    places = case.keys + case.spare
    cache = [
        mx.random.normal((case.batch, shared, places, case.features)).astype(dtype)
        for _ in "kv"
    ]
    k, v = (each[:, :, : case.keys] for each in cache)
    return q, k, v


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_of_float64_and_race_free(
    case: Case, dtype: mx.Dtype, record: Record
) -> None:
    arrays = drawn(case, dtype)
    attend = dspark.module("multirow_attn").multirow_sdpa
    with metal_emulator.emulated(trace=True):
        y = attend(*arrays, scale=case.features**-0.5, causal=case.causal)
    wanted = attention(*map(exact, arrays), causal=case.causal)
    assert y.shape == wanted.shape
    worst = error(y, wanted)
    record("mlx-dspark multirow_attn", dtype, worst)
    assert worst <= TOLERANCE[dtype]


def test_a_missing_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(heads=(4, 2), features=256, rows=5, keys=100)
    module = dspark.module("multirow_attn")
    planted = module._P1.replace(dspark.BARRIER, "")
    assert planted != module._P1
    kernel = metal_emulator.metal_kernel(
        name="dspark_mra_p1",
        input_names=["q", "k", "v", "scale"],
        output_names=["opart", "mpart", "lpart"],
        source=planted,
        ensure_row_contiguous=False,
    )
    monkeypatch.setattr(module, "_K1", kernel)
    arrays = drawn(case, mx.float16)
    with reports("never written"):
        module.multirow_sdpa(*arrays, scale=0.1, causal=True)
