"""What mlx-lm's models cannot do is refused, and rotations are scaled alike."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_marlin.checkpoints.gguf import Container, config_of, read
from support import gguf_models
from support.gguf_cases import CASES
from support.gguf_files import Written, random_tensor, write_gguf
from support.gguf_models import llama3_factors


def opened(
    folder: Path, name: str, keys: dict[str, Any], *more: Written, without: str = ""
) -> Container:
    """Returns a file with other values of an architecture's keys."""
    prefix = CASES[name].architecture
    changes = {f"{prefix}.{key}": value for key, value in keys.items()}
    return gguf_models.opened(folder, name, changes, *more, without=without)


RANDOM = np.random.default_rng(0)


def numbers(name: str, values: Any) -> Written:
    array = np.array(values, np.float32)
    return Written(name, "F32", array.shape, array.tobytes())


LINEAR_SCALING = {"rope.scaling.type": "linear"}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
WINDOWS = "attention.sliding_window_pattern"
REFUSED: dict[str, list[dict[str, Any] | tuple[dict[str, Any], str]]] = {
    "llama": [
        {"block_count": 4_000_000_000},
        {"block_count": None},
        {"attention.head_count": [4, 4]},
        {"attention.head_count": 0},
        {"rope.freq_base": -1.0},
        {"attention.layer_norm_rms_epsilon": None},
        {"rope.scaling.attn_factor": 1.19},
        {"attn_logit_softcapping": 30.0},
        {"logit_scale": 2.0},
    ],
    "qwen2": [
        {"attention.key_length": 32},
        {"rope.scaling.type": "longrope"},
        (LINEAR_SCALING, "rope.scaling.factor"),
        (LINEAR_SCALING | {"rope.scaling.factor": 0.0}, "rope.scaling.factor"),
    ],
    "qwen3": [
        {"attention.key_length": 0},
        {"attention.value_length": 64},
        {"rope.dimension_count": 16},
        {"attention.scale": 0.5},
    ],
    "gpt-oss": [{"rope.scaling.attn_factor": 2.0}],
    "mixtral": [YARN, {"expert_gating_func": 2}],
    "qwen2moe": [{"expert_gating_func": 2}],
    "qwen3moe": [{"expert_gating_func": 2}],
    "gemma3": [
        {WINDOWS: 7},  # of more layers than there are
        {"final_logit_softcapping": 30.0},
        {"attention.sliding_window": None},
    ],
    "gemma4": [
        {"attention.head_count_kv": [1] * 5 + [2]},
        (
            {"attention.head_count_kv": [2, 2, 2, 1, 2, 1]},
            "head_count_kv.*values are apart",
        ),
        (
            {"feed_forward_length": [96, 96, 96, 96, 96, 192]},
            "feed_forward_length.*from layer 4 on",
        ),
        {"feed_forward_length": 64},
        ({WINDOWS: [True, True, False] * 2}, "shared_kv_layers.*does not fit"),
        {
            "attention.shared_kv_layers": 3,
            "feed_forward_length": [96] * 3 + [192] * 3,
        },
        ({"attention.shared_kv_layers": 6}, "not below 6"),
        {WINDOWS: 6},
        {"rope.dimension_count_swa": 8},
        {"attention.value_length_swa": 32},
        (
            {
                "attention.key_length_swa": 32,
                "attention.value_length_swa": 32,
                "rope.dimension_count_swa": 32,
            },
            "key_length_swa.*attn_q",
        ),
        {"rope.freq_base_swa": None},
        {"embedding_length_per_layer_input": 32},
        {"rope.scaling.factor": 2.0},
    ],
    "gemma4_experts": [
        ({"attention.head_count_kv": [2, 2, 3]}, "head_count_kv.*does not divide 4"),
        {"expert_count": 5},
        {"expert_used_count": 5},
    ],
}
"""Keys of models; an error names the first key if nothing else is given."""


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in REFUSED for case in REFUSED[name]]
)
def test_what_the_model_cannot_do_is_refused(
    name: str, case: dict[str, Any] | tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    keys, message = case if isinstance(case, tuple) else (case, next(iter(case)))

    with pytest.raises(ValueError, match=rf"t\.gguf.*{message}"):
        config_of(opened(tmp_path, name, keys))


@pytest.mark.parametrize("name", ["qwen2moe", "gpt-oss"])
def test_outputs_must_be_there_if_the_model_has_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.gguf.*'output\.weight'"):
        config_of(opened(tmp_path, name, {}, without="output.weight"))


@pytest.mark.parametrize(
    "factors",
    [None, [1.0] * 15, [1e30] * 4 + [1.0] * 12, [1.0] * 4 + [2.0] * 12],
)
def test_rotations_of_gemma4_are_of_the_first_features(
    factors: list[float] | None, tmp_path: Path
) -> None:
    more = [] if factors is None else [numbers("rope_freqs.weight", factors)]
    file = opened(tmp_path, "gemma4", {}, *more, without="rope_freqs.weight")

    with pytest.raises(ValueError, match=r"t\.gguf: tensor 'rope_freqs\.weight'"):
        config_of(file)


def test_unknown_architectures_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", {"general.architecture": "bert"})

    with pytest.raises(ValueError, match=r"t\.gguf.*architecture.*bert"):
        read(path)
    with pytest.raises(ValueError, match=r"t\.gguf.*architecture.*bert"):
        config_of(Container(path))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        # Norms are not quantized, and blocks of Q8_K are not read.
        ("gemma2", random_tensor("blk.0.attn_norm.weight", "Q8_0", (1, 64), RANDOM)),
        ("llama", random_tensor("output_norm.weight", "Q8_0", (32,), RANDOM)),
        ("gpt-oss", random_tensor("blk.0.ffn_up_exps.bias", "Q8_0", (4, 32), RANDOM)),
        ("llama", Written("blk.0.attn_v.weight", "Q8_K", (1, 256), bytes(292))),
        ("llama", numbers("blk.0.attn_rot_embd.weight", [1.0])),
        ("llama", numbers("blk.00.attn_v.weight", [[1.0]])),
        ("llama", numbers("blk.1\u0662.attn_v.weight", [[1.0]])),
        ("llama", numbers("blk.0.token_embd.weight", [1.0])),
        ("llama", numbers("attn_q.weight", [1.0])),
        (
            "llama",
            numbers("blk.0.attn_q.scale", [1.0])._replace(name="blk.0.lora.scale"),
        ),
        ("llama", numbers("odd", [1.0])),
        ("llama", numbers("rope_freqs.bias", [1.0])),
        ("llama", numbers("blk.0.attn_q.bias", [1.0] * 9)),
    ],
)
def test_tensors_that_are_no_parameters_are_refused(
    name: str, tensor: Written, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "t.gguf", CASES[name].metadata, [tensor])

    said = "Q8_K is not one" if tensor.type == "Q8_K" else ""
    with pytest.raises(ValueError, match=rf"t\.gguf: tensor '{tensor.name}'.*{said}"):
        read(path)


