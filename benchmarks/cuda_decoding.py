"""A Llama with random quantized weights, and mlx-lm's greedy decoding of it, timed."""

import time
from collections.abc import Callable, Iterator
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from cuda_weights import Format, Native, random_native
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import llama

Draw = Callable[[Format, int, int], Native]
Prompts = list[list[int]]
Tokens = list[list[int]]
"""Of each step, the new token of each stream."""

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 320,
}
PREPARED = 2
"""Steps before the clock starts: after the first one mlx-lm clears MLX's cache."""


def quantized_model(
    sizes: dict[str, int], format: Format, draw: Draw = random_native
) -> nn.Module:
    """Returns a quantized Llama, the same for the same arguments.

    Args:
        sizes: As mlx-lm names them.
        format: Of all its linear layers and its embedding.
        draw: What makes a weight of a format, n and k.
    """
    mx.random.seed(0)
    model = _layers(sizes, format)
    for _, layer in model.named_modules():
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            n, k = layer.scales.shape[0], layer.scales.shape[1] * format.group_size
            layer.weight, layer.scales, layer.biases = draw(format, n, k)
            mx.eval(layer.parameters())
    model.set_dtype(format.type)
    mx.eval(model.parameters())
    return model


def of_same_arrays(
    model: nn.Module, sizes: dict[str, int], format: Format
) -> nn.Module:
    """Returns another such model that has a model's arrays, not copies of them."""
    other = _layers(sizes, format)
    other.update(model.parameters())
    return other


def _layers(sizes: dict[str, int], format: Format) -> nn.Module:
    """Returns a Llama whose arrays nobody has computed: others take their place."""
    args = llama.ModelArgs(
        model_type="llama",
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        **sizes,
    )
    model = llama.Model(args)
    nn.quantize(model, format.group_size, format.bits)
    model.eval()
    return model


def random_prompts(streams: int, length: int, vocabulary: int) -> Prompts:
    drawn = np.random.default_rng(0).integers(0, vocabulary, (streams, length))
    prompts: Prompts = drawn.tolist()
    return prompts


def steps(model: nn.Module, prompts: Prompts, new: int) -> Iterator[list[int]]:
    """Generates greedily, all streams at once.

    Yields:
        The new token of each stream, after one step of all of them.
    """
    # Never the last step: mlx-lm takes a finished stream's cache out there.
    most = new + 2
    if len(prompts) == 1:
        alone = generate_step(mx.array(prompts[0]), model, max_tokens=most)
        yield from ([token] for token, _ in alone)
        return
    streams = len(prompts)
    generator = BatchGenerator(
        model,
        max_tokens=most,
        completion_batch_size=streams,
        prefill_batch_size=streams,
    )
    try:
        generator.insert(prompts)
        while True:
            answers = sorted(generator.next_generated(), key=lambda each: each.uid)
            yield [each.token for each in answers]
    finally:
        generator.close()


def decode(model: nn.Module, prompts: Prompts, new: int) -> tuple[float, Tokens]:
    """Returns the tokens a second after the first `PREPARED`, and all tokens."""
    stepping = islice(steps(model, prompts, new), new)
    tokens = [*islice(stepping, PREPARED)]
    start = time.perf_counter()
    tokens += stepping
    seconds = time.perf_counter() - start
    if {len(step) for step in tokens} != {len(prompts)} or len(tokens) != new:
        raise RuntimeError(
            f"mlx-lm did not give {new} tokens of {len(prompts)} streams"
        )
    return len(prompts) * (new - PREPARED) / seconds, tokens
