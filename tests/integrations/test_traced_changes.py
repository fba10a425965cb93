"""A traced block detects changes of its settings, classes and methods."""

import functools
import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama, switch_layers

import mlx_marlin
from mlx_marlin.lm.tracing import inspection
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.lm.tracing.block_spec import is_unchanged
from mlx_marlin.lm.tracing.model_families import FAMILIES
from support.decoder_models import assert_equal, one_stream, tiny, traced
from support.profiles import sampled

pytestmark = [
    pytest.mark.usefixtures("stock", "unfused"),
    pytest.mark.filterwarnings("ignore:mlx_marlin. trace=True traces none"),
]

Change = Callable[[nn.Module], None]


def generated(model: nn.Module, change: Change) -> list[mx.array]:
    """Returns the logits of a prompt and of tokens, changing the model between two."""
    cache = one_stream(model)
    outputs = []
    for index, tokens in enumerate(([3, 1, 4, 1, 5, 9, 2, 6, 5], [3], [5], [8], [9])):
        if index == 3:
            change(model)
        outputs.append(model(mx.array([tokens]), cache=cache))
        mx.eval(outputs[-1])
    return outputs


def set_in_last_block(path: str, value: Any) -> Change:
    def change(model: nn.Module) -> None:
        *owners, name = path.split(".")
        # The first block of some families has no attention, or no experts.
        owner = functools.reduce(getattr, owners, model.layers[-1])
        setattr(owner, name, value() if inspect.isfunction(value) else value)

    return change


def another_layer() -> nn.Linear:
    mx.random.seed(1)
    return nn.Linear(128, 256)


@sampled(9)
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(
    ("family", "path", "value"),
    [
        ("llama", "self_attn.rope.base", 20.0),
        ("llama", "self_attn.rope.scale", 0.25),
        ("llama", "self_attn.rope.traditional", True),
        ("llama", "self_attn.scale", 1.5),
        ("llama", "input_layernorm.eps", 0.5),
        ("llama", "post_attention_layernorm.eps", 0.5),
        ("qwen3", "self_attn.q_norm.eps", 0.5),
        ("granite", "residual_multiplier", 0.9),
        ("gpt_oss", "mlp.experts.activation._limit", 0.01),
        ("qwen3_moe", "mlp.norm_topk_prob", False),
        ("dots1", "mlp.gate.routed_scaling_factor", 4.0),
        (
            "dots1",
            "mlp.gate.e_score_correction_bias",
            lambda: mx.array([9.0, 0.0, 0.0, 9.0]),
        ),
        ("glm4_moe", "mlp.gate.norm_topk_prob", False),
        ("glm4_moe", "mlp.config.n_shared_experts", None),
        ("ernie4_5_moe", "mlp.k", 1),
        ("olmo_hybrid", "self_attn.q_norm.eps", 0.5),
        ("qwen3_5", "self_attn.q_proj", another_layer),
        ("qwen3_next", "self_attn.q_norm.eps", 0.5),
    ],
)
def test_a_setting_that_changes_counts_for_the_next_token(
    family: str, path: str, value: Any, join: bool
) -> None:
    change = set_in_last_block(path, value)
    expected = generated(tiny(family), change)

    model = traced(tiny(family), join=join)
    outputs = generated(model, change)

    assert_equal(outputs, expected)
    unchanged = generated(tiny(family), lambda _: None)
    assert_equal(expected[:3], unchanged[:3])
    assert not mx.allclose(expected[3], unchanged[3], rtol=1e-3)
    # A layer that is not the model's own cannot be joined: its block runs untraced.
    blocks = [block for block in model.layers if "self_attn" in block]
    untraced = [block._inspection.spec is None for block in blocks]
    own = join and value is another_layer
    assert untraced == [*[False] * (len(blocks) - 1), own]


def doubled(function: Any) -> Any:
    """Returns a wrapper with a function's attributes that doubles its result."""

    @functools.wraps(function)
    def double(*arguments: Any, **options: Any) -> Any:
        return 2 * function(*arguments, **options)

    return double


METHODS: list[tuple[str, Any, str]] = [
    ("llama", llama.Attention, "__call__"),
    ("llama", llama.MLP, "__call__"),
    ("llama", llama.TransformerBlock, "__call__"),
    ("llama", llama, "scaled_dot_product_attention"),
    ("llama", llama, "swiglu"),
    ("llama", nn.RMSNorm, "__call__"),
    ("llama", nn.RoPE, "__call__"),
    ("gemma3_text", import_module("mlx_lm.models.gemma3_text"), "clip_residual"),
    ("gemma3_text", import_module("mlx_lm.models.gemma3_text").RMSNorm, "__call__"),
    ("qwen3_moe", switch_layers.SwitchGLU, "__call__"),
    (
        "qwen3_moe",
        import_module("mlx_lm.models.qwen3_moe").Qwen3MoeSparseMoeBlock,
        "__call__",
    ),
]
REPLACED = pytest.mark.parametrize(
    ("family", "holder", "name"),
    METHODS,
    ids=[f"{family}-{holder.__name__}-{name}" for family, holder, name in METHODS],
)


