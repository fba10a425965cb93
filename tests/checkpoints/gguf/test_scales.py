"""Scales of whole tensors become global scales, parameters, or are refused."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.checkpoints.gguf import read
from mlx_marlin.checkpoints.stored_weight import StoredWeight
from support.gguf_blocks import draw_blocks
from support.gguf_cases import CASES
from support.gguf_files import Written, random_tensor, write_gguf

INEXACT = float(np.float32(1.9999999) * np.float32(2**-13))
"""No float32, divided by 2688, is this one."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def scaled(path: Path, scale: np.ndarray, shape: tuple[int, ...]) -> Path:
    random = np.random.default_rng(1)
    stem = "ffn_up" if len(shape) == 2 else "ffn_up_exps"
    tensors = [
        random_tensor(f"blk.0.{stem}.weight", "NVFP4", shape, random),
        Written(f"blk.0.{stem}.scale", "F32", scale.shape, scale.tobytes()),
        Written(f"blk.0.{stem}.input_scale", "F32", scale.shape, scale.tobytes()),
    ]
    return write_gguf(path, CASES["qwen3moe"].metadata, tensors)


def test_scales_of_nvfp4_tensors_become_global_scales(path: Path) -> None:
    largest = np.random.default_rng(2).uniform(0.01, 3, 4).astype(np.float32)
    scale = largest / np.float32(2688)

    (tensor,) = read(scaled(path, scale, (4, 2, 64)))
    weight = tensor.read()

    assert isinstance(weight, StoredWeight)
    assert weight.global_scale is not None
    recovered = np.array(weight.global_scale) / np.float32(2688)
    np.testing.assert_array_equal(recovered, scale)


def test_one_global_scale_is_what_mlx_multiplies_by(path: Path) -> None:
    scale = np.array([0.731], np.float32) / np.float32(2688)
    (tensor,) = read(scaled(path, scale, (2, 64)))
    weight = tensor.read()
    assert isinstance(weight, StoredWeight)
    options = {"group_size": 16, "bits": 4, "mode": "nvfp4", "dtype": mx.float32}

    plain = mx.dequantize(weight.codes, weight.scales, **options)
    decoded = mx.dequantize(
        weight.codes, weight.scales, global_scale=weight.global_scale, **options
    )

    np.testing.assert_allclose(decoded, np.array(plain) * scale, rtol=2e-7)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K", "MXFP4", "F16", "F32"])
@pytest.mark.parametrize("stem", ["attn_v", "ffn_down_exps"])
def test_scales_of_other_tensors_must_be_1(kind: str, stem: str, path: Path) -> None:
    """llama.cpp multiplies the product by such a scale, whatever the type is."""
    random = np.random.default_rng(1)
    shape = (4, 2, 256) if stem.endswith("exps") else (2, 256)
    weight = random_tensor(f"blk.0.{stem}.weight", kind, shape, random)
    name, scale = f"blk.0.{stem}.scale", np.ones(shape[:-2] or 1, np.float32)

    def written() -> Path:
        stored = Written(name, "F32", scale.shape, scale.tobytes())
        return write_gguf(path, CASES["qwen3moe"].metadata, [weight, stored])

    (tensor,) = read(written())
    assert tensor.shape == shape
    scale[-1] = 0.5
    with pytest.raises(ValueError, match=rf"model\.gguf: tensor '{name}'"):
        read(written())


@pytest.mark.parametrize("layer", ["token_embd", "blk.0.attn_norm", "output_norm"])
@pytest.mark.parametrize("kind", ["scale", "input_scale"])
def test_scales_that_llama_cpp_does_not_have_are_refused(
    layer: str, kind: str, path: Path
) -> None:
    one = np.ones(1, np.float32).tobytes()
    tensors = [
        Written(f"{layer}.weight", "F32", (8,), bytes(32)),
        Written(f"{layer}.{kind}", "F32", (1,), one),
    ]
    write_gguf(path, CASES["qwen3"].metadata, tensors)

    with pytest.raises(ValueError, match=rf"model\.gguf: tensor '{layer}\.{kind}'"):
        read(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), INEXACT])
def test_scales_that_no_global_scale_stands_for_are_refused(
    value: float, path: Path
) -> None:
    (tensor,) = read(scaled(path, np.array([value], np.float32), (2, 64)))

    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight.*scale"):
        tensor.read()


def test_the_scale_of_gemma4s_experts_is_a_parameter_beside_nvfp4(path: Path) -> None:
    random = np.random.default_rng(1)
    scale = random.uniform(0.5, 2, 4).astype(np.float32)
    tensors = [
        random_tensor("blk.0.ffn_down_exps.weight", "NVFP4", (4, 8, 64), random),
        Written("blk.0.ffn_down_exps.scale", "F32", (4,), scale.tobytes()),
    ]
    write_gguf(path, CASES["gemma4_experts"].metadata, tensors)

    weight, parameter = (tensor.read() for tensor in read(path))

    assert isinstance(weight, StoredWeight)
    assert weight.global_scale is None
    np.testing.assert_array_equal(parameter, scale)
    assert [tensor.name for tensor in read(path)] == [
        "model.layers.0.experts.switch_glu.down_proj.weight",
        "model.layers.0.router.per_expert_scale",
    ]


def test_blocks_without_a_finite_scale_name_their_tensor(path: Path) -> None:
    octets = draw_blocks("Q4_0", (2, 64), np.random.default_rng(0), (np.inf,))
    written = Written("blk.0.ffn_up.weight", "Q4_0", (2, 64), octets.tobytes())
    (tensor,) = read(write_gguf(path, CASES["qwen3"].metadata, [written]))

    with pytest.raises(ValueError, match=r"model\.gguf: tensor 'blk.*a scale"):
        tensor.read()
