"""Models with traced blocks are optimized, restored, copied and pickled."""

import copy
import pickle
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.lm.tracing.block import TracedBlock
from support.choose import Choose
from support.decoder_models import assert_equal, decoded, one_stream, tiny, traced
from support.models import arrays, assert_same_model
from support.profiles import sampled


@sampled(4)
@pytest.mark.usefixtures("stock", "unfused")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "dots1", "ernie4_5_moe", "glm4_moe"),
        *("olmo_hybrid", "qwen3_5", "qwen3_next"),  # not all their layers attend
    ],
)
def test_restore_gives_back_the_blocks(family: str, join: bool) -> None:
    model = traced(tiny(family), layout="marlin", join=join)
    decoded(model, one_stream)
    attending = ["self_attn" in layer for layer in model.layers]
    assert [isinstance(each, TracedBlock) for each in model.layers] == attending

    mlx_marlin.restore(model)

    assert_same_model(model, tiny(family))
    for ours, own in zip(model.layers, tiny(family).layers, strict=True):
        assert vars(ours).keys() == vars(own).keys()


@pytest.mark.usefixtures("stock")
def test_optimizing_again_traces_or_not_as_it_is_asked() -> None:
    model = traced(tiny("llama"))
    names = [*arrays(model)]
    decoded(model, one_stream)

    traced(model, layout="marlin", join=True)  # already traced
    assert_equal(decoded(model, one_stream), decoded(tiny("llama"), one_stream))
    mlx_marlin.optimize(model, layout="mlx")

    assert not any(isinstance(block, TracedBlock) for block in model.layers)
    assert [*arrays(model)] == names


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_of_a_traced_model_is_one(copied: Any, join: bool) -> None:
    model = traced(tiny("llama"), layout="mlx", join=join)
    expected = decoded(model, one_stream)

    other = copied(model)

    assert all(isinstance(block, TracedBlock) for block in other.layers)
    assert other.layers[0]._inspection is None
    assert_equal(decoded(other, one_stream), expected)
    assert other.layers[0]._inspection.spec is model.layers[0]._inspection.spec


@pytest.mark.parametrize(
    ("options", "is_joined", "is_traced"),
    [
        ({}, True, True),
        ({"layout": "marlin"}, True, True),
        ({"layout": "mlx"}, False, True),
        ({"join": False}, False, True),
        ({"trace": False}, True, False),
    ],
    ids=str,
)
def test_on_cuda_a_model_is_joined_and_traced_unless_asked_not_to(
    backend: Choose, options: dict[str, Any], is_joined: bool, is_traced: bool
) -> None:
    for name, is_cuda in (("cuda", True), ("stock", False)):
        backend(name)
        block = mlx_marlin.optimize(tiny("llama", mx.float16), **options).layers[0]

        assert isinstance(block, TracedBlock) == (is_cuda and is_traced)
        parts = isinstance(block.mlp.up_proj, MarlinPart)
        assert parts == (is_cuda and is_joined)


@pytest.mark.filterwarnings("ignore:mlx_marlin. trace=True traces none")
def test_blocks_that_we_do_not_know_stay() -> None:
    from mlx_lm.models import gemma, llama

    class OwnBlock(llama.TransformerBlock):
        pass

    model = tiny("llama")
    model.layers[0].__class__ = OwnBlock
    other = tiny("gemma")

    for each in (model, other):
        mlx_marlin.optimize(each, trace=True)

    assert type(model.layers[0]) is OwnBlock
    assert isinstance(model.layers[1], TracedBlock)
    assert {type(block) for block in other.layers} == {gemma.TransformerBlock}
