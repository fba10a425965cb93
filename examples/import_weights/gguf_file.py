"""Writes a Llama model as a GGUF file of Q8_0 blocks, with the `gguf` package.

A real one comes from llama.cpp's conversion, whose order of rows this script follows.
"""

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write(source: Path, file: Path) -> None:
    """Writes the model in the folder `source` to a file."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, source)
    for name, array in mx.load(str(source / "model.safetensors")).items():
        w = np.array(array.astype(mx.float32))
        layer = name.removesuffix(".weight")
        if layer.endswith(("q_proj", "k_proj")):
            w = _as_llama_cpp(w, config["head_dim"])
        quantized = "_proj" in layer
        data = gguf.quants.quantize(w, Q8_0) if quantized else w
        writer.add_tensor(_name(layer), data, raw_dtype=Q8_0 if quantized else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(layer: str) -> str:
    if layer in OTHER:
        return f"{OTHER[layer]}.weight"
    _, _, index, rest = layer.split(".", 3)
    return f"blk.{index}.{LAYER[rest]}.weight"


def _as_llama_cpp(w: np.ndarray, head: int) -> np.ndarray:
    """Puts rows i and i + head / 2 of each head next to each other."""
    halves = w.reshape(-1, 2, head // 2, w.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(w.shape))


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(
        [
            pair if isinstance(pair, str) else " ".join(pair)
            for pair in tokenizer["merges"]
        ]
    )
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[0] = gguf.TokenType.CONTROL
    writer.add_token_types(types)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
