"""What mlx-lm's tools do with a model, as arrays, tokens and a folder to compare.

Each tool takes a model of `tiny("llama")`, converted or not, and an empty folder.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import mlx_lm.utils
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as caches
from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS, awq_quantize
from mlx_lm.quant.dwq import dwq_quantize
from mlx_lm.quant.dynamic_quant import estimate_sensitivities
from mlx_lm.quant.gptq import gptq_quantize
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

import mlx_marlin
from support.decoder_models import SIZES, quantized, rotating

generate = import_module("mlx_lm.generate")  # the package hides it behind a function

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = mx.array([PROMPT, PROMPT[::-1]])
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}
Tool = Callable[[nn.Module, Path], list[mx.array]]


def _loss(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def _trained(model: nn.Module) -> list[mx.array]:
    """Returns the logits after two steps of what is not frozen."""
    optimizer = mlx.optimizers.SGD(learning_rate=0.5)
    step = nn.value_and_grad(model, _loss)
    model.train()
    for _ in range(2):
        optimizer.update(model, step(model, TOKENS)[1])
        mx.eval(model.parameters())
    model.eval()
    return [model(TOKENS), *_decoded(model, [caches.KVCache() for _ in model.layers])]


def _decoded(model: nn.Module, cache: list[Any]) -> list[mx.array]:
    """Returns the logits of a prompt and of three tokens after it."""
    found = [model(TOKENS[:1], cache=cache)[0]]
    return found + [model(mx.array([[i]]), cache=cache)[0] for i in (7, 8, 9)]


def _with_adapters(model: nn.Module, **options: Any) -> nn.Module:
    mx.random.seed(1)
    model.freeze()
    linear_to_lora_layers(model, 2, LORA, **options)
    return model


def lora(model: nn.Module, _: Path) -> list[mx.array]:
    return _trained(_with_adapters(model))


def dora(model: nn.Module, _: Path) -> list[mx.array]:
    return _trained(_with_adapters(model, use_dora=True))


def norms(model: nn.Module, _: Path) -> list[mx.array]:
    """Trains what is not quantized, in full."""
    model.freeze()
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.unfreeze()
    return _trained(model)


def _adapters(folder: Path) -> None:
    """Writes adapters of fixed random numbers, as `mlx_lm lora` does."""
    found = []
    mx.random.seed(2)
    for i in range(2):
        for name in ("q_proj", "v_proj"):
            path = f"model.layers.{i}.self_attn.{name}"
            n = 128 if name == "q_proj" else 64
            found += [
                (f"{path}.lora_a", 0.1 * mx.random.normal((128, 4))),
                (f"{path}.lora_b", 0.1 * mx.random.normal((4, n))),
            ]
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    config = {"num_layers": 2, "lora_parameters": LORA | {"keys": keys}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(found))


def loaded_adapters(model: nn.Module, folder: Path) -> list[mx.array]:
    _adapters(folder)
    load_adapters(model, str(folder))
    return [model(TOKENS)]


def saved_adapters(model: nn.Module, folder: Path) -> list[mx.array]:
    """Trains adapters, and saves them as mlx-lm's trainer does."""
    _trained(_with_adapters(model))
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    found = mx.load(str(folder / "adapters.safetensors"))
    return [found[name] for name in sorted(found)]


def _fused(model: nn.Module, folder: Path) -> nn.Module:
    loaded_adapters(model, folder)
    layers = [
        (path, module.fuse())
        for path, module in model.named_modules()
        if hasattr(module, "fuse")
    ]
    model.update_modules(tree_unflatten(layers))
    return model


def _saved(model: nn.Module, folder: Path) -> list[mx.array]:
    """Saves a model, and returns the logits of plain mlx-lm for the files."""
    target = folder / "model"
    mlx_lm.utils.save_model(target, model)
    config = {"model_type": "llama", **SIZES}
    config["quantization"] = {"group_size": 32, "bits": 4}
    (target / "config.json").write_text(json.dumps(config))
    again, _ = mlx_lm.utils.load_model(target)
    return [again(TOKENS)]


def fused(model: nn.Module, folder: Path) -> list[mx.array]:
    return [_fused(model, folder)(TOKENS)]


def fused_and_saved(model: nn.Module, folder: Path) -> list[mx.array]:
    return _saved(_fused(model, folder), folder)


def fused_restored_and_saved(model: nn.Module, folder: Path) -> list[mx.array]:
    return _saved(mlx_marlin.restore(_fused(model, folder)), folder)


