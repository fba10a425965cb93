"""Small models; what it means that one is converted, and that two are the same."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_marlin.layers.embedding import MarlinEmbedding
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.tracing.block import TracedBlock

LAYOUTS = ["mlx", "marlin"]
TOKENS = mx.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])


def tiny_llama(*, tied: bool = True, quantized: bool = True) -> nn.Module:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=100,
        tie_word_embeddings=tied,
    )
    mx.random.seed(0)
    model = llama.Model(args)
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


class Layers(nn.Module):
    """A model of layers, applied one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = [*layers]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return x


def types(model: nn.Module) -> dict[str, type]:
    return {path: type(module) for path, module in model.named_modules()}


def arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def assert_converted(
    model: nn.Module,
    given: dict[str, Any],
    *,
    can_trace: bool = True,
    can_join: bool = True,
) -> None:
    """Checks that the given options of `optimize` did what they are for."""
    modules = [*model.modules()]
    ours = [m for m in modules if isinstance(m, MarlinLinear | MarlinEmbedding)]
    assert ours
    assert not any(type(m) is nn.QuantizedLinear for m in modules)
    assert all(m.invariant == given.get("invariant", False) for m in ours)
    layout = given.get("layout", "mlx")
    assert all(m.layout == layout for m in ours if isinstance(m, MarlinLinear))
    traced = can_trace and given.get("trace", False)
    assert any(isinstance(m, TracedBlock) for m in modules) == traced
    joined = can_join and given.get("join", False)
    assert any(isinstance(m, MarlinPart) for m in modules) == joined


def assert_same_model(actual: nn.Module, expected: nn.Module) -> None:
    assert types(actual) == types(expected)
    for path, array in (found := arrays(expected)).items():
        assert mx.array_equal(arrays(actual)[path], array)
        assert arrays(actual)[path].dtype == array.dtype
    assert [*arrays(actual)] == [*found]
    for (path, ours), (_, theirs) in zip(
        actual.named_modules(), expected.named_modules(), strict=True
    ):
        if isinstance(theirs, nn.QuantizedLinear | nn.QuantizedEmbedding):
            assert vars(ours) == vars(theirs), path


class Tokenizer:
    """Stands for a tokenizer, of which only saving matters."""

    def save_pretrained(self, path: str) -> None:
        (Path(path) / "tokenizer.json").write_text("{}")
