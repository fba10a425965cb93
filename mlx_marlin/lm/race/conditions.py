"""Where a model is not raced, and why."""

import os
from io import StringIO
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.backends import measured_results, selection
from mlx_marlin.layers.linear import SHARDED
from mlx_marlin.lm.known_layers import is_sharded
from mlx_marlin.lm.module_tree import computing_layers
from mlx_marlin.lm.recipe import Recipe
from mlx_marlin.planning.device import PARAVIRTUAL
from mlx_marlin.products import this_machine
from mlx_marlin.products.request import CPU


def why_not(model: nn.Module, recipe: Recipe) -> str | None:
    """Returns why a model, not converted yet, is not raced in this process, or None."""
    backend = selection.backend()
    if not recipe.measure:
        return "measure=False"
    if os.environ.get(measured_results.ENVIRONMENT) == "0":
        return f"{measured_results.ENVIRONMENT}=0"
    if backend not in selection.ON_GPU or selection.missing():
        return "there is no GPU here"
    if not selection.may_hand_over():
        return f"{selection.ENVIRONMENT} is set, so stock MLX serves no call of ours"
    if measured_results.stands_for_another(backend):
        return "plans are made for another chip than this machine's"
    device = this_machine.device()
    if device.unsupported is not None:
        return device.unsupported
    if device.name == PARAVIRTUAL:
        return "a paravirtual device's times say nothing about another one's"
    if not recipe.key:
        return "the model's layers or settings cannot be read"
    if mx.default_device() == CPU:
        return "calls run on the CPU"
    if is_divided(model):
        return "the model is divided among machines, which would wait for each other"
    if is_lazy(model):
        return "its weights are not loaded yet"
    return None


def is_divided(model: nn.Module) -> bool:
    """Returns whether other machines have layers, or parts of layers, of a model."""
    layers = computing_layers(model)
    if any(is_sharded(layer) or type(layer) in SHARDED for layer in layers):
        return True
    # mlx-lm's `PipelineMixin`
    return any(getattr(each, "pipeline_size", 1) > 1 for each in model.modules())


def is_lazy(model: nn.Module) -> bool:
    """Returns whether a weight of a model is not evaluated, or a tracer's.

    MLX has no function for the question. The graph of an array that has been evaluated
    has no operation (0.32.4).
    """
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    text = StringIO()
    mx.export_to_dot(text, *(array for _, array in arrays))
    return "label" in text.getvalue()
