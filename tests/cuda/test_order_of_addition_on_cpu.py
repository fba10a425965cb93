"""CUDA kernels add in ascending k: within a warp, a split and a tile."""

from typing import Any

import pytest

from support.cuda_cases import STAGED_WAYS, WAYS, WGMMA_WAYS
from support.cuda_on_cpu import check_order
from support.marks import needs_emulator
from support.profiles import sampled

pytestmark = [needs_emulator, pytest.mark.usefixtures("on_cpu")]


@sampled(2, 16)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", [*WAYS, *STAGED_WAYS, *WGMMA_WAYS], ids=str)
def test_every_way_adds_in_ascending_k(way: dict[str, Any], dtype: str) -> None:
    check_order(("affine", 4, 64, "marlin", dtype, 11, way))
