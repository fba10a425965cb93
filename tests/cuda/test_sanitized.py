"""What compute-sanitizer watches is everything, and is judged; here on the CPU."""

from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import cuda_sanitized
from mlx_marlin.backends import graph
from mlx_marlin.backends.cuda import limits
from mlx_marlin.backends.cuda.limits import OF_CUDA
from support import cuda_cases
from support.cuda_products import Product
from support.profiles import sampled

NAMES = [*cuda_sanitized.runs()]
KINDS = ("decode", "format", "epilogue", "gated", "anywhere", "normed", "batch")


def test_every_format_way_and_epilogue_is_watched() -> None:
    for case in cuda_cases.cases():
        assert f"format {Product(case)}" in NAMES
    for way in (*cuda_cases.WAYS, *cuda_cases.RING_WAYS):
        for dtype in limits.DTYPES:
            assert any(str(way) in name and dtype in name for name in NAMES)
    for kind in (*KINDS, "large block", "rotated", "experts"):
        assert any(name.startswith(kind) for name in NAMES)
    epilogues = [name for name in NAMES if name.startswith("epilogue")]
    # Of each kernel, and of splits that a reduce finishes.
    assert len(epilogues) == (len(OF_CUDA) + 1) * len(cuda_cases.EPILOGUES)


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_shards_share_out_everything(shards: int) -> None:
    found = [cuda_sanitized.in_shard(NAMES, (i + 1, shards)) for i in range(shards)]

    assert sorted(chain.from_iterable(found)) == sorted(NAMES)


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", ""])
def test_other_shards_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        cuda_sanitized.main(["--shard", text])


@pytest.mark.parametrize("nbytes", [2, 400, 512, 16384, 16386, 40000])
def test_an_array_ends_where_its_memory_does(nbytes: int) -> None:
    array = mx.arange(nbytes // 2).astype(mx.uint16)

    moved = cuda_sanitized.at_end(array)

    np.testing.assert_array_equal(np.array(moved), np.array(array))
    room = cuda_sanitized.allotted(nbytes)
    assert room >= nbytes
    assert room % 16384 == 0 or room & (room - 1) == 0


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what the script sets once for a process of its own."""
    monkeypatch.setattr(cuda_sanitized, "prepare", lambda _: None)


@sampled(2)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_each_kind_is_right(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(name for name in NAMES if name.startswith(kind))
    run = cuda_sanitized.runs()[name]
    monkeypatch.setattr(cuda_sanitized, "runs", lambda: {name: run})

    assert cuda_sanitized.main([]) == 0

    said = capsys.readouterr().out
    assert said.startswith("ok ")
    assert "1 products, 0 wrong" in said


@pytest.mark.parametrize("raises", [True, False])
def test_what_is_wrong_is_told(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def product(_: Any) -> graph.Product:
        if raises:
            raise RuntimeError("no such kernel")
        return lambda x, *_: mx.zeros((x.shape[0], cuda_cases.N), x.dtype)

    monkeypatch.setattr(graph, "product", product)
    some = dict([*cuda_sanitized.runs().items()][:2])
    monkeypatch.setattr(cuda_sanitized, "runs", lambda: some)

    assert cuda_sanitized.main([]) == 1

    said = capsys.readouterr().out
    assert said.count("WRONG") == 2
    assert "shard 1/1: 2 products, 2 wrong" in said
