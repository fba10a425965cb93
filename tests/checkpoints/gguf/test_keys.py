"""No key of an architecture is unread by accident: llama.cpp's list, one by one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import Keys

from mlx_marlin.checkpoints.gguf import Container, config_of
from support.gguf_cases import CASES
from support.gguf_models import opened

OLDER_OR_NEWER = (
    "rope.scale_linear",
    "attention.value_scale",
    "hidden_activation",
    "a.key.that.nobody.knows",
)
"""Keys that the `gguf` package does not list: those of src/llama-arch.cpp, and one."""
NO_EFFECT = {
    "attention.layer_norm_epsilon",
    "classifier.output_labels",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "moe_every_n_layers",
    "pooling_type",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
}
"""Sizes that tensors say, and what is not of a model that writes texts."""
OF_YARN = {"yarn_beta_fast", "yarn_beta_slow", "original_context_length"}
WINDOWS = ("gemma2", "gemma3", "gpt-oss")
"""Architectures with windows: in others llama.cpp reads no key of windows."""
OF_WINDOWS = {
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
}
UNCHANGED: dict[str, dict[str, list[Any]]] = {
    "": {
        "attention.causal": [True],
        "embedding_scale": [0.0, 1.0],
        "expert_gating_func": [0],
        "expert_group_count": [0, 1],
        "expert_weights_scale": [0.0, 1.0],
        "logit_scale": [1.0],
        "nextn_predict_layers": [0],
        "residual_scale": [1.0],
        "rope.scaling.attn_factor": [1.0],
        "rope.scaling.yarn_attn_factor": [1.0],
    },
    "mixtral": {"expert_gating_func": [1], "expert_weights_norm": [True]},
    "qwen3moe": {"expert_gating_func": [1], "expert_weights_norm": [True]},
    "qwen2moe": {"expert_gating_func": [1], "expert_weights_norm": [False]},
    "gpt-oss": {
        "expert_gating_func": [3],
        "attention.sliding_window_pattern": [2],
        "attention.key_length_swa": [32],
        "rope.freq_base_swa": [10000.0],
    },
    "glm4moe": {"expert_gating_func": [2], "expert_weights_scale": [2.5]},
    "qwen35moe": {"rope.dimension_sections": [5], "expert_weights_norm": [True]},
    "gemma2": {"attention.sliding_window": [4096], "rope.dimension_count_swa": [32]},
}
"""Values that change nothing, for all models and for one."""
REFUSED: dict[str, dict[str, list[Any]]] = {
    "": {"attention.causal": [False], "expert_group_count": [2]},
    "mixtral": {"expert_weights_norm": [False], "expert_gating_func": [2, 3]},
    "qwen2moe": {"expert_weights_norm": [True]},
    "qwen3moe": {"expert_weights_norm": [False], "expert_weights_scale": [2.5]},
    "glm4moe": {"expert_gating_func": [1, 3]},
    "qwen35": {"ssm.group_count": [3], "full_attention_interval": [2, 0]},
    "qwen3next": {"ssm.inner_size": [63, 128], "ssm.conv_kernel": [3]},
    "mistral3": {"rope.scaling.yarn_log_multiplier": [0.5]},
    "lfm2": {"shortconv.l_cache": [0], "attention.head_count_kv": [2]},
    "gpt-oss": {"expert_gating_func": [1], "rope.freq_base_swa": [500.0]},
    "gemma2": {"attn_logit_softcapping": [0.0]},
    "gemma3": {"attention.sliding_window": [0], "rope.dimension_count_swa": [16]},
}


cases = pytest.mark.parametrize("name", CASES)


def listed(keys: type = Keys) -> Iterator[str]:
    """Yields the keys under an architecture's prefix that llama.cpp's package lists."""
    for name, value in vars(keys).items():
        if isinstance(value, type) and not name.startswith("_"):
            yield from listed(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.").replace("{dense}", "dense_2")


def config_with(container: Container, key: str, value: Any) -> dict[str, Any]:
    """Returns the configuration of a file with another value of a key."""
    name = f"{container.text('general.architecture')}.{key}"
    before = dict(container.metadata)
    container.metadata[name] = value
    try:
        return config_of(container)
    finally:
        container.metadata = before


def pairs(table: dict[str, dict[str, list[Any]]], name: str) -> list[tuple[str, Any]]:
    """Returns keys and values for a model."""
    keys = table[""] | table.get(name, {})
    return [(key, value) for key, values in keys.items() for value in values]


@cases
def test_every_key_is_used_refused_or_without_effect(name: str, tmp_path: Path) -> None:
    container = opened(tmp_path, name, {})
    base = config_of(container)
    unchanged = set()
    for key in (*listed(), *OLDER_OR_NEWER):
        for value in (5, 0.37, "odd"):
            with contextlib.suppress(ValueError):
                if config_with(container, key, value) == base:
                    unchanged.add(key)

    expected = set(NO_EFFECT)
    if "yarn" not in str(base.get("rope_scaling", base.get("rope_parameters"))):
        expected |= {f"rope.scaling.{each}" for each in OF_YARN}
    else:
        expected |= {"rope.scale_linear"}  # the older key of the factor, which is there
    if name not in WINDOWS:
        expected |= OF_WINDOWS
    if name in ("qwen35", "qwen35moe", "qwen3next"):
        expected |= {"rope.dimension_sections"}  # of positions in pictures
    if name == "gpt-oss":
        expected |= {"feed_forward_length"}  # of layers without experts
    assert unchanged - expected == set()
    assert unchanged >= NO_EFFECT


@cases
def test_values_that_change_nothing_are_accepted_and_others_refused(
    name: str, tmp_path: Path
) -> None:
    container = opened(tmp_path, name, {})
    base = config_of(container)

    for key, value in pairs(UNCHANGED, name):
        assert config_with(container, key, value) == base, (key, value)
    for key, value in pairs(REFUSED, name):
        with pytest.raises(ValueError, match=rf"t\.gguf.*{key}"):
            config_with(container, key, value)


SIZES = (
    "attention.key_length",
    "attention.value_length",
    "attention.head_count",
    "attention.head_count_kv",
    "block_count",
    "embedding_length",
    "rope.dimension_count",
)


@cases
def test_sizes_are_those_of_tensors_before_work_grows_with_them(
    name: str, tmp_path: Path
) -> None:
    container = opened(tmp_path, name, {})
    case = CASES[name]
    mixture = "expert_count" in case.keys
    sizes = (*SIZES, "expert_count", "expert_used_count") if mixture else SIZES
    if not mixture or name == "mixtral":
        sizes = (*sizes, "feed_forward_length")

    for key in sizes:
        for value in (0, 1 << 27, 1 << 62):
            with pytest.raises(ValueError, match=r"t\.gguf"):
                config_with(container, key, value)
