"""Blocks as traced graphs compute what mlx-lm's own code does."""

import copy
import gc
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as caches
from mlx_lm.models import rope_utils
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_marlin
from mlx_marlin.backends import experts_launch, launch
from mlx_marlin.backends.cuda.experts_plan import CudaGatherPlan
from mlx_marlin.integrations.tracing import block as traced_block
from mlx_marlin.integrations.tracing import regions
from mlx_marlin.integrations.tracing.block import TracedBlock
from mlx_marlin.integrations.tracing.known_blocks import FAMILIES
from mlx_marlin.integrations.tracing.rotation import HOST_BYTES
from mlx_marlin.integrations.tracing.routing import Routing, stock_sum
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.planning.dense_plan import DensePlan
from mlx_marlin.planning.epilogue import Rotation
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import dispatch
from mlx_marlin.products.packing import unpack
from mlx_marlin.products.reference_epilogue import rotated, split_apart
from mlx_marlin.products.stock_weight import plain
from mlx_marlin.weights.packed_weight import PackedWeight
from support.cuda_experts import choice_of_mlx
from support.models import LAYOUTS, arrays, assert_same_model

generate = import_module("mlx_lm.generate")  # the package hides it behind a function

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "num_nextn_predict_layers": 0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 96,
    "use_bias": False,
    "partial_rotary_factor": 0.5,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "sliding_window": 512,
    "sliding_window_pattern": None,
    "rope_scaling": None,
}
Caches = list[Any]
JOINED_HEADS, JOINED_GATES = {"phi3"}, {"phi3", "glm", "glm4"}
"""Families in which mlx-lm has q, k and v, or gate and up, as one layer."""
SUMS_APART = {"exaone4", "gemma3_text", "glm4", "granite", "olmo2", "olmo3"}
"""Families that normalize or multiply what they add to the residual."""
NO_NORMS = {"exaone4", "gemma3_text", "olmo2", "olmo3"}
"""Families without norms before products, or whose norms are their own."""
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window_pattern": 2},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
}


def tiny(family: str, dtype: mx.Dtype = mx.float32, **options: Any) -> nn.Module:
    """Returns a small model whose norms and biases are not ones and zeros."""
    module = import_module(f"mlx_lm.models.{family}")
    given = {"model_type": family, **SIZES, **OWN_SIZES.get(family, {}), **options}
    mx.random.seed(3)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(given))
    nn.quantize(model, group_size=32, bits=4)
    for path, array in arrays(model).items():
        if path.endswith(("norm.weight", "proj.bias", "router.bias", "sinks")):
            model.load_weights(
                [(path, array + 0.2 * mx.random.normal(array.shape))], strict=False
            )
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def one_stream(model: nn.Module) -> Caches:
    return [caches.KVCache() for _ in model.layers]


def with_left_padding(model: nn.Module) -> Caches:
    return [caches.BatchKVCache([0, 2, 1]) for _ in model.layers]


def many_streams(model: nn.Module) -> Caches:
    return [Together() for _ in model.layers]


class Together(caches.KVCache):
    """The cache of a batch whose streams are all at the same place."""

    batch = 3


def rotating(model: nn.Module) -> Caches:
    return [caches.RotatingKVCache(max_size=8, keep=2) for _ in model.layers]


def rotating_batch(model: nn.Module) -> Caches:
    return [caches.BatchRotatingKVCache(8, [0, 2, 1]) for _ in model.layers]


def quantized(model: nn.Module) -> Caches:
    return [caches.QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]


ALL_CACHES = [one_stream, with_left_padding, rotating, rotating_batch, quantized]


def decoded(
    model: nn.Module, make: Callable[[nn.Module], Caches], prompt: int = 11
) -> list[mx.array]:
    """Returns logits of a prompt, of a few tokens at once, and of single ones."""
    cache = make(model)
    of_batch = "atch" in type(cache[0]).__name__
    batch = getattr(cache[0], "batch", 3 if of_batch else 1)
    mx.random.seed(5)
    tokens = mx.random.randint(0, 100, (batch, prompt + 9))
    ends = [0, prompt, prompt + 3, *range(prompt + 4, prompt + 10)]
    outputs = []
    for start, end in pairwise(ends):
        outputs.append(model(tokens[:, start:end], cache=cache))
        mx.eval(outputs[-1])
    return outputs


