"""Writes GGUF files of Llamas with random blocks, for benchmarks."""

from pathlib import Path

import gguf
import numpy as np

TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""llama.cpp's names of mlx-lm's layers."""
VOCABULARY = 1024


def write(
    file: Path, type: str, linear: dict[str, tuple[int, int]], layers: int
) -> None:
    """Writes a model.

    Args:
        file: The file to write.
        type: ggml's type of the weights of linear layers, such as "Q4_K".
        linear: Rows and columns of a decoder layer's weights, by their names in mlx-lm.
        layers: Decoder layers, which have the same numbers.
    """
    hidden = linear["self_attn.q_proj"][1]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(linear["mlp.gate_proj"][0])
    writer.add_head_count(32)
    writer.add_head_count_kv(32 * linear["self_attn.k_proj"][0] // hidden)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *map(str, range(VOCABULARY - 3))])
    writer.add_token_scores([-float(rank) for rank in range(VOCABULARY)])
    writer.add_token_types([2, 3, 3] + [1] * (VOCABULARY - 3))
    blocks = {shape: _blocks(type, *shape) for shape in {*linear.values()}}
    own = gguf.GGMLQuantizationType[type]
    for layer in range(layers):
        for name, shape in linear.items():
            tensor = f"blk.{layer}.{TENSORS[name]}.weight"
            writer.add_tensor(tensor, blocks[shape], raw_dtype=own)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((VOCABULARY, hidden), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bytes_per_weight(type: str) -> float:
    """Returns the bytes of a block for each of its weights."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    return nbytes / elements


def _blocks(type: str, n: int, k: int) -> np.ndarray:
    """Random blocks. Bytes below 64 are finite in every format of scales."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    random = np.random.default_rng(0)
    return random.integers(0, 64, (n, k // elements * nbytes), dtype=np.uint8)
