"""A traced block and a traced model answer as mlx-lm's code."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches

import mlx_marlin
from mlx_marlin.backends.cuda.plan import CudaGatherPlan
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.lm.tracing.model_families import FAMILIES, Routing
from mlx_marlin.planning.plan import Plan
from support.choose import Choose
from support.decoder_models import (
    ALL,
    Caches,
    assert_close,
    assert_equal,
    decoded,
    graphs,
    one_stream,
    quantized,
    tiny,
    traced,
    with_left_padding,
)
from support.models import LAYOUTS, arrays, assert_same_model
from support.profiles import sampled

JOINED_HEADS, JOINED_GATES = {"phi3"}, {"phi3", "glm", "glm4"}
"""Families in which mlx-lm has q, k and v, or gate and up, as one layer."""
SUMS_APART = {
    *("exaone4", "gemma3_text", "glm4", "granite", "olmo2", "olmo3", "olmo_hybrid")
}
"""Families that normalize or scale the summands of the residual."""
DENSE_FIRST = {"dots1", "ernie4_5_moe", "glm4_moe"}
"""Families whose first block has an MLP, and the others experts."""
NO_NORMS = {"exaone4", "gemma3_text", "olmo2", "olmo3", "olmo_hybrid"}
"""Families without norms before products, or whose norms are their own."""


@sampled(10)
@pytest.mark.usefixtures("stock", "unfused")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@ALL
def test_a_block_answers_as_mlx_lms_code(
    make: Callable[[nn.Module], Caches], family: str, layout: str, join: bool
) -> None:
    model = traced(tiny(family), layout=layout, join=join)
    if family == "gpt_oss" and make is quantized:
        with pytest.raises(ValueError, match="sinks"):  # as in mlx-lm
            decoded(model, make)
        return

    outputs = decoded(model, make)

    # Stock MLX's products round as mlx-lm's code does, also before a sum.
    assert_equal(outputs, decoded(tiny(family), make))
    streams = outputs[0].shape[0]
    assert {shape_of(key)[:2] for key in graphs(model)} >= {(streams, 1), (streams, 3)}


@pytest.mark.usefixtures("stock")
def test_a_cache_grows_as_mlx_lms_code_lets_it() -> None:
    own, model = tiny("llama"), traced(tiny("llama"), join=True)
    room = caches.KVCache.step

    expected = decoded(own, one_stream, prompt=room - 6)

    # Single tokens fill it to the last place and beyond.
    assert_equal(decoded(model, one_stream, prompt=room - 6), expected)


def shape_of(key: Any) -> tuple[int, ...]:
    """Returns the shape of x in a key of graphs."""
    shape: tuple[int, ...] = key if isinstance(key[0], int) else key[0]
    return shape


@sampled(5)
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [one_stream, with_left_padding])
@pytest.mark.usefixtures("unfused")
def test_kernels_that_are_traced_answer_as_mlx_lms_code(
    cuda: list[Plan],
    gathered: list[CudaGatherPlan],
    choices: list[Routing],
    make: Callable[[nn.Module], Caches],
    family: str,
    join: bool,
) -> None:
    options = {"layout": "marlin", "join": join}
    own = mlx_marlin.optimize(tiny(family, mx.float16), **options, trace=False)
    expected = decoded(own, make)
    assert not any(plan.problem.epilogue.residual for plan in cuda)
    assert not choices
    assert not any(plan.gather.gate for plan in gathered)

    outputs = decoded(traced(tiny(family, mx.float16), **options), make)

    # A sum in an epilogue rounds once, in mlx-lm's code twice.
    assert_close(outputs, expected, 2e-3)
    sums = [plan for plan in cuda if plan.problem.epilogue.residual]
    experts = FAMILIES[family].experts  # which have sums and gates of their own
    last = family in ("gpt_oss", "qwen3_5", "qwen3_moe", "qwen3_next")
    routing = Routing(2, of_all=family == "qwen2_moe", last=last)
    routings = {routing} if experts and experts.routing else set()
    assert any(plan.gather.gate for plan in gathered) == bool(experts)
    assert {*choices} == routings
    dense = not experts or family in DENSE_FIRST
    summed = set() if family in SUMS_APART else {128, 96} if dense else {128}
    assert {plan.problem.k for plan in sums} == summed
    network = experts is None or experts.shared is not None
    gates = (join or family in JOINED_GATES) and family != "gemma3_text"  # gelu
    assert any(plan.problem.epilogue.gated for plan in cuda) == (gates and network)
    normed = [plan.problem for plan in cuda if plan.problem.norm is not None]
    assert all(each.norm == 1e-5 and each.m <= 8 for each in normed)
    kinds = {(each.epilogue.gated, len(each.epilogue.parts)) for each in normed}
    whole = make is one_stream and not FAMILIES[family].output_gate
    heads = {(False, 3), *({(False, 0)} if whole else ())}
    gated = {(True, 0)} if dense and gates else set()
    of_heads = heads if join or family in JOINED_HEADS else set()
    assert kinds == (set() if family in NO_NORMS else of_heads | gated)


@sampled(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernels_themselves_answer_as_mlx_lms_code(layout: str) -> None:
    model = traced(tiny("llama"), layout=layout, join=True)

    outputs = decoded(model, one_stream, prompt=3)

    assert_close(outputs, decoded(tiny("llama"), one_stream, prompt=3), 1e-5)


@pytest.mark.usefixtures("unfused")
def test_scores_may_be_shares_of_all_experts(
    cuda: list[Plan], choices: list[Routing]
) -> None:
    options = {"norm_topk_prob": False}
    own = mlx_marlin.optimize(tiny("qwen3_moe", mx.float16, **options), trace=False)

    outputs = decoded(traced(tiny("qwen3_moe", mx.float16, **options)), one_stream)

    assert_close(outputs, decoded(own, one_stream), 2e-3)
    assert {*choices} == {Routing(2, of_all=True, last=True)}


@sampled(2, 4)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "gate"),
        ("qwen2_moe", "gate"),
        ("qwen2_moe", "shared_expert_gate"),
        ("qwen3_moe", "gate"),
    ],
)
@pytest.mark.usefixtures("unfused")
def test_wider_gates_widen_what_mlx_lms_code_widens(
    cuda: list[Plan], choices: list[Routing], family: str, name: str
) -> None:
    def wide() -> nn.Module:
        model = tiny(family, mx.float16)
        for block in model.layers:
            experts = block[FAMILIES[family].mlp_name]
            experts[name].set_dtype(mx.float32)
        return model

    own = mlx_marlin.optimize(wide(), trace=False)
    expected = decoded(own, one_stream)

    model = traced(wide())
    assert_close(decoded(model, one_stream), expected, 2e-3)

    assert bool(choices) == (name != "gate")  # of which nothing is computed
    x = mx.zeros((1, 1, 128), mx.float16)
    ours, mlxs = (
        each.layers[0](x, None, caches.KVCache()).dtype for each in (model, own)
    )
    assert ours == mlxs


@sampled(5)
@pytest.mark.usefixtures("stock", "unfused")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_oss", {}),
        ("exaone4", {"sliding_window_pattern": "LG"}),
        ("gemma3_text", {"rope_local_base_freq": 100.0}),
        ("olmo3", {}),
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("of_model", [False, True], ids=["alone", "generate"])
def test_windows_hide_tokens_of_a_stream(
    family: str, options: dict[str, Any], of_model: bool
) -> None:
    def logits(model: nn.Module) -> list[mx.array]:
        alone = [caches.BatchKVCache([0]) for _ in model.layers]
        cache = model.make_cache() if of_model else alone
        return [model(mx.array([[i]]), cache=cache) for i in range(12)]

    options = {**options, "sliding_window": 4}
    own, model = tiny(family, **options), traced(tiny(family, **options))
    assert_equal(logits(model), logits(own))
    specs = [block._inspection.spec is not None for block in model.layers]
    assert specs == [True, family != "exaone4"]  # whose second layer has no rope


@pytest.mark.usefixtures("stock", "unfused")
@pytest.mark.parametrize(
    ("family", "options", "hidden"),
    [
        ("exaone4", {}, [False, False]),
        ("exaone4", {"sliding_window_pattern": "LG"}, [True, False]),
        ("gemma3_text", {}, [True, False]),
        ("gpt_oss", {}, [True, True]),
        ("olmo3", {}, [True, False]),
        ("llama", {}, [False, False]),
    ],
)
def test_layers_without_a_window_need_no_mask_for_a_stream_alone(
    family: str, options: dict[str, Any], hidden: list[bool]
) -> None:
    model = traced(tiny(family, **options))
    mx.eval(model(mx.array([[3]]), cache=one_stream(model)))
    assert [block._inspection.windowed for block in model.layers] == hidden


@pytest.mark.usefixtures("stock", "unfused")
def test_what_gemma_adds_is_kept_within_float16() -> None:
    mx.random.seed(7)
    x = mx.random.uniform(-65000, 65000, (1, 3, 128)).astype(mx.float16)
    outputs = []
    for model in (tiny("gemma3_text", mx.float16), tiny("gemma3_text", mx.float16)):
        for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
            model.layers[0][name].weight *= 2000
        block = traced(model).layers[0] if outputs else model.layers[0]
        outputs.append(block(x, None, caches.KVCache()))
    assert mx.array_equal(*outputs)
    assert (mx.abs(outputs[0]) == mx.finfo(mx.float16).max).any()


@pytest.mark.usefixtures("stock")
def test_each_layer_of_granite_has_its_factor() -> None:
    model, own = traced(tiny("granite")), tiny("granite")
    for factor in (3, mx.array(0.5)):
        for each in (model, own):
            each.layers[1].residual_multiplier = factor
        assert_equal(decoded(model, one_stream), decoded(own, one_stream))
        first, second = (block._inspection.spec for block in model.layers)
        assert first != second
        # A factor that is learned runs in mlx-lm's code.
        assert (second is None) == isinstance(factor, mx.array)


@pytest.mark.usefixtures("unfused")
def test_a_kernel_chooses_in_every_thread_and_stream(
    cuda: list[Plan], choices: list[Routing]
) -> None:
    model = traced(tiny("mixtral", mx.float16))
    decoded(model, one_stream)
    for stream in (None, mx.new_stream(mx.default_device())):
        choices.clear()
        with ThreadPoolExecutor(1) as pool, mx.stream(stream or mx.default_device()):
            if stream is None:
                pool.submit(decoded, model, one_stream).result()
            else:
                decoded(model, one_stream)
        assert choices


@pytest.mark.usefixtures("kernels")
def test_invariant_rows_have_the_bits_of_the_blocks_own_code() -> None:
    options = {"layout": "marlin", "join": True, "invariant": True}
    model = traced(tiny("llama", mx.float16), **options)
    untraced = mlx_marlin.optimize(tiny("llama", mx.float16), **options)

    outputs = decoded(model, one_stream, prompt=3)

    assert_equal(outputs, decoded(untraced, one_stream, prompt=3))
    assert graphs(model)


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
