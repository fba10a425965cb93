"""Tokens a second with a model's own head and without, on this machine's GPU.

Model and head have random weights; a logits processor makes the model write a given
text, and a drafted token is that of the text with a given chance, at the cost of a real
head. Nothing repeats.

Usage: python benchmarks/cuda_heads.py [--model NAME] [--tokens N] [--smoke]
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from cuda_drafts import rate, writing
from cuda_models import Sizes, quantized_model
from cuda_weights import Format
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from mlx_marlin.lm.drafts.decoder import Decoder, Picker
from mlx_marlin.lm.drafts.drafters import HeadDrafter
from mlx_marlin.lm.drafts.heads import DraftHead, config_of, family_of, new_block
from mlx_marlin.lm.drafts.hidden_rows import HiddenPasses
from mlx_marlin.lm.drafts.pass_cost import cost_of

MODELS: dict[str, Sizes] = {
    "8b": {
        "model_type": "mimo",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151680,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "35b-a3b": {
        "model_type": "qwen3_5_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
}
TINY: Sizes = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 320,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
CHANCES = (0.3, 0.5, 0.7, 0.9)
NEW = 400
REPEATS, DEEP = 3, 4096
"""Texts of an arm, of which the medians are reported; one after so many tokens."""


class Chance(HeadDrafter):
    """Drafts as a head does, but each token is that of a text with a chance."""

    def __init__(self, chance: float, text: Sequence[int], *passes: Any) -> None:
        """Keeps what decides whether a token is right."""
        super().__init__(*passes)
        self._chance, self._whole = chance, [*text]
        self._random = random.Random(1)

    def draft(self, count: int) -> Sequence[int]:
        """Computes a draft, and returns another one."""
        super().draft(count)
        start = len(self._text)
        following = self._whole[start : start + count]
        return [
            each if self._random.random() < self._chance else each ^ 1
            for each in following
        ]


def random_head(model: nn.Module, format: Format) -> DraftHead:
    """Returns a head with random weights in a format."""
    trunk, family = family_of(model)
    config = config_of(trunk, family, "num_experts" in vars(trunk.text.args))
    block = new_block(trunk, family, config, set())
    nn.quantize(block, format.group_size, format.bits)
    block.set_dtype(format.type)
    mx.eval(block.parameters())
    return DraftHead(block, trunk, family)


def plain(model: Any, text: list[int], begun: int) -> float:
    """Returns the tokens a second of mlx-lm's plain decoding."""
    processors = [writing(text)]
    steps = generate_step(
        mx.array(text[:begun]), model, max_tokens=NEW, logits_processors=processors
    )
    return rate(int(token) for token, _ in steps)


def drafted(
    model: Any, head: DraftHead, chance: float, text: list[int], begun: int
) -> tuple[float, Decoder]:
    """Returns the tokens a second with drafts, and the decoder."""
    before = head.family.before_norm
    passes = HiddenPasses(head.trunk.norm, before, model, make_prompt_cache(model))
    of_head = HiddenPasses(head.norm, before, head, head.make_cache())
    drafter = Chance(chance, text, of_head, passes)
    if (cost := cost_of(head)).source == "measured":
        drafter.seconds_of_token = cost.seconds(1)
    picker = Picker(sampler=None, processors=[writing(text)])
    decoder = Decoder(passes, [drafter], cost_of(model), picker, generation_stream)
    found: list[int] = []

    def tokens() -> Iterator[int]:
        for each in decoder.tokens(text[:begun], NEW):
            found.append(each.token)
            yield each.token

    result = rate(tokens())
    assert found == text[begun : begun + NEW]
    return result, decoder


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument(
        "--tokens", type=int, action="append", help="length of a prompt"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models")
    asked = parser.parse_args()
    for name in asked.model or MODELS:
        sizes = MODELS[name]
        if asked.smoke:
            sizes = {key: TINY.get(key, size) for key, size in sizes.items()}
        format = Format(mode="affine", bits=4, group_size=64)
        model = quantized_model(sizes, format)
        head = random_head(model, format)
        mlx_marlin.optimize(model)
        mlx_marlin.optimize(head)
        print(name, mx.device_info().get("device_name"), cost_of(model).source)
        for begun in asked.tokens or ((20, 40) if asked.smoke else (1024, 32768)):
            run(model, head, begun, sizes["vocab_size"])
        del model, head


def run(model: Any, head: DraftHead, begun: int, vocabulary: int) -> None:
    """Prints the rates after a prompt of some tokens."""
    drawn: Any = mx.random.permutation(vocabulary, key=mx.random.key(0)).tolist()
    text = (drawn * (1 + (begun + NEW) // vocabulary))[: begun + NEW + 1]
    count = 1 if begun > DEEP else REPEATS
    plain(model, text, begun)  # compiles
    own = statistics.median(plain(model, text, begun) for _ in range(count))
    print(f"{begun} tokens before: plain {own:.1f} tokens/s")
    for chance in CHANCES:
        found = [drafted(model, head, chance, text, begun) for _ in range(count)]
        speed, decoder = statistics.median(each for each, _ in found), found[-1][1]
        print(
            f"  chance {chance}: {speed:.1f} tokens/s, {speed / own:.2f} times plain, "
            f"{decoder.accepted} of {decoder.drafted} drafted tokens accepted, "
            f"{NEW / decoder.passes:.2f} tokens a pass",
            flush=True,
        )


if __name__ == "__main__":
    main()
