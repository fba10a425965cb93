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
from support.decoder_models import assert_equal, both, decoded, one_stream, tiny, traced
from support.models import arrays, assert_same_model


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_restore_gives_back_the_blocks(join: bool) -> None:
    model = traced(tiny("qwen3"), layout="marlin", join=join)
    decoded(model, one_stream)

    mlx_marlin.restore(model)

    assert_same_model(model, tiny("qwen3"))
    assert all(vars(ours).keys() == vars(own).keys() for ours, own in both(model))


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
def test_a_failure_leaves_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class BreakError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise BreakError

    model = tiny("llama")
    monkeypatch.setattr("mlx_marlin.lm.optimize.join_layers", fail)

    with pytest.raises(BreakError):
        mlx_marlin.optimize(model, join=True, trace=True)

    assert_same_model(model, tiny("llama"))


@pytest.mark.usefixtures("stock")
def test_a_copy_of_a_traced_model_is_one() -> None:
    model = traced(tiny("llama"))
    expected = decoded(model, one_stream)

    other = copy.deepcopy(model)

    assert other.layers[0]._inspection is None
    assert_equal(decoded(other, one_stream), expected)
    assert other.layers[0]._inspection.spec is model.layers[0]._inspection.spec


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_a_traced_model_can_be_pickled(join: bool) -> None:
    model = traced(tiny("llama"), layout="mlx", join=join)
    expected = decoded(model, one_stream)

    again = pickle.loads(pickle.dumps(model))

    assert all(isinstance(block, TracedBlock) for block in again.layers)
    assert_equal(decoded(again, one_stream), expected)


@pytest.mark.usefixtures("stock")
def test_settings_that_change_are_seen_when_a_model_is_optimized_again() -> None:
    model, own = traced(tiny("llama")), tiny("llama")
    decoded(model, one_stream)
    for each in (model, own):
        each.layers[1].input_layernorm.eps = 0.5

    traced(model)

    assert_equal(decoded(model, one_stream), decoded(own, one_stream))


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


@pytest.mark.usefixtures("stock")
def test_an_attention_that_we_do_not_know_runs_as_it_is() -> None:
    model, own = tiny("llama"), tiny("llama")

    class Attention(type(own.layers[0].self_attn)):  # type: ignore[misc]
        def __call__(self, *arguments: Any) -> mx.array:
            return 2 * super().__call__(*arguments)

    for each in (model, own):
        each.layers[0].self_attn.__class__ = Attention
    traced(model)

    assert_equal(decoded(model, one_stream), decoded(own, one_stream))
    assert model.layers[0]._inspection.spec is None
