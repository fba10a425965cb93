"""A small random model in place of the one that mlx-lm's own tests download."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 259,
}
END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMAT = {"group_size": 64, "bits": 4}


def write(folder: Path) -> Path:
    """Writes a 4-bit qwen2, as the one on the hub is, and returns its new folder."""
    folder.mkdir()
    _write_tokenizer(folder)
    mx.random.seed(0)
    model = qwen2.Model(qwen2.ModelArgs(**SIZES))
    model.set_dtype(mx.float16)
    nn.quantize(model, **FORMAT)
    config = SIZES | {"quantization": FORMAT, "eos_token_id": SIZES["vocab_size"] - 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes, whose token 0 is "!" as in Qwen's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    codes = {letter: code for code, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=codes, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": SPECIAL[0],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
