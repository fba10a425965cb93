"""An invariant model generates the same tokens alone and in a batch."""

from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin.backends import graph
from mlx_marlin.layers.embedding import PackedEmbedding
from support.decoder_models import tiny
from support.models import Layers, assert_converted, tiny_llama
from support.profiles import sampled

generate = import_module("mlx_lm.generate")  # the package hides it behind a function

PROMPT = mx.array([1, 5, 9, 2, 6])
COUNT = 24
TIE = 1e-4
"""Least lead of a token, in logits: attention, which stays MLX's, may turn a nearer
one, since its sums depend on the rows."""

pytestmark = pytest.mark.usefixtures("kernels")


def plain(model: nn.Module) -> tuple[list[int], list[float]]:
    """Returns the greedy tokens, and their leads over the second best in logits."""
    tokens, leads = [], []
    steps = generate.generate_step(PROMPT, model, max_tokens=COUNT)
    for token, logprobs in steps:
        second, best = mx.sort(logprobs.astype(mx.float32))[-2:].tolist()
        tokens.append(int(token))
        leads.append(best - second)
    return tokens, leads


def speculative(
    model: nn.Module, draft: nn.Module, drafted: int
) -> tuple[list[int], int]:
    """Returns the tokens, and how many of them came from the draft model."""
    steps = generate.speculative_generate_step(
        PROMPT, model, draft, num_draft_tokens=drafted, max_tokens=COUNT
    )
    taken = [(int(token), guessed) for token, _, guessed in steps]
    return [token for token, _ in taken], sum(guessed for _, guessed in taken)


@sampled(1)
@pytest.mark.parametrize("drafted", [1, 3, 7, 15])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_speculative_and_plain_greedy_tokens_are_equal_up_to_ties(
    family: str, layout: str, drafted: int
) -> None:
    model, draft = (tiny(family) for _ in range(2))
    draft.model.layers[1].self_attn.o_proj.scales *= 1.2
    mlx_marlin.optimize(model, layout=layout, invariant=True)

    expected, leads = plain(model)
    tokens, guessed = speculative(model, draft, drafted)

    assert len(tokens) == COUNT
    assert 0 < guessed < COUNT  # verified in batches, and not only those
    problems = [plan.problem for plan in graph.plans_built()]
    rows = {problem.m for problem in problems if problem.invariant}
    assert {1, 1 + drafted} <= rows
    heads = {problem.batch for problem in problems if problem.invariant}
    assert heads == ({1, 4} if family == "deepseek_v3" else {1})
    parted = next((i for i in range(COUNT) if tokens[i] != expected[i]), COUNT)
    assert parted == COUNT or leads[parted] < TIE, (parted, leads)


def test_optimizing_again_changes_the_mode_of_every_layer_and_nothing_else() -> None:
    model = mlx_marlin.optimize(tiny_llama())
    before = [path for path, _ in model.named_modules()]

    for invariant in (True, False):
        mlx_marlin.optimize(model, invariant=invariant)
        assert_converted(model, {"invariant": invariant})
        layer = model.layers[0].mlp.up_proj
        assert ("invariant" in repr(layer)) == invariant
    assert [path for path, _ in model.named_modules()] == before


class Unknown(nn.Module):
    """A quantized layer of a class that nobody knows, as other packages have them."""

    def __init__(self, name: str, inner: nn.Module | None = None) -> None:
        super().__init__()
        dtype = mx.uint8 if name == "weight" else mx.float16
        self[name] = mx.zeros((4, 4), dtype)
        if inner is not None:
            self.inner = inner


@pytest.mark.parametrize(
    "layer",
    [Unknown("scales"), Unknown("weight"), Unknown("scales", nn.RMSNorm(4))],
    ids=["scales", "codes", "with a module in it"],
)
def test_a_quantized_layer_of_an_unknown_class_is_refused(layer: nn.Module) -> None:
    model = Layers(nn.QuantizedLinear(64, 64), layer)

    with pytest.raises(ValueError, match=r"1 quantized layers .* as Unknown\("):
        mlx_marlin.optimize(model, invariant=True)

    assert type(model.layers[0]) is nn.QuantizedLinear
    plain = Layers(nn.QuantizedLinear(64, 64), nn.RMSNorm(4), nn.Linear(4, 4))
    assert mlx_marlin.optimize(plain, invariant=True).layers[0].invariant


def test_the_output_head_of_a_packed_embedding_is_invariant() -> None:
    weight = mlx_marlin.quantize(mx.random.normal((96, 512)), mode="symmetric")
    model = Layers(PackedEmbedding.from_packed(weight, mx.float16))
    x = mx.random.normal((64, 512), key=mx.random.key(0)).astype(mx.float16)

    head = mlx_marlin.optimize(model, invariant=True).layers[0]

    whole = head.as_linear(x)
    for rows in (1, 2, 5, 8, 31):
        assert mx.array_equal(head.as_linear(x[:rows]), whole[:rows])
    assert not mlx_marlin.optimize(model, invariant=False).layers[0].invariant
