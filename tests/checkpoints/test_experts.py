"""Experts that are stored one by one are stacked, in every model and format."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_marlin
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import foreign_checkpoints as foreign
from support import foreign_models, oracles
from support.configurations import PROJECTIONS, W1_TO_W3, new_model
from support.models import Tokenizer
from support.profiles import sampled

TOKENS = mx.array([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]])
EXPERTS = 8
COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 2,
}
LATENT = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_MOE | LINEAR_ATTENTION,
    "qwen3_5_moe": {"text_config": {**COMMON, **QWEN3_MOE, **LINEAR_ATTENTION}},
    "mixtral": {"num_local_experts": EXPERTS},
    "olmoe": {},
    "ernie4_5_moe": {
        "use_bias": False,
        "moe_num_experts": EXPERTS,
        "moe_layer_start_index": 0,
        "moe_k": 2,
    },
    "lfm2_moe": {
        "norm_topk_prob": True,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
        "use_expert_bias": False,
    },
    "minimax": {
        "num_local_experts": EXPERTS,
        "shared_intermediate_size": 0,
        "scoring_func": "sigmoid",
        "head_dim": 32,
        "rotary_dim": 16,
        "attn_type_list": [1, 1],
        "use_qk_norm": True,
    },
    "Klear": {**QWEN3_MOE, "n_shared_experts": 1, "attention_bias": False},
    "mellum": {
        "norm_topk_prob": True,
        "sliding_window": 64,
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 10000.0}},
    },
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 2,
        "mamba_head_dim": 64,
        "mamba_proj_bias": False,
        "ssm_state_size": 64,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "E", "*", "E"],
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": EXPERTS,  # float16 would choose others among near ones
        "head_dim": 32,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
    },
    "kimi_linear": LATENT
    | {
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 128,
        "num_experts_per_token": EXPERTS,
    },
    "bailing_moe_v3": LATENT
    | {
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": EXPERTS,
        "layer_group_size": 2,
        "q_lora_rank": 64,
    },
}
"""Settings of small models, by the module of mlx-lm; the usual ones are `COMMON`."""
FORMATS = {name: foreign_models.FORMATS[name] for name in ("gptq", "awq", "compressed")}
MIXED = foreign.gptq_config(4, 2, dynamic={"down_proj": {"bits": 8}})
FORMATS["mixed"] = FORMATS["gptq"]._replace(settings=MIXED)
APART = [(4, 64), (8, 64), (4, 32)]
"""Bits and groups of experts of one layer."""
PLAIN_BESIDE = ("mixtral", "qwen3_next")
"""Models of which an expert of each layer is plain, beside quantized ones."""
RULES = {r"experts\.[147]": {"bits": 8}, r"experts\.[25]": {"group_size": 32}}
SETTINGS = foreign.gptq_config(4, 2, dynamic=RULES)
FORMATS["apart"] = FORMATS["gptq"]._replace(settings=SETTINGS)


def settings_of(name: str) -> dict[str, Any]:
    return {**COMMON, **MODELS[name], "model_type": name}


def write(path: Path, name: str, format: str, **options: Any) -> Any:
    """Writes a model, and returns mlx-lm's model of the same numbers in float32.

    Layers whose names end as `act_order` says have it.
    """
    arrays, settings, usual = FORMATS[format]
    rng = np.random.default_rng(0)
    model = new_model(settings_of(name))
    stored: dict[str, np.ndarray] = {}
    exact: dict[str, np.ndarray] = {}

    def quantized(layer: str, n: int, k: int) -> np.ndarray:
        own, size = usual | options, 64
        if format == "mixed" and layer.endswith(("down_proj", "w2")):
            own = own | {"bits": 8}
        if format == "apart" and (expert := re.search(r"experts\.(\d)", layer)):
            if expert[1] == "3" and name in PLAIN_BESIDE:
                values = rng.normal(size=(n, k)).astype(np.float32) / 8
                stored[f"{layer}.weight"] = values
                return values
            bits, size = APART[int(expert[1]) % len(APART)]
            own = own | {"bits": bits}
        # Some layers are symmetric, the others are not.
        symmetric = rng.random() < 0.3
        is_ordered = layer.endswith(options.get("act_order", "no layer"))
        own |= {"act_order": is_ordered}
        weight = foreign.drawn_weight(rng, n, k, size, **own, symmetric=symmetric)
        if own["act_order"]:  # all experts share it
            order = np.random.default_rng(k).permutation(k)
            weight.groups_of_columns = order // 64
        weight.scales = (weight.scales / 2 ** own["bits"]).astype(np.float16)
        stored.update(arrays(layer, weight))
        return weight.values

    for key, array in tree_flatten(model.parameters()):
        layer, _, part = key.rpartition(".")
        shape = array.shape
        if len(shape) == 3 and shape[0] == EXPERTS and part == "weight":
            base, _, projection = layer.rpartition(".")
            base = base.rpartition(".")[0].removesuffix(".experts")
            if name == "kimi_linear":
                base = base.replace(".mlp", ".block_sparse_moe")
            own = PROJECTIONS.get(name, {}).get(projection, projection)
            names = [f"{base}.experts.{e}.{own}" for e in range(EXPERTS)]
            exact[key] = np.stack([quantized(each, *shape[1:]) for each in names])
        elif (
            part == "weight" and is_linear(layer) and (format != "awq" or shape[0] > 1)
        ):
            own = layer
            if name == "lfm2_moe" and "feed_forward" in layer:
                for ours, theirs in PROJECTIONS[name].items():
                    own = own.replace(ours, theirs)
            exact[key] = quantized(own, *shape)
        else:
            values = rng.normal(size=shape) * 0.1 + (len(shape) == 1)
            stored[key] = values.astype(np.float16)
            exact[key] = stored[key].astype(np.float64)
    config = settings | settings_of(name)
    foreign.Folder(config, stored).write(path)
    (path / "tokenizer_config.json").write_text("{}")
    # What `sanitize` adds to norms beside experts is in the exact numbers too.
    dense = {key: mx.array(value.astype(np.float32)) for key, value in exact.items()}
    if name == "qwen3_next":
        for key, value in dense.items():
            ends = ("layernorm.weight", "model.norm.weight", "q_norm.weight")
            if key.endswith((*ends, "k_norm.weight")):
                dense[key] = value + 1.0
    model.load_weights([*dense.items()])
    model.eval()
    return model


def is_linear(layer: str) -> bool:
    """Whether a layer is quantized: attention, routers, and what is beside experts."""
    names = ("gate", "q_proj", "o_proj", "shared_expert_gate")
    return layer.rpartition(".")[2] in (*names, "gate_proj", "up_proj", "down_proj")


@sampled(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("unfused")
def test_a_model_computes_with_its_experts(
    tmp_path: Path, name: str, format: str
) -> None:
    exact = write(tmp_path, name, format)
    model: Any = load_model(open_source(tmp_path))
    if format == "apart" and name in PLAIN_BESIDE:
        weights = tree_flatten(model.parameters())
        plain = [
            (k, a) for k, a in weights if k.endswith("proj.weight") and a.ndim == 3
        ]
        assert {a.dtype for _, a in plain} == {mx.float16}
        # MLX computes plain experts of float16 on GPUs alone.
        model.load_weights([(k, a.astype(mx.float32)) for k, a in plain], strict=False)
    assert_same(model, exact)


def assert_same(model: Any, exact: Any) -> None:
    assert oracles.error(model(TOKENS), np.array(exact(TOKENS), np.float64)) < 1e-2


@sampled(1)
@pytest.mark.parametrize(
    ("name", "format"),
    [("qwen3_moe", "gptq"), ("mixtral", "compressed"), ("glm4_moe", "gptq")],
)
def test_an_order_that_all_experts_share_is_kept(
    tmp_path: Path, name: str, format: str
) -> None:
    exact = write(tmp_path / "source", name, format, act_order="")
    [*convert(open_source(tmp_path / "source"), tmp_path / "result")]
    for folder in ("source", "result"):
        model = load_model(open_source(tmp_path / folder))
        assert any(isinstance(m, ReorderedLinear) for m in model.modules())
        assert_same(model, exact)
    assert mlx_marlin.verify(model, tmp_path / "source", rows=(8,)).passed
    mlx_marlin.optimize(model)
    mlx_marlin.save(tmp_path / "saved", model, Tokenizer())
    again = load_model(open_source(tmp_path / "saved"))
    assert mx.array_equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize("format", ["gptq", "compressed"])
@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_an_order_of_one_of_three_parts_is_kept(
    tmp_path: Path, part: str, format: str
) -> None:
    exact = write(tmp_path, "mixtral", format, act_order=part)
    model = load_model(open_source(tmp_path))
    ordered = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, ReorderedLinear)
    }
    assert [W1_TO_W3[name] for name in ordered] == [part]
    assert_same(model, exact)
