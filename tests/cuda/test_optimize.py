"""What `optimize` and the demo do on a CUDA device."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

import mlx_marlin
from mlx_marlin.cli import demo
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.layer_conversion import default_layout
from support.arguments import activations, weight
from support.choose import Choose
from support.cuda_launches import K, Model, N
from support.recorder import Recorder


def test_optimize_packs_what_cuda_serves(recorder: Recorder) -> None:
    model = mlx_marlin.optimize(Model())

    assert type(model.linear) is MarlinLinear
    assert model.linear.layout == "marlin"
    assert type(model.experts) is MarlinSwitchLinear
    assert model.experts.layout == "marlin"
    again = mlx_marlin.optimize(model)
    assert again.linear.layout == again.experts.layout == "marlin"
    mlx_marlin.restore(model)
    assert type(model.linear) is nn.QuantizedLinear
    assert type(model.experts) is QuantizedSwitchLinear


def test_optimize_keeps_float32_in_mlxs_layout_and_any_layout_asked_for(
    recorder: Recorder,
) -> None:
    wide = mlx_marlin.optimize(Model(mx.float32))
    assert wide.linear.layout == "mlx"
    assert type(wide.experts) is QuantizedSwitchLinear
    assert mlx_marlin.optimize(Model(), layout="mlx").linear.layout == "mlx"
    asked = mlx_marlin.optimize(Model(mx.float32), layout="marlin")
    assert asked.linear.layout == "marlin"


def test_optimize_refuses_invariance_of_heads_and_experts(recorder: Recorder) -> None:
    heads = MultiLinear(64, 64, 2).to_quantized(64, 4, "affine")
    whole = nn.Sequential(nn.QuantizedLinear(64, 64), heads)
    experts = Model()
    needed = "1 quantized layers have no invariant kernel"
    for first, model, name in (
        (whole, nn.Sequential(heads), ""),
        (experts, experts, "such as MarlinSwitchLinear"),
    ):
        with pytest.raises(ValueError, match=needed):
            mlx_marlin.optimize(first, invariant=True)
        mlx_marlin.optimize(model)
        with pytest.raises(ValueError, match=f"{needed}.*{name}"):
            mlx_marlin.optimize(model, invariant=True)
    assert not experts.experts.invariant


def test_the_demo_complains_if_nothing_ran(recorder: Recorder) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)

    assert "none of our kernels ran" in demo.wrong_results(8.0, 8.0)[0]
    mlx_marlin.quantized_matmul(x, *native)
    assert demo.wrong_results(8.0, 8.0) == []


def test_elsewhere_the_default_is_mlxs_layout(backend: Choose) -> None:
    backend("emulator")

    assert default_layout(Model().linear) == "mlx"
    assert mlx_marlin.optimize(Model()).linear.layout == "mlx"