ALL = pytest.mark.parametrize("make", ALL_CACHES, ids=lambda make: make.__name__)


def traced(model: nn.Module, **options: Any) -> nn.Module:
    """Returns the model with blocks that are traced, which it must have."""
    mlx_marlin.optimize(model, trace=True, **options)
    assert all(isinstance(block, TracedBlock) for block in model.layers)
    return model


def graphs(model: nn.Module) -> dict[Any, Any]:
    """Returns the graphs of a model's blocks, which must all share them."""
    contents = [block._contents for block in model.layers]
    assert len({id(each.kind) for each in contents}) == 1
    found: dict[Any, Any] = contents[0].kind.graphs
    return found


def assert_equal(actual: list[mx.array], expected: list[mx.array]) -> None:
    for ours, own in zip(actual, expected, strict=True):
        assert ours.dtype == own.dtype
        assert mx.array_equal(ours, own)


def assert_close(actual: list[mx.array], expected: list[mx.array], most: float) -> None:
    for ours, own in zip(actual, expected, strict=True):
        assert ours.dtype == own.dtype
        ours, own = ours.astype(mx.float32), own.astype(mx.float32)
        assert mx.linalg.norm(ours - own) <= most * mx.linalg.norm(own)


@pytest.fixture
def stock(backend: Callable[[str], None]) -> None:
    backend("stock")


@pytest.fixture
def gathered() -> list[CudaGatherPlan]:
    """The plans of experts' products, in turn."""
    return []


@pytest.fixture
def choices() -> list[Routing]:
    """How rows chose experts by a kernel, in turn."""
    return []


@pytest.fixture
def cuda(
    backend: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    gathered: list[CudaGatherPlan],
    choices: list[Routing],
) -> list[Plan]:
    """Puts MLX's operations in the place of CUDA's kernels, and lists their plans.

    They can be traced, and round once.
    """
    plans: list[Plan] = []

    def decoded(problem: Problem, w: mx.array, scales: mx.array) -> mx.array:
        sizes = {"n": problem.n, "k": problem.k, "group_size": problem.group_size}
        return plain(PackedWeight(words=w, scales=scales, **sizes), mx.float32)

    def dense_product(plan: DensePlan) -> launch.Product:
        def run(x: mx.array, w: mx.array, scales: mx.array, _: mx.array) -> mx.array:
            y = x.astype(mx.float32) @ decoded(plan.problem, w, scales)
            return y.astype(x.dtype)

        assert not plan.transposed
        return run

    def product(plan: Plan) -> launch.Product:
        problem = plan.problem
        epilogue = problem.epilogue

        def run(
            x: mx.array, w: mx.array, scales: mx.array, _: mx.array, *finish: mx.array
        ) -> mx.array:
            plans.append(plan)
            if problem.norm is not None:
                x = mx.fast.rms_norm(x, finish[-1], problem.norm)
            y = x.astype(mx.float32) @ decoded(problem, w, scales).T
            y = y + finish[0] if epilogue.bias else y
            y = y + finish[2] if epilogue.residual else y
            if epilogue.rotation is not None:
                y = mx.stop_gradient(y.astype(x.dtype))
                arrays = finish[3 : 5 if epilogue.rotation.norm is None else 7]
                return rotated(y, epilogue.rotation, epilogue.parts, *arrays)
            if epilogue.gated:
                gate, up = mx.split(y, 2, axis=-1)
                y = nn.silu(gate) * up
            y = mx.stop_gradient(y.astype(x.dtype))  # to MLX a kernel is opaque
            return split_apart(y, epilogue.parts) if epilogue.parts else y

        return run

    def of_experts(plan: CudaGatherPlan) -> launch.Product:
        gathered.append(plan)
        problem = plan.problem
        sizes = {"n": problem.n, "k": problem.k, "group_size": problem.group_size}

        def times(
            x: mx.array,
            experts: mx.array,
            w: mx.array,
            scales: mx.array,
            bias: mx.array | None = None,
        ) -> mx.array:
            native = unpack(PackedWeight(words=w, scales=scales, **sizes))
            weights = mx.dequantize(*native, group_size=problem.group_size)
            rows = mx.repeat(x.reshape(-1, problem.k), plan.each, axis=0)
            chosen = weights[experts.flatten()].astype(mx.float32)
            y = rows[:, None].astype(mx.float32) @ chosen.swapaxes(1, 2)
            return y if bias is None else y + bias[experts.flatten(), None]

        def run(
            x: mx.array, w: mx.array, scales: mx.array, _: mx.array, *given: mx.array
        ) -> mx.array:
            *others, experts = given
            second = others[: 2 if plan.gate else 0]
            biases = others[len(second) :]
            y = times(x, experts, w, scales, *biases[:1])
            if plan.gate:
                activation = SwiGLU() if plan.gate == "silu" else SwigluOAI()
                y = activation(times(x, experts, *second, *biases[1:]), y)
            y = mx.stop_gradient(y.astype(x.dtype))
            return y.reshape(*experts.shape, 1, problem.n)

        return run

    def route(logits: mx.array, *given: Any) -> tuple[mx.array, ...]:
        choices.append(Routing(*given))
        return tuple(map(mx.stop_gradient, choice_of_mlx(logits, *given)))

    def combine(*given: mx.array) -> mx.array:
        return mx.stop_gradient(stock_sum(*given))

    backend("cuda")
    monkeypatch.setattr(experts_launch, "cuda_gather_product", of_experts)
    monkeypatch.setattr(experts_launch, "route", route)
    monkeypatch.setattr(experts_launch, "combine", combine)
    monkeypatch.setattr(launch, "product", product)
    monkeypatch.setattr(launch, "dense_product", dense_product)
    return plans


