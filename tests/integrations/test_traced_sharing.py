"""Which tokens, layers, streams and threads share a traced graph, and until when."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwiGLU
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_marlin.lm.tracing import block as traced_block
from mlx_marlin.lm.tracing.attention import HOST_BYTES
from mlx_marlin.planning.plan import Plan
from support.decoder_models import (
    WIDE_HEADS,
    Caches,
    assert_equal,
    decoded,
    one_stream,
    rotating,
    tiny,
    traced,
    with_left_padding,
)
from support.models import arrays
from support.processes import HANG_SECONDS
from support.profiles import sampled

generate = import_module("mlx_lm.generate")  # the package hides it behind a function


@sampled(1)
@pytest.mark.parametrize(("family", "products"), [("llama", 4), ("qwen3_moe", 3)])
@pytest.mark.parametrize("make", [one_stream, with_left_padding, rotating])
def test_tokens_and_layers_share_one_trace(
    cuda: list[Plan],
    runs: list[str],
    make: Callable[[nn.Module], Caches],
    family: str,
    products: int,
) -> None:
    model = traced(tiny(family, mx.float16, num_hidden_layers=3), join=True)
    cache = make(model)
    streams = 3 if make is with_left_padding else 1

    with mx.stream(mx.new_stream(mx.default_device())):
        for token in range(20):
            mx.eval(model(mx.full((streams, 1), token), cache=cache))

    assert runs == ["_before", "_after"]
    # And each product is in it once, but for those of experts, which are not listed.
    assert len([plan for plan in cuda if plan.problem.n != 100]) == products


@pytest.mark.usefixtures("cuda")
def test_every_layer_and_token_of_a_batch_attends_together(grouped: list[Any]) -> None:
    model = traced(tiny("llama", mx.float16, num_hidden_layers=3), join=True)
    cache = with_left_padding(model)

    for token in range(5):
        mx.eval(model(mx.full((3, 1), token), cache=cache))

    assert grouped == [((3, 4, 1, 32), (3, 2, 256, 32))] * 15


@pytest.mark.usefixtures("cuda")
def test_streams_that_join_and_leave_get_their_own_tokens(grouped: list[Any]) -> None:
    mx.random.seed(8)
    lengths, counts = (9, 2, 17, 5, 40, 3), (6, 25, 4, 12, 9, 14)
    prompts = [mx.random.randint(0, 100, (each,)).tolist() for each in lengths]

    def generated(model: nn.Module) -> dict[int, list[int]]:
        generator = generate.BatchGenerator(
            model, completion_batch_size=3, prefill_batch_size=2
        )
        uids = generator.insert(prompts, [*counts])
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while not all(
            len(tokens[uid]) == n for uid, n in zip(uids, counts, strict=True)
        ):
            for each in generator.next_generated():
                tokens[each.uid].append(each.token)
        generator.close()
        return tokens

    expected = generated(tiny("llama"))
    assert not grouped

    assert generated(traced(tiny("llama"), join=True)) == expected
    assert {keys[0] for _, keys in grouped} == {1, 2, 3}
    assert all(keys[2] % 8 == 0 for _, keys in grouped)
    assert any(keys[2] % 256 for _, keys in grouped)


@pytest.mark.usefixtures("stock")
def test_only_few_rows_of_a_cache_are_traced(runs: list[str]) -> None:
    model = traced(tiny("llama"))
    own = tiny("llama")

    for shape in ((1, 9), (17, 8), (129, 1)):
        tokens = mx.zeros(shape, mx.int32)
        y = model(tokens, cache=one_stream(model))
        assert mx.array_equal(y, own(tokens, cache=one_stream(own)))
    assert mx.array_equal(model(mx.array([[1]])), own(mx.array([[1]])))
    assert not runs

    mx.eval(model(mx.zeros((16, 8), mx.int32), cache=one_stream(model)))
    assert runs == ["_before", "_after"]


def other_weights(model: nn.Module) -> None:
    layer = model.layers[1]
    layer.input_layernorm.weight = layer.input_layernorm.weight * 2
    layer.self_attn.o_proj["scales"] = layer.self_attn.o_proj["scales"] * 3
    layer.mlp.down_proj.update({"scales": layer.mlp.down_proj["scales"] * 2})


def other_biases(model: nn.Module) -> None:
    mx.random.seed(1)
    model.layers[0].mlp.down_proj["bias"] = mx.random.normal((128,))
    del model.layers[0].self_attn.q_proj["bias"]


def other_choices(model: nn.Module) -> None:
    model.layers[0].mlp.top_k = 1


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize(
    ("family", "change", "join"),
    [
        ("qwen2", other_weights, False),
        ("qwen2", other_weights, True),
        ("llama", other_biases, False),
        ("qwen3_moe", other_choices, False),
    ],
)
def test_what_changes_is_seen(
    family: str, change: Callable[[nn.Module], None], join: bool
) -> None:
    own, model = tiny(family), traced(tiny(family), join=join)
    decoded(model, one_stream)

    change(own)
    change(model)

    assert_equal(decoded(model, one_stream), decoded(own, one_stream))
    traced(model, join=join)
    assert_equal(decoded(model, one_stream), decoded(own, one_stream))


@pytest.mark.usefixtures("stock")
def test_layers_that_are_replaced_are_seen() -> None:
    def replaced(model: nn.Module) -> nn.Module:
        mx.random.seed(9)
        model.layers[0].mlp.up_proj = nn.Linear(128, 96)
        model.layers[1].input_layernorm = nn.RMSNorm(128, eps=0.5)
        linear_to_lora_layers(model, 1, {"rank": 2, "scale": 9.0, "dropout": 0.0})
        for path, array in arrays(model).items():
            if "lora" in path:
                own = mx.random.normal(array.shape)
                model.load_weights([(path, own)], strict=False)
        return model

    model = traced(tiny("llama"))
    before = decoded(model, one_stream)

    outputs = decoded(replaced(model), one_stream)

    assert_equal(outputs, decoded(replaced(tiny("llama")), one_stream))
    assert not mx.allclose(outputs[-1], before[-1], rtol=0.1)
    # One block has another spec, and the block with LoRA has none.
    assert model.layers[0]._inspection.spec is not None
    assert model.layers[1]._inspection.spec is None


@pytest.mark.usefixtures("stock")
def test_what_is_replaced_in_experts_is_seen() -> None:
    def replaced(model: nn.Module) -> nn.Module:
        mx.random.seed(9)
        model.layers[0].mlp.gate = nn.Linear(128, 4, bias=False)
        model.layers[1].mlp.switch_mlp.activation = nn.SiLU()  # takes no two
        return model

    model = traced(tiny("qwen3_moe"))
    before = decoded(model, one_stream)
    specs = [block._inspection.spec for block in model.layers]
    assert specs[0] is specs[1] is not None

    with pytest.raises(TypeError):
        decoded(replaced(model), one_stream)

    assert model.layers[0]._inspection.spec not in (None, specs[0])
    assert model.layers[1]._inspection.spec is None
    model.layers[1].mlp.switch_mlp.activation = SwiGLU()
    own = replaced(tiny("qwen3_moe"))
    own.layers[1].mlp.switch_mlp.activation = SwiGLU()
    outputs = decoded(model, one_stream)
    assert_equal(outputs, decoded(own, one_stream))
    assert not mx.allclose(outputs[-1], before[-1], rtol=0.1)
    assert model.layers[1]._inspection.spec is specs[1]


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_that_nobody_has_is_gone(family: str) -> None:
    model = traced(tiny(family))
    decoded(model, one_stream)
    blocks = [weakref.ref(block) for block in model.layers]
    gc.disable()
    try:
        del model
        assert [block() for block in blocks] == [None, None]
    finally:
        gc.enable()


@pytest.mark.usefixtures("stock")
def test_blocks_with_experts_and_without_have_kinds_of_their_own() -> None:
    options = {"mlp_only_layers": [1]}
    model = traced(tiny("qwen3_moe", **options), join=True)

    outputs = decoded(model, one_stream)

    assert_equal(outputs, decoded(tiny("qwen3_moe", **options), one_stream))
    first, second = (block._inspection.spec for block in model.layers)
    assert [name for name, _ in first.after] == ["norm", "o_proj", "experts"]
    assert [name for name, _ in second.after] == [
        "norm",
        "o_proj",
        "joined",
        "down_proj",
    ]


@pytest.mark.usefixtures("cuda")
def test_offsets_are_arrays_once_a_token() -> None:
    offset, positions = traced_block._arrays_of(70)

    assert traced_block._arrays_of(70)[0] is offset
    assert traced_block._arrays_of(70)[1] is positions
    assert offset.item() == 70
    assert set(positions.tolist()) == {70}
    assert offset.dtype == positions.dtype == mx.int32
    assert positions.nbytes > HOST_BYTES
    assert traced_block._arrays_of(71)[0].item() == 71


@pytest.mark.usefixtures("cuda")
def test_threads_decode_side_by_side() -> None:
    """What a thread computes belongs to its stream, and may be evaluated later."""
    model = traced(tiny("llama", mx.float16, **WIDE_HEADS), layout="marlin", join=True)
    mx.eval(model.parameters())

    def decode(token: int, turns: threading.Barrier) -> mx.array:
        cache = one_stream(model)
        for _ in range(3):
            turns.wait(HANG_SECONDS)
            y: mx.array = model(mx.array([[token]]), cache=cache)
            turns.wait(HANG_SECONDS)
            mx.eval(y)
        return y

    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(decode, token, both) for token in (5, 6)]
        results = [each.result() for each in jobs]

    alone = [decode(token, threading.Barrier(1)) for token in (5, 6)]
    assert_equal(results, alone)
