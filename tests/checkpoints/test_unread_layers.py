"""Layers that have not been asked for take next to no memory."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.lm.checkpoints.gguf_source import open_source
from support import foreign_checkpoints as foreign
from support import foreign_models
from support.foreign_models import Format, write_llama


def mlx_arrays(layer: str, weight: foreign.IntegerWeight) -> dict[str, np.ndarray]:
    parts = mx.quantize(mx.array(weight.values.astype(np.float16)))
    names = ("weight", "scales", "biases")
    return {
        f"{layer}.{name}": np.array(part)
        for name, part in zip(names, parts, strict=True)
    }


def nvfp4_arrays(layer: str, weight: foreign.IntegerWeight) -> dict[str, np.ndarray]:
    n, k = weight.codes.shape
    return {
        f"{layer}.weight_packed": weight.codes[:, : k // 2].astype(np.uint8),
        f"{layer}.weight_scale": np.full((n, k // 16), 0x38, np.uint8),
        f"{layer}.weight_global_scale": np.ones(1, np.float32),
    }


FORMATS = {name: foreign_models.FORMATS[name] for name in ("gptq", "awq", "compressed")}
FORMATS |= {
    "mlx": Format(
        mlx_arrays, {"quantization": {"bits": 4, "group_size": 64}}, {"bits": 4}
    ),
    "nvfp4": Format(nvfp4_arrays, foreign.nvfp4_config(), {"bits": 4}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_other_layers_are_not_in_memory(tmp_path: Path, name: str) -> None:
    arrays, settings, options = FORMATS[name]
    write_llama(tmp_path / "source", arrays, settings, **options)
    source = open_source(tmp_path / "source")
    assert source.model is not None  # it has small arrays of its own
    before = mx.get_active_memory()

    parameters = source.parameters()
    next(parameters)

    # The scales alone of 14 layers in float16 have 17,000 bytes.
    assert mx.get_active_memory() - before < 9_000