@pytest.mark.thinned(44)
@pytest.mark.usefixtures("stock")
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


@pytest.mark.thinned(22)
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [one_stream, with_left_padding])
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
    assert not any(plan.gate for plan in gathered)

    outputs = decoded(traced(tiny(family, mx.float16), **options), make)

    # A sum in an epilogue rounds once, in mlx-lm's code twice.
    assert_close(outputs, expected, 2e-3)
    sums = [plan for plan in cuda if plan.problem.epilogue.residual]
    experts = FAMILIES[family].experts  # which have sums and gates of their own
    last = family in ("gpt_oss", "qwen3_moe")
    routing = Routing(2, of_all=family == "qwen2_moe", last=last)
    routings = {routing} if experts else set()
    assert any(plan.gate for plan in gathered) == bool(experts)
    assert {*choices} == routings
    summed = set() if family in SUMS_APART else {128} if experts else {128, 96}
    assert {plan.problem.k for plan in sums} == summed
    network = experts is None or experts.shared is not None
    gates = (join or family in JOINED_GATES) and family != "gemma3_text"  # gelu
    assert any(plan.problem.epilogue.gated for plan in cuda) == (gates and network)
    normed = [plan.problem for plan in cuda if plan.problem.norm is not None]
    assert all(each.norm == 1e-5 and each.m <= 8 for each in normed)
    kinds = {(each.epilogue.gated, len(each.epilogue.parts)) for each in normed}
    heads = {(False, 3), *({(False, 0)} if make is one_stream else ())}
    gated = set() if experts or not gates else {(True, 0)}
    of_heads = heads if join or family in JOINED_HEADS else set()
    assert kinds == (set() if family in NO_NORMS else of_heads | gated)