def dwq(model: nn.Module, _: Path) -> list[mx.array]:
    """Runs mlx-lm's training of scales and biases for one step."""
    targets = mx.random.normal((2, 7, SIZES["vocab_size"]), key=mx.random.key(0))
    data = [(row, 0) for row in TOKENS.tolist()]
    dwq_quantize(
        model,
        lambda batch, *_, **__: targets[:, : batch.shape[1]],
        mlx.optimizers.SGD(learning_rate=0.1),
        data,
        data,
        batch_size=2,
        max_seq_length=8,
        seed=0,
        dtype=mx.float32,
    )
    model.eval()
    return [model(TOKENS)]


def prompt_cache(model: nn.Module, folder: Path) -> list[mx.array]:
    """Saves the cache of a prompt, loads it, and goes on."""
    cache = caches.make_prompt_cache(model)
    model(TOKENS[:1], cache=cache)
    caches.save_prompt_cache(str(folder / "cache.safetensors"), cache)
    again = caches.load_prompt_cache(str(folder / "cache.safetensors"))
    assert caches.trim_prompt_cache(again, 2) == 2
    return _decoded(model, again)


def quantized_cache(model: nn.Module, _: Path) -> list[mx.array]:
    return _decoded(model, quantized(model))


def rotating_cache(model: nn.Module, _: Path) -> list[mx.array]:
    return _decoded(model, rotating(model))


def speculative(model: nn.Module, _: Path) -> list[mx.array]:
    """Decodes with the model as its own draft model."""
    steps = generate.speculative_generate_step(
        mx.array(PROMPT), model, model, num_draft_tokens=3, max_tokens=8
    )
    return [logprobs for _, logprobs, _ in steps]


def batch_generator(model: nn.Module, _: Path) -> list[mx.array]:
    """Decodes streams that join a batch late and leave it early."""
    generator = BatchGenerator(model, max_tokens=6)
    generator.insert([PROMPT])
    found: list[mx.array] = []
    while responses := generator.next_generated():
        found += [each.logprobs for each in responses]
        if len(found) == 2:
            generator.insert([[9, 2, 6], [5, 3, 5, 8]], max_tokens=[2, 3])
    return found


def sharded(model: nn.Module, _: Path) -> list[mx.array]:
    model.shard()
    return [model(TOKENS)]


def changed_weights(model: nn.Module, _: Path) -> list[mx.array]:
    """Changes q, k and v between two tokens."""
    cache = [caches.KVCache() for _ in model.layers]
    found = _decoded(model, cache)
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = model.layers[0].self_attn[name]
        whole = layer.shared.layer if hasattr(layer, "shared") else layer
        if layer is whole or name == "q_proj":  # joined layers have their arrays once
            _doubled(whole)
    return found + _decoded(model, cache)


def _doubled(layer: Any) -> None:
    for name in ("packed_scales", "scales", "biases", "bias"):
        if name in layer:
            layer[name] = 2 * layer[name]


TOOLS: dict[str, Tool] = {
    "LoRA: training": lora,
    "DoRA: training": dora,
    "full training of norms": norms,
    "saving adapters": saved_adapters,
    "`load_adapters`": loaded_adapters,
    "`fuse()` of all adapters": fused,
    "`fuse()`, then `save_model`": fused_and_saved,
    "`fuse()`, `restore`, then `save_model`": fused_restored_and_saved,
    "`dwq_quantize`": dwq,
    "prompt cache, saved, loaded and trimmed": prompt_cache,
    "quantized cache": quantized_cache,
    "rotating cache": rotating_cache,
    "speculative decoding": speculative,
    "`BatchGenerator`": batch_generator,
    "`model.shard`": sharded,
    "changed q, k and v between two tokens": changed_weights,
}
"""Tools by their names in docs/mlx_lm.md."""


def awq(model: nn.Module) -> nn.Module:
    sizes = {"group_size": 32, "bits": 4, "embed_group_size": 32, "n_grid": 2}
    awq_quantize(model, TOKENS, AWQ_MODEL_CONFIGS["llama"], **sizes)
    return model


def gptq(model: nn.Module) -> nn.Module:
    found: nn.Module
    found, _ = gptq_quantize(model, TOKENS, 4, 32, 8, 32)
    return found


def dynamic_bits(model: nn.Module) -> nn.Module:
    """Gives the half of the layers that needs it most more bits."""
    found = dict(estimate_sensitivities(model, TOKENS, 4, 32, 8, 32))
    needy = {*sorted(found, key=lambda name: found[name])[len(found) // 2 :]}
    nn.quantize(
        model,
        class_predicate=lambda path, layer: (
            hasattr(layer, "to_quantized")
            and {"group_size": 32, "bits": 8 if path in needy else 4}
        ),
    )
    return model


QUANTIZERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "`awq_quantize`, then `optimize`": awq,
    "`gptq_quantize`, then `optimize`": gptq,
    "dynamic bits, then `optimize`": dynamic_bits,
}
"""Tools that quantize plain models, by their names in docs/mlx_lm.md."""