@sampled(7)
@REPLACED
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_a_method_that_is_replaced_counts_for_the_next_token(
    family: str, holder: Any, name: str, join: bool
) -> None:
    def replace(_: nn.Module) -> None:
        patch.setattr(holder, name, doubled(getattr(holder, name)))

    results = []
    model = traced(tiny(family), join=join)
    for each in (tiny(family), model):
        with pytest.MonkeyPatch.context() as patch:
            results.append(generated(each, replace))

    assert_equal(results[1], results[0])
    unchanged = generated(tiny(family), lambda _: None)
    assert not mx.allclose(results[0][3], unchanged[3], rtol=1e-3)
    # It is mlx-lm's again now.
    assert_equal(generated(model, lambda _: None), unchanged)
    assert all(block._inspection.spec is not None for block in model.layers)


@sampled(4)
@REPLACED
def test_a_method_that_was_replaced_before_optimize_counts(
    monkeypatch: pytest.MonkeyPatch, family: str, holder: Any, name: str
) -> None:
    monkeypatch.setattr(holder, name, doubled(getattr(holder, name)))
    expected = generated(tiny(family), lambda _: None)

    model = traced(tiny(family), join=True)

    assert_equal(generated(model, lambda _: None), expected)
    assert all(block._inspection.spec is None for block in model.layers)


class DoubledAttention(llama.Attention):
    def __call__(self, *arguments: Any) -> mx.array:
        return 2 * super().__call__(*arguments)


def test_a_class_that_changes_counts_for_the_next_token() -> None:
    change = set_in_last_block("self_attn.__class__", DoubledAttention)
    expected = generated(tiny("llama"), change)

    model = traced(tiny("llama"))

    assert_equal(generated(model, change), expected)
    untraced = [block._inspection.spec is None for block in model.layers]
    assert untraced == [False, True]


class DoubledBlock(llama.TransformerBlock):
    def __call__(self, *arguments: Any, **options: Any) -> mx.array:
        return 2 * super().__call__(*arguments, **options)


def own_class(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama, "TransformerBlock", DoubledBlock)


def everywhere(patch: pytest.MonkeyPatch) -> None:
    other = doubled(base.scaled_dot_product_attention)
    for module in (base, llama):
        patch.setattr(module, "scaled_dot_product_attention", other)


def with_the_names_of_another(patch: pytest.MonkeyPatch) -> None:
    def identity(self: Any, x: mx.array) -> mx.array:
        return x

    identity.__qualname__, identity.__module__ = "MLP.__call__", llama.__name__
    patch.setattr(llama.MLP, "__call__", identity)


def while_ours_was_imported(patch: pytest.MonkeyPatch) -> None:
    other = doubled(mx.multiply)
    patch.setattr(inspection, "scaled_dot_product_attention", other)


def sharper(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.Softmax, "__call__", lambda _, x: mx.softmax(2 * x, -1))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", own_class),
        ("llama", everywhere),
        ("llama", with_the_names_of_another),
        ("llama", while_ours_was_imported),
        ("ernie4_5_moe", sharper),
    ],
)
def test_what_was_replaced_before_a_model_was_made_counts(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    change(monkeypatch)
    model, own = tiny(family), tiny(family)

    mlx_marlin.optimize(model, trace=True)

    assert_equal(generated(model, lambda _: None), generated(own, lambda _: None))
    last = getattr(model.layers[-1], "_inspection", None)
    assert last is None or last.spec is None
    if family == "ernie4_5_moe":  # whose first block is dense
        assert model.layers[0]._inspection.spec is not None


@sampled(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_seen_to_change_while_nothing_does(family: str) -> None:
    model = traced(tiny(family), layout="marlin", join=True)
    generated(model, lambda _: None)
    blocks = [each for each in model.layers if isinstance(each, TracedBlock)]
    inspections = [block._inspection for block in blocks]

    generated(model, lambda _: None)

    for block, each in zip(blocks, inspections, strict=True):
        assert block._inspection is each
        assert is_unchanged(block, each.snapshot)
    assert any(each.spec is not None for each in inspections)


def test_training_changes_no_result() -> None:
    model = traced(tiny("llama"))
    expected = generated(model, lambda _: None)
    spec = model.layers[0]._inspection.spec

    outputs = generated(model, lambda each: each.train())

    assert_equal(outputs, expected)
    assert model.layers[0]._inspection.spec is spec


def test_settings_that_keep_changing_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, own = traced(tiny("llama")), tiny("llama")
    generated(model, lambda _: None)
    specs = len(inspection._specs)
    monkeypatch.setattr(inspection, "MOST_SPECS", specs + 1)

    for base_of_rope, warns in ((301.0, False), (302.0, True), (303.0, False)):
        change = set_in_last_block("self_attn.rope.base", base_of_rope)
        expected = generated(own, change)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            assert_equal(generated(model, change), expected)
        assert [each.filename for each in given] == [llama.__file__] * warns

    assert len(inspection._specs) == specs + 1