WIDE_HEADS = {"head_dim": 64, "hidden_size": 256}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("family", "options", "rotates"),
    [
        ("llama", {}, True),
        ("llama", {"rope_scaling": LLAMA3}, True),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, True),
        ("llama", {"rope_scaling": YARN}, True),
        ("gpt_oss", {"rope_scaling": YARN}, True),
        ("qwen2", {}, True),
        ("llama", {"rope_traditional": True}, False),
        ("qwen3", {}, True),  # q and k have norms before
        ("exaone4", {}, True),
        ("olmo2", {}, False),  # of all heads together
        ("gemma3_text", {}, False),  # of its own class
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [one_stream, with_left_padding, many_streams])
def test_a_product_rotates_heads_of_64_features(
    cuda: list[Plan],
    make: Callable[[nn.Module], Caches],
    family: str,
    options: dict[str, Any],
    rotates: bool,
) -> None:
    given = {**WIDE_HEADS, **options}
    packed = {"layout": "marlin", "join": True}
    own = mlx_marlin.optimize(tiny(family, mx.float16, **given), **packed, trace=False)
    expected = decoded(own, make)
    assert not any(plan.problem.epilogue.rotation for plan in cuda)

    outputs = decoded(traced(tiny(family, mx.float16, **given), **packed), make)

    # Norms after the products stretch what is rounded: to float32 both have 3e-3.
    assert_close(outputs, expected, 4e-3 if family == "exaone4" else 2e-3)
    found = {plan.problem.epilogue.rotation for plan in cuda} - {None}
    rotation = Rotation(64, 384, each=make is with_left_padding)
    if options.get("rope_scaling") is YARN:
        rotation = replace(rotation, factor=0.1 * math.log(32) + 1)
    if family in ("qwen3", "exaone4"):
        rotation = replace(rotation, norm=1e-5, queries=256)
    assert found == ({rotation} if rotates else set())


def test_norms_of_heads_that_differ_are_mlxs(cuda: list[Plan]) -> None:
    def other() -> nn.Module:
        model = tiny("qwen3", mx.float16, **WIDE_HEADS)
        for block in model.layers:
            block.self_attn.k_norm.eps = 0.5
        return model

    packed = {"layout": "marlin", "join": True}
    own = mlx_marlin.optimize(other(), **packed, trace=False)

    outputs = decoded(traced(other(), **packed), one_stream)

    assert_close(outputs, decoded(own, one_stream), 2e-3)
    assert not any(plan.problem.epilogue.rotation for plan in cuda)


def two_streams(model: nn.Module) -> Caches:
    return [TwoStreams([0, 2]) for _ in model.layers]


class TwoStreams(caches.BatchKVCache):
    """A batch whose places MLX keeps where the host writes."""

    batch = 2


