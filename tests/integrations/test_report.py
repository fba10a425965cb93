"""The per-model report says what calls do, without evaluating a weight."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchGLU

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import selection
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.report.decisions import Decision
from mlx_marlin.lm.report.model_report import LayerReport, Report
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from support.choose import Choose
from support.decided_calls import decided, on_a_mac, with_a_gpu
from support.format_cases import GROUPED, any_weight, layouts_of, step_of
from support.models import Layers, tiny_llama
from support.profiles import drawn
from support.tune_commands import on_h200

ROWS = (1, 2, 5, 6, 8, 9, 33, 64, 65, 200, 513)


@pytest.fixture(autouse=True)
def _emulator(backend: Choose) -> None:
    backend("emulator")


def only(report: Report) -> LayerReport:
    (layer,) = report.layers
    return layer


def answer(decision: Decision) -> str | None:
    return decision.reason or decision.plan


def linear(
    form: tuple[str, int, int], layout: str, n: int, dtype: str, bias: bool
) -> MarlinLinear:
    """Returns a converted layer of two groups along k, or one of a whole row."""
    mode, bits, _ = form
    weight = any_weight(*form, n, 2 * step_of(*form), dtype=dtype, seed=1)
    added = mx.zeros(n, getattr(mx, dtype)) if bias else None
    if layout == "marlin":
        packed = pack(*weight.native, **weight.options)  # type: ignore[arg-type]
        return MarlinLinear.from_packed(packed, added)
    k = 2 * step_of(*form)
    stock = nn.QuantizedLinear(k, n, bias, weight.group_size, bits, mode)
    stock.weight, stock.scales, *biases = weight.native
    stock.biases = biases[0] if biases else None
    if added is not None:
        stock.bias = added
    return MarlinLinear.from_quantized(stock)


@drawn(
    33,
    form=st.sampled_from(GROUPED),
    packed=st.booleans(),
    n=st.sampled_from([8, 40, 96]),
    rows=st.sampled_from(ROWS),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    bias=st.booleans(),
)
@pytest.mark.parametrize("chip", [None, "Apple M3 Max", "Apple M1"])
def test_a_layer_does_what_its_report_says(
    chip: str | None,
    form: tuple[str, int, int],
    packed: bool,
    n: int,
    rows: int,
    dtype: str,
    bias: bool,
) -> None:
    layouts = layouts_of(*form)
    layout = "marlin" if packed or "mlx" not in layouts else "mlx"
    layer = linear(form, layout, n, dtype, bias)
    k = 2 * step_of(*form)
    model = Layers(nn.RMSNorm(k), layer)
    model.layers[0].weight = mx.ones(k, getattr(mx, dtype))
    x = mx.zeros((rows, k), getattr(mx, dtype))
    with pytest.MonkeyPatch.context() as patch:
        if chip is not None:
            on_a_mac(patch, chip)

        expected = decided(lambda: layer(x))
        (found,) = only(mlx_marlin.report(model, [rows])).decisions

        assert answer(found) == expected
        assert (found.served_by == "stock") == (found.reason is not None)
        assert (found.time is None) == (found.reason is not None)
        if chip is not None:
            (by_name,) = only(mlx_marlin.report(model, [rows], chip=chip)).decisions
            assert by_name == found


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("chip", [None, "Apple M3 Max"])
def test_experts_do_what_their_report_says(
    monkeypatch: pytest.MonkeyPatch,
    chip: str | None,
    rows: int,
    layout: str,
) -> None:
    if chip is not None:
        on_a_mac(monkeypatch, chip)
    model = SwitchGLU(64, 96, 6, bias=False)
    nn.quantize(model, group_size=32, bits=4)
    mlx_marlin.optimize(model, layout=layout)
    model.args = type("Args", (), {"num_experts_per_tok": 2})()
    x = mx.zeros((rows, 64))

    expected = decided(lambda: model(x, mx.zeros((rows, 2), mx.uint32)))

    layers = mlx_marlin.report(model, [rows]).layers
    by_name = {layer.use.name: layer for layer in layers}
    assert [*by_name] == ["gate_proj", "up_proj", "down_proj"]
    up = by_name["up_proj"]  # the first that mlx-lm calls
    assert up.use.choices == 2
    assert answer(up.decisions[0]) == expected
    named = mlx_marlin.report(model, [rows], chip="Apple M3 Max")
    if chip is not None:
        assert named.layers == layers


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("transpose", [True, False])
def test_heads_do_what_their_report_says(transpose: bool, layout: str) -> None:
    model = Layers(MultiLinear(64, 40, 4).to_quantized(32, 4))
    mlx_marlin.optimize(model, layout=layout)
    x = mx.zeros((1, 4, 3, 64 if transpose else 40))

    expected = decided(lambda: model.layers[0](x, transpose))

    plain, not_transposed = mlx_marlin.report(model, [3]).layers
    found = plain if transpose else not_transposed
    assert answer(found.decisions[0]) == expected
    assert not_transposed.use.operation == "heads, not transposed"


def test_heads_and_joined_layers_do_what_their_report_says() -> None:
    model = tiny_llama(tied=True)
    mlx_marlin.optimize(model, join=True, layout="marlin")

    head, *layers = mlx_marlin.report(model, [3]).layers

    embedding = model.model.embed_tokens
    expected = decided(lambda: embedding.as_linear(mx.zeros((3, 64))))
    assert head.use.operation == "as_linear"
    assert answer(head.decisions[0]) == expected
    joined = next(each for each in layers if "+" in each.use.name)
    assert joined.use.name == "model.layers.*.self_attn.q_proj+k_proj+v_proj"
    assert len(joined.use.paths) == 2
    assert joined.use.call.epilogue.parts == (64, 32, 32)
    part = model.model.layers[0].self_attn.q_proj
    assert answer(joined.decisions[0]) == decided(lambda: part(mx.zeros((3, 64))))
    embedding, *_ = mlx_marlin.report(tiny_llama(tied=False)).layers
    assert embedding.use.operation == "look-up"
    assert not embedding.decisions


@pytest.mark.parametrize(("layout", "server"), [("mlx", "stock"), ("marlin", "ours")])
def test_packed_parts_that_no_kernel_splits_are_columns_of_a_product(
    monkeypatch: pytest.MonkeyPatch, layout: str, server: str
) -> None:
    model = tiny_llama()
    mlx_marlin.optimize(model, join=True, layout=layout)

    def unsupported(problem: Problem, *_: Any) -> str | None:
        return "no kernel splits" if problem.epilogue.parts else None

    monkeypatch.setattr(selection.active(), "unsupported", unsupported)

    layers = mlx_marlin.report(model, [3]).layers

    joined = next(each for each in layers if "+" in each.use.name)
    assert joined.decisions[0].served_by == server


@pytest.mark.parametrize("on", ["emulator", "H200"])
def test_the_report_before_optimize_is_that_after_it(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    if on == "H200":
        on_h200(backend, monkeypatch)
        with_a_gpu(monkeypatch)
    model = tiny_llama(tied=False)
    model.set_dtype(mx.float16)
    before = mlx_marlin.report(model)
    named = mlx_marlin.report(model, chip="H200")
    mlx_marlin.optimize(model, join=False, trace=False)
    after = mlx_marlin.report(model)

    quantized = [layer.use for layer in before.layers if layer.decisions]
    assert not any(use.is_converted for use in quantized)
    assert all(layer.use.is_converted for layer in after.layers)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert old.use.name == new.use.name
        assert old.use.request == new.use.request
        assert old.decisions == new.decisions
    if on == "H200":
        assert named.layers == before.layers
        layouts = {use.call.layout for use in quantized}
        assert layouts == {"marlin"}


class Own(nn.QuantizedLinear):
    """A subclass, which `optimize` does not convert."""


def test_layers_that_stay_have_a_reason() -> None:
    group = mx.distributed.init()
    linear = nn.QuantizedLinear(64, 64)
    sharded = nn.QuantizedAllToShardedLinear.from_quantized_linear(linear, group=group)
    modules = {
        "0": (linear, None),
        "1": (Own(64, 64), "optimize does not convert a Own"),
        "2": (nn.QuantizedLinear(96, 64, mode="nvfp4"), "multiple of 64"),
        "3": (nn.Linear(64, 64), "not quantized"),
        "4": (sharded, None),
        "5": (MultiLinear(64, 40, 4), "not quantized"),
    }
    model = Layers(*(module for module, _ in modules.values()), nn.RMSNorm(64))

    layers = mlx_marlin.report(model).layers

    assert sorted(layer.use.name[-1] for layer in layers) == [*modules]
    for layer in layers:
        _, reason = modules[layer.use.name[-1]]
        stays = layer.use.stays
        assert (stays is None) == (reason is None)
        assert (reason or "") in (stays or "")
        served = {(call.served_by, call.reason) for call in layer.decisions}
        if layer.decisions:
            assert served == {("ours", None) if stays is None else ("stock", stays)}


def test_a_chip_keeps_experts_that_its_kernels_do_not_take() -> None:
    model = SwitchGLU(64, 96, 6, bias=False)
    nn.quantize(model, group_size=32, bits=4)  # float32, which Metal's kernels take

    for chip, is_kept in {"H200": True, "M3 Max": False}.items():
        for layer in mlx_marlin.report(model, [1], chip=chip).layers:
            assert (layer.use.stays is not None) == is_kept == (not layer.use.layout)


def test_equal_layers_are_one_group_and_shared_ones_count_once() -> None:
    one, other = nn.QuantizedLinear(64, 64), nn.QuantizedLinear(64, 96)
    model = Layers(one, nn.QuantizedLinear(64, 64), one, other)

    layers = mlx_marlin.report(model).layers

    named = {(each.use.name, len(each.use.paths)) for each in layers}
    assert named == {("layers.*", 2), ("layers.3", 1)}


def test_a_layer_inside_another_is_found() -> None:
    inner = linear(("affine", 4, 32), "marlin", 40, "float16", False)
    order = mx.arange(inner.input_dims)[::-1].astype(mx.int32)

    layer = only(mlx_marlin.report(Layers(ReorderedLinear(inner, order))))

    assert layer.use.name == "layers.0.linear"


def test_nobody_serves_invariant_rows_without_kernels(backend: Choose) -> None:
    model = mlx_marlin.optimize(tiny_llama(tied=False), invariant=True)
    backend("stock")

    report = mlx_marlin.report(model)

    served = {call.served_by for layer in report.layers for call in layer.decisions}
    assert served == {"nobody"}
    assert "nobody:" in str(report)


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_stock_mlx_serves_kernels_that_failed_their_check(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    model = mlx_marlin.optimize(tiny_llama(tied=False), layout=layout)
    monkeypatch.setattr(guard, "known_fault", lambda _: "it failed its check")

    report = mlx_marlin.report(model)

    calls = [call for layer in report.layers for call in layer.decisions]
    # Nobody has measured stock MLX here.
    times = {(call.time, call.kernel, call.stock_time) for call in calls}
    assert times == {(None,) * 3}
    assert {call.reason for call in calls} == {"it failed its check"}
    assert {call.served_by for call in calls} == {"stock"}


def test_no_weight_is_read(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    model = tiny_llama()
    model.save_weights(str(file))
    model.load_weights(str(file))
    # What is read from now on is zero. A file too short would do as well, but MLX
    # 0.32.4 may raise the error of such a read a second time, in a later evaluation.
    file.write_bytes(bytes(file.stat().st_size))

    text = str(mlx_marlin.report(model, rows=(1, 8, 100)))
    mlx_marlin.report(model, chip="H200").document()

    assert "model.layers.*.mlp.down_proj" in text
    weights = [array for _, array in tree_flatten(model.parameters())]
    assert not any(mx.any(array).item() for array in weights)


def test_only_times_of_a_model_are_called_predicted() -> None:
    model = tiny_llama()
    model.set_dtype(mx.float16)

    head, *_ = mlx_marlin.report(model, (8,), chip="H200").layers
    here = str(mlx_marlin.report(model))

    assert "our CUDA kernels serve up to 5" in str(head.decisions[0].reason)
    assert head.decisions[0].reason_origin is None
    assert "never falls back to stock MLX for performance" in here
    assert "never falls" not in str(mlx_marlin.report(model, chip="M3 Max"))


@pytest.mark.parametrize("rows", [(), (0,), (1, -2), (1.0,), (True,), "1,4", 8, [None]])
def test_wrong_rows_are_named(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"rows=.*, expected numbers of rows such as"):
        mlx_marlin.report(tiny_llama(), rows)


def test_wrong_chips_and_models_are_named() -> None:
    with pytest.raises(ValueError, match="device 'M77' is not one of"):
        mlx_marlin.report(tiny_llama(), chip="M77")
    with pytest.raises(ValueError, match="chip=3, expected a name"):
        mlx_marlin.report(tiny_llama(), chip=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got tuple"):
        mlx_marlin.report((tiny_llama(), None))  # type: ignore[arg-type]


def test_a_summary_counts_the_products_of_equal_layers() -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout="marlin", join=True)

    found = mlx_marlin.report(model, rows=(1, 64), chip="M3 Max")

    # Four products in each of two blocks; stock MLX serves the tied head.
    ours = "9 of 9 quantized products are converted; our kernels serve 8 at 1, 8 at 64"
    assert found.summary().startswith(ours)
    operations = [each["operation"] for each in found.document()["layers"]]
    assert sorted({*operations}) == ["as_linear", "linear"]
    table = str(found)
    for product in ("64→100, as_linear ", "64→128, 3 joined ", "64→320, 2 joined "):
        assert product in table
    plain = mlx_marlin.report(tiny_llama(), rows=(8,), chip="M3 Max")
    stocks = "0 of 15 quantized products are converted; our kernels serve 0 at 8 rows"
    assert plain.summary().startswith(stocks)


def test_a_product_is_told_with_its_heads_and_its_bias() -> None:
    heads = MultiLinear(64, 40, 3).to_quantized(group_size=16, bits=4, mode="nvfp4")
    model = Layers(heads, nn.QuantizedLinear(128, 96, bias=True))
    mlx_marlin.optimize(model)

    table = str(mlx_marlin.report(model, rows=(1,), chip="M3 Max"))

    assert "64→40, heads, 3 heads " in table
    assert "64→40, heads, not transposed, 3 heads " in table
    assert "128→96, bias " in table