def test_norms_that_no_weight_gives_are_refused(tmp_path: Path) -> None:
    norm = numbers("blk.0.attn_norm.weight", [1.5, 1e-9])
    path = write_gguf(tmp_path / "t.gguf", CASES["gemma2"].metadata, [norm])
    (tensor,) = read(path)

    with pytest.raises(ValueError, match=r"t\.gguf: tensor 'blk\.0\.attn_norm"):
        tensor.read()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scalings_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    keys = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
    }

    config = config_of(opened(tmp_path, "qwen3", keys))

    expected: dict[str, Any] = {"type": kind, "factor": 4.0}
    if kind == "yarn":
        expected |= {"original_max_position_embeddings": 32, "beta_fast": 16.0}
    assert config["rope_scaling"] == expected


@pytest.mark.parametrize("more", [{}, {"rope.scaling.factor": 4.0}])
def test_the_older_key_of_linear_scaling_is_read(
    more: dict[str, float], tmp_path: Path
) -> None:
    config = config_of(opened(tmp_path, "llama", {"rope.scale_linear": 2.0} | more))
    factor = more.get("rope.scaling.factor", 2.0)
    assert config["rope_scaling"] == {"type": "linear", "factor": factor}


LLAMA3 = {"rope.freq_base": 500000.0, "rope.dimension_count": 32}


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("name", [None, "none", "linear"])
def test_factors_of_llama_3_are_recognized(
    factor: float, name: str | None, tmp_path: Path
) -> None:
    """The tensor holds what multiplies wavelengths, as float32, and no parameters."""
    tensor = llama3_factors(factor, 500000.0, 32)
    keys = LLAMA3 | {"rope.scaling.type": name}

    container = opened(tmp_path, "llama_tied", keys, tensor)
    scaling = config_of(container)["rope_scaling"]

    rotation = Llama3RoPE(32, base=500000.0, scaling_config=scaling)
    plain = 500000.0 ** (mx.arange(0, 32, 2) / 32)
    factors = np.frombuffer(tensor.data, np.float32)
    np.testing.assert_allclose(rotation._freqs / plain, factors, rtol=1e-5)
    assert all("rope_freqs" not in tensor.name for tensor in read(container.path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.factor": 4.0}, "rope.scaling.factor"),
        ({"rope.scale_linear": 4.0}, "rope.scale_linear"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "scaling.type"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type"),
    ],
)
def test_a_second_scaling_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    container = opened(
        tmp_path, "llama_tied", LLAMA3 | keys, llama3_factors(8.0, 500000.0, 32)
    )

    with pytest.raises(ValueError, match=rf"t\.gguf.*{message}"):
        config_of(container)


@pytest.mark.parametrize(
    "factors",
    [[1.0] * 15 + [2.0], [8.0] * 16, [1.0] * 15, [0.0] * 16, [float("nan")] * 16],
)
def test_other_factors_are_refused(factors: list[float], tmp_path: Path) -> None:
    tensor = numbers("rope_freqs.weight", factors)
    keys = {"rope.freq_base": 500000.0}

    with pytest.raises(ValueError, match=r"t\.gguf.*'rope_freqs\.weight'"):
        config_of(opened(tmp_path, "llama_tied", keys, tensor))


ATTENTION = math.sqrt(1 + math.log(2) / math.log(64))


def phi3(folder: Path, attention: float | None, without: str = "") -> Container:
    keys = {
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": attention,
    }
    factors = [
        numbers(f"rope_factors_{name}.weight", values)
        for name, values in (("long", [1.5, 2, 3, 4]), ("short", [1, 1, 1.25, 2]))
        if name != without
    ]
    return opened(folder, "phi3", keys, *factors)


def test_factors_of_phi_3_are_those_of_the_file(tmp_path: Path) -> None:
    config = config_of(phi3(tmp_path, ATTENTION))

    assert config["rope_scaling"] == {
        "type": "longrope",
        "long_factor": [1.5, 2, 3, 4],
        "short_factor": [1, 1, 1.25, 2],
    }
    assert config["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("attention", "without", "message"),
    [
        (1.19, "", r"rope\.scaling\.attn_factor"),
        (None, "", r"rope\.scaling\.attn_factor"),  # 1 in llama.cpp
        (ATTENTION, "long", "rope_factors_long"),
        (ATTENTION, "short", "rope_factors_short"),
    ],
)
def test_other_factors_of_phi_3_are_refused(
    attention: float | None, without: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"t\.gguf.*{message}"):
        config_of(phi3(tmp_path, attention, without))