class LongOffsets(caches.BatchKVCache):
    """A batch whose places are no int32."""

    batch = 3

    def __init__(self, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self.offset = self.offset.astype(mx.int64)


def long_offsets(model: nn.Module) -> Caches:
    return [LongOffsets([0, 2, 1]) for _ in model.layers]


@pytest.mark.parametrize("make", [two_streams, long_offsets])
def test_other_places_are_for_mlxs_rope(
    cuda: list[Plan], make: Callable[[nn.Module], Caches]
) -> None:
    packed = {"layout": "marlin", "join": True}
    own = tiny("llama", mx.float16, **WIDE_HEADS)
    expected = decoded(mlx_marlin.optimize(own, **packed, trace=False), make)

    outputs = decoded(traced(tiny("llama", mx.float16, **WIDE_HEADS), **packed), make)

    assert_close(outputs, expected, 2e-3)
    assert not any(plan.problem.epilogue.rotation for plan in cuda)


def test_a_cache_of_other_streams_is_refused_by_mlx(cuda: list[Plan]) -> None:
    model = traced(tiny("llama", mx.float16, **WIDE_HEADS), layout="marlin", join=True)
    with pytest.raises(ValueError, match="offset"):
        model(mx.zeros((4, 1), mx.int32), cache=with_left_padding(model))
    assert not any(plan.problem.epilogue.rotation for plan in cuda)


def test_gradients_go_through_rotated_heads(
    cuda: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU MLX's rope has derivatives of x alone, and raises for its `freqs`."""
    own = tiny("llama", mx.float16, **WIDE_HEADS)
    mlx_marlin.optimize(own, layout="marlin", join=True, trace=False)
    model = traced(tiny("llama", mx.float16, **WIDE_HEADS), layout="marlin", join=True)
    x = mx.random.normal((1, 1, 256)).astype(mx.float16)

    def gradient(block: nn.Module) -> mx.array:
        def total(x: mx.array) -> mx.array:
            y: mx.array = block(x, None, caches.KVCache())
            return (y * y).sum()

        found: mx.array = mx.grad(total)(x)
        return found

    def rope(*arguments: Any, freqs: Any = None, **options: Any) -> mx.array:
        assert freqs is None
        return own_rope(*arguments, **options)

    expected, own_rope = gradient(own.layers[0]), mx.fast.rope
    monkeypatch.setattr(mx.fast, "rope", rope)
    found = gradient(model.layers[0])

    assert any(plan.problem.epilogue.rotation for plan in cuda)
    assert_close([found], [expected], 5e-3)


@pytest.mark.thinned(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernels_themselves_answer_as_mlx_lms_code(layout: str) -> None:
    model = traced(tiny("llama"), layout=layout, join=True)

    outputs = decoded(model, one_stream, prompt=2)

    assert_close(outputs, decoded(tiny("llama"), one_stream, prompt=2), 1e-5)


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 16,
            "long_factor": [1.5] * 16,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_every_rope_is_computed(scaling: dict[str, Any], join: bool) -> None:
    model = traced(tiny("llama", rope_scaling=scaling), join=join)

    outputs = decoded(model, one_stream)

    assert_close(
        outputs, decoded(tiny("llama", rope_scaling=scaling), one_stream), 1e-6
    )
    assert graphs(model)


@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("make", [one_stream, with_left_padding])
def test_layers_without_a_rope_are_traced(
    cuda: list[Plan], make: Callable[[nn.Module], Caches], join: bool
) -> None:
    given = {**WIDE_HEADS, "no_rope_layer_interval": 2}
    packed = {"layout": "marlin", "join": join}
    own = tiny("smollm3", mx.float16, **given)
    own = mlx_marlin.optimize(own, **packed, trace=False)
    expected = decoded(own, make)
    model = traced(tiny("smollm3", mx.float16, **given), **packed)

    assert_close(decoded(model, make), expected, 2e-3)

    kinds = [block._contents.kind for block in model.layers]
    ropes = [dict(kind.before)["rope"].cls.__name__ for kind in kinds]
    assert ropes == ["RoPE", "NoPE"]
    rotating = {plan.problem.epilogue.rotation for plan in cuda} - {None}
    assert len(rotating) == join  # those of the first layer


@pytest.mark.usefixtures("stock")
def test_a_rope_that_needs_a_number_runs_in_mlx_lms_code() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = traced(tiny("llama", rope_scaling=scaling))
    assert type(model.layers[0].self_attn.rope) is rope_utils.DynamicNTKScalingRoPE

    outputs = decoded(model, one_stream)

    assert_equal(outputs, decoded(tiny("llama", rope_scaling=scaling), one_stream))
    assert model.layers[0]._contents.kind is None


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the regions that Python runs: traced ones once for each trace."""
    found: list[str] = []

    def listed(name: str) -> None:
        own = getattr(regions, name)

        def region(*arguments: Any) -> Any:
            found.append(name)
            return own(*arguments)

        monkeypatch.setattr(regions, name, region)

    listed("_before")
    listed("_after")
    dispatch.forget()
    return found


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


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_weights_that_change_are_seen(join: bool) -> None:
    own, model = tiny("qwen2"), traced(tiny("qwen2"), join=join)
    decoded(model, one_stream)

    for each in (own, model):
        layer = each.layers[1]
        layer.input_layernorm.weight = layer.input_layernorm.weight * 2
        layer.self_attn.o_proj["scales"] = layer.self_attn.o_proj["scales"] * 3
        layer.mlp.down_proj.update({"scales": layer.mlp.down_proj["scales"] * 2})

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
    # One is of another kind now, and LoRA's is none.
    assert model.layers[0]._contents.kind is not None
    assert model.layers[1]._contents.kind is None


@pytest.mark.usefixtures("stock")
def test_what_is_replaced_in_experts_is_seen() -> None:
    def replaced(model: nn.Module) -> nn.Module:
        mx.random.seed(9)
        model.layers[0].mlp.gate = nn.Linear(128, 4, bias=False)
        model.layers[1].mlp.switch_mlp.activation = nn.SiLU()  # takes no two
        return model

    model = traced(tiny("qwen3_moe"))
    before = decoded(model, one_stream)
    kinds = [block._contents.kind for block in model.layers]
    assert kinds[0] is kinds[1] is not None

    with pytest.raises(TypeError):
        decoded(replaced(model), one_stream)

    assert model.layers[0]._contents.kind not in (None, kinds[0])
    assert model.layers[1]._contents.kind is None
    model.layers[1].mlp.switch_mlp.activation = SwiGLU()
    own = replaced(tiny("qwen3_moe"))
    own.layers[1].mlp.switch_mlp.activation = SwiGLU()
    outputs = decoded(model, one_stream)
    assert_equal(outputs, decoded(own, one_stream))
    assert not mx.allclose(outputs[-1], before[-1], rtol=0.1)
    assert model.layers[1]._contents.kind is kinds[1]


@pytest.mark.usefixtures("stock")
def test_how_many_experts_a_row_chooses_may_change() -> None:
    own, model = tiny("qwen3_moe"), traced(tiny("qwen3_moe"))
    decoded(model, one_stream)

    for each in (own, model):
        each.layers[0].mlp.top_k = 1

    assert_equal(decoded(model, one_stream), decoded(own, one_stream))


def test_scores_may_be_shares_of_all_experts(
    cuda: list[Plan], choices: list[Routing]
) -> None:
    options = {"norm_topk_prob": False}
    own = mlx_marlin.optimize(tiny("qwen3_moe", mx.float16, **options), trace=False)

    outputs = decoded(traced(tiny("qwen3_moe", mx.float16, **options)), one_stream)

    assert_close(outputs, decoded(own, one_stream), 2e-3)
    assert {*choices} == {Routing(2, of_all=True, last=True)}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "gate"),
        ("qwen2_moe", "gate"),
        ("qwen2_moe", "shared_expert_gate"),
        ("qwen3_moe", "gate"),
    ],
)
def test_wider_gates_widen_what_mlx_lms_code_widens(
    cuda: list[Plan], choices: list[Routing], family: str, name: str
) -> None:
    def wide() -> nn.Module:
        model = tiny(family, mx.float16)
        for block in model.layers:
            experts = block[FAMILIES[family].place]
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


@pytest.mark.usefixtures("stock")
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
    kinds = [block._contents.kind is not None for block in model.layers]
    assert kinds == [True, family != "exaone4"]  # whose second layer has no rope


@pytest.mark.usefixtures("stock")
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
    assert [block._contents.windowed for block in model.layers] == hidden


@pytest.mark.usefixtures("stock")
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
    models = [tiny("granite"), tiny("granite")]
    for model in models:
        model.layers[1].residual_multiplier = 3

    outputs = decoded(traced(models[0]), one_stream)

    assert_equal(outputs, decoded(models[1], one_stream))
    first, second = (block._contents.kind for block in models[0].layers)
    assert first != second


@pytest.mark.usefixtures("stock")
def test_a_factor_that_is_learned_runs_in_mlx_lms_code() -> None:
    model = traced(tiny("granite"))
    model.layers[1].residual_multiplier = mx.array(0.5)
    decoded(model, one_stream)
    first, second = (block._contents.kind for block in model.layers)
    assert first is not None
    assert second is None


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


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
def test_gradients_go_through_experts_that_are_traced(family: str) -> None:
    own, wide = tiny(family), tiny(family)
    model = traced(tiny(family), layout="marlin")
    own.set_dtype(mx.float16)
    model.set_dtype(mx.float16)
    x = mx.random.normal((1, 1, 128), key=mx.random.key(8)).astype(mx.float16)

    def gradient(of: nn.Module, x: mx.array) -> mx.array:
        def total(x: mx.array) -> mx.array:
            return (of.layers[0](x, None, caches.KVCache()) ** 2).sum()

        return mx.grad(total)(x).astype(mx.float32)

    expected = gradient(wide, x.astype(mx.float32))
    error, theirs = (
        mx.linalg.norm(gradient(each, x) - expected) for each in (model, own)
    )
    assert error < 2 * theirs


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
    first, second = (block._contents.kind for block in model.layers)
    assert [name for name, _ in first.after] == ["norm", "o_proj", "experts"]
    assert [name for name, _ in second.after] == [
        "norm",
        "o_proj",
        "joined",
        "down_proj",
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("stock")
def test_gradients_go_through_a_traced_block(layout: str) -> None:
    def gradient(model: nn.Module) -> mx.array:
        def loss(x: mx.array) -> mx.array:
            cache = caches.KVCache()
            model.layers[0](x[:, :2], None, cache)
            y: mx.array = model.layers[0](x[:, 2:], None, cache)
            return (y**2).mean()

        return mx.grad(loss)(mx.random.normal((1, 3, 128), key=mx.random.key(0)))

    expected = gradient(tiny("llama"))

    found = gradient(traced(tiny("llama"), layout=layout, join=True))

    assert mx.abs(expected).min() > 0
    assert_close([found], [expected], 1e-5)


@pytest.mark.usefixtures("cuda")
def test_gradients_do_not_lack_what_a_trace_left_out(tmp_path: Path) -> None:
    model, own = (tiny("llama", mx.float16) for _ in range(2))
    traced(model, layout="marlin", join=True)
    x = mx.random.normal((1, 1, 128), key=mx.random.key(0)).astype(mx.float16)

    def gradient(block: nn.Module) -> mx.array:
        def loss(x: mx.array) -> mx.array:
            y: mx.array = block(x, None, caches.KVCache())
            return (y.astype(mx.float32) ** 2).mean()

        return mx.grad(loss)(x)

    block = model.layers[0]
    y = block(x, None, caches.KVCache())
    mx.export_to_dot(str(tmp_path / "graph"), y)
    graph = (tmp_path / "graph").read_text()
    assert "Matmul" in graph
    assert "CustomTransforms" not in graph

    assert_close([gradient(block)], [gradient(own.layers[0])], 2e-3)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("transform", [mx.vjp, mx.jvp])
def test_derivatives_go_through_a_batchs_attention(transform: Any) -> None:
    model, own = (tiny("llama", mx.float16) for _ in range(2))
    traced(model, layout="marlin", join=True)
    x = mx.random.normal((2, 5, 128), key=mx.random.key(0)).astype(mx.float16)

    def results(block: nn.Module) -> list[mx.array]:
        def decoded(x: mx.array) -> mx.array:
            cache = caches.BatchKVCache([0, 2])
            block(x[:, :4], cache.make_mask(4), cache)
            y: mx.array = block(x[:, 4:], cache.make_mask(1), cache)
            return y

        towards = mx.ones_like(x if transform is mx.jvp else decoded(x))
        found: list[list[mx.array]] = transform(decoded, [x], [towards])
        return [*found[0], *found[1]]

    block = model.layers[0]
    assert_close(results(block), results(own.layers[0]), 1e-3)


@pytest.mark.usefixtures("kernels")
def test_invariant_rows_have_the_bits_of_the_blocks_own_code() -> None:
    options = {"layout": "marlin", "join": True, "invariant": True}
    model = traced(tiny("llama", mx.float16), **options)
    untraced = mlx_marlin.optimize(tiny("llama", mx.float16), **options)

    outputs = decoded(model, one_stream, prompt=2)

    assert_equal(outputs, decoded(untraced, one_stream, prompt=2))
    assert graphs(model)


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_restore_gives_back_the_blocks(join: bool) -> None:
    model = traced(tiny("qwen3"), layout="marlin", join=join)
    decoded(model, one_stream)

    mlx_marlin.restore(model)

    assert_same_model(model, tiny("qwen3"))
    assert all(vars(ours).keys() == vars(own).keys() for ours, own in both(model))


def both(model: nn.Module) -> Any:
    return zip(model.layers, tiny("qwen3").layers, strict=True)


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
    monkeypatch.setattr("mlx_marlin.integrations.mlx_lm.convert.join_layers", fail)

    with pytest.raises(BreakError):
        mlx_marlin.optimize(model, join=True, trace=True)

    assert_same_model(model, tiny("llama"))


@pytest.mark.usefixtures("stock")
def test_a_copy_of_a_traced_model_is_one() -> None:
    model = traced(tiny("llama"))
    expected = decoded(model, one_stream)

    other = copy.deepcopy(model)

    assert other.layers[0]._contents is None
    assert_equal(decoded(other, one_stream), expected)
    assert other.layers[0]._contents.kind is model.layers[0]._contents.kind


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
def test_a_traced_model_can_be_pickled(join: bool) -> None:
    model = traced(tiny("llama"), layout="mlx", join=join)
    expected = decoded(model, one_stream)

    again = pickle.loads(pickle.dumps(model))

    assert all(isinstance(block, TracedBlock) for block in again.layers)
    assert_equal(decoded(again, one_stream), expected)


@pytest.mark.usefixtures("stock")
def test_a_bias_that_comes_or_goes_is_seen() -> None:
    model = traced(tiny("llama", attention_bias=True))
    own = tiny("llama", attention_bias=True)
    decoded(model, one_stream)
    for each in (model, own):
        attention = each.layers[0].self_attn
        mx.random.seed(1)
        each.layers[0].mlp.down_proj["bias"] = mx.random.normal((128,))
        del attention.q_proj["bias"]

    assert_equal(decoded(model, one_stream), decoded(own, one_stream))


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
    backend: Callable[[str], None],
    options: dict[str, Any],
    is_joined: bool,
    is_traced: bool,
) -> None:
    for name, is_cuda in (("cuda", True), ("stock", False)):
        backend(name)
        block = mlx_marlin.optimize(tiny("llama", mx.float16), **options).layers[0]

        assert isinstance(block, TracedBlock) == (is_cuda and is_traced)
        parts = isinstance(block.mlp.up_proj, MarlinPart)
        assert parts == (is_cuda and is_joined)


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
    assert model.layers[0]._contents.kind is None


@pytest.mark.usefixtures("cuda")
def test_offsets_are_arrays_once_a_token() -> None:
    offset, places = traced_block._arrays_of(70)

    assert traced_block._arrays_of(70)[0] is offset
    assert traced_block._arrays_of(70)[1] is places
    assert offset.item() == 70
    assert set(places.tolist()) == {70}
    assert offset.dtype == places.dtype == mx.int32
    assert places.nbytes > HOST_BYTES
    assert traced_block._arrays_of(71)[0].item() == 71


@pytest.mark.usefixtures("cuda")
def test_threads_decode_side_by_side() -> None:
    """What a thread computes belongs to its stream, and may be evaluated later."""
    model = traced(tiny("llama", mx.float16, **WIDE_HEADS), layout="marlin", join=True)
    mx.eval(model.parameters())

    def decode(token: int, turns: threading.Barrier) -> mx.array:
        cache = one_stream(model)
        for _ in range(3):
            turns.wait(20)
            y: mx.array = model(mx.array([[token]]), cache=cache)
            turns.wait(20)
            mx.eval(y)
        return y

    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(decode, token, both) for token in (5, 6)]
        results = [each.result() for each in jobs]

    alone = [decode(token, threading.Barrier(1)) for token in (5, 6)]
    assert_equal(results, alone)
