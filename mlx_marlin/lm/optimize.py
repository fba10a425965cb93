"""`optimize` and `restore`: converts the layers of an mlx-lm model in place."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import mlx.nn as nn

from mlx_marlin.layers.linear import SHARDED
from mlx_marlin.lm.float16 import (
    check_compute,
    drop_float16_record,
    give_back_bfloat16,
    outcome_of,
    use_float16,
)
from mlx_marlin.lm.known_layers import (
    is_marlin_experts,
    is_marlin_heads,
    is_quantized,
    supports_experts,
    supports_heads,
)
from mlx_marlin.lm.layer_conversion import (
    LayerConversion,
    can_unpack,
    has_stock_format,
    is_marlin_layer,
    join_layers,
    replace_layers,
    separate_layers,
    to_stock,
)
from mlx_marlin.lm.module_tree import (
    Changes,
    check_model,
    computing_layers,
    find_layers,
    one_at_a_time,
)
from mlx_marlin.lm.race import at_load, conditions, forward_race
from mlx_marlin.lm.recipe import Recipe, resolve
from mlx_marlin.lm.report import model_report
from mlx_marlin.lm.report.model_report import DryRun
from mlx_marlin.lm.tracing_code import set_tracing, tracing_code
from mlx_marlin.lm.warm_up import check_rows, run_once

Model = TypeVar("Model", bound=nn.Module)


class Options(TypedDict, total=False):
    """The options of `optimize`."""

    layout: str | None
    quantize: bool
    group_size: int | Literal["channel"]
    bits: int
    invariant: bool
    join: bool | None
    trace: bool | None
    fuse: Iterable[str] | None
    compute: str | None
    measure: bool
    warm_up: Sequence[int]
    progress: bool


@overload
def optimize(
    model: Model, *, dry_run: Literal[False] = False, **options: Unpack[Options]
) -> Model: ...


@overload
def optimize(
    model: nn.Module, *, dry_run: Literal[True], **options: Unpack[Options]
) -> DryRun: ...


@one_at_a_time
def optimize(
    model: Any,
    *,
    layout: str | None = None,
    quantize: bool = False,
    group_size: int | Literal["channel"] = 64,
    bits: int = 4,
    invariant: bool = False,
    join: bool | None = None,
    trace: bool | None = None,
    fuse: Iterable[str] | None = None,
    compute: str | None = None,
    measure: bool = True,
    warm_up: Sequence[int] = (),
    progress: bool = False,
    dry_run: bool = False,
) -> Any:
    """Converts a model's quantized layers to layers that run on our kernels, in place.

    On a GPU it times a model of a new shape once, for at most about 20 s, and keeps who
    was faster: our kernels or stock MLX, for each product and number of rows. Ctrl-C
    ends the timing only.

    Converts `nn.QuantizedLinear` layers in a supported format, mlx-lm's layers of
    several experts or heads, and `nn.QuantizedEmbedding` layers for tied output heads.
    Also converts sharded layers of MLX's. Does not convert subclasses of these, other
    formats, and experts that stock MLX would serve. If an error occurs, the model is
    left unchanged.

    If `mlx-marlin tune MODEL` has measured a model of this shape on this machine, what
    was fastest replaces the defaults of `layout`, `join`, `trace` and `fuse`, unless
    one of these, `quantize`, `invariant` or `compute` is given. If stock MLX was
    faster, no layer is converted, `warm_up` has no effect, and layers that an earlier
    call has converted become MLX's again, unless MLX does not have their format.
    `dry_run` and `MLX_MARLIN_LOG` show it.

    Args:
        model: An mlx-lm model or any other `nn.Module`.
        layout: "mlx" keeps the arrays of the weights. "marlin" packs all weights except
            embeddings; such a model can be saved or sharded only after `restore`.
            Default: "mlx"; on CUDA "marlin" for linear layers that our kernels serve.
        quantize: Also quantize `nn.Linear` layers whose k is a multiple of
            `group_size`. `restore` leaves these quantized.
        group_size: Group size of `quantize`. With `layout="marlin"` also 16, 256 or
            "channel", which is a whole row.
        bits: Bits of a code of `quantize`.
        invariant: Compute each row of a product as if it were the only one, so that its
            bits do not depend on the batch. Attention is MLX's and is not invariant.
        join: Compute layers with the same input in one launch: q, k and v; gate and up,
            if their formats are the same. Such a model can be saved or sharded only
            after `restore`. Default: False; on CUDA True, unless `layout="mlx"`.
        trace: Compile each known decoder block of mlx-lm into two cached graphs for
            calls with few rows and a cache, which reduces host overhead during
            decoding. Residual sums and, on CUDA, gatings are then rounded once.
            Default: False; on CUDA True. A warning is given if True traces nothing.
        fuse: Names of the operations that traced blocks fuse into one kernel, from
            "residual", "gate", "norm", "rope", "add_norm" and "experts". What a back
            end has no kernel for runs as separate operations. Default: "residual"; on
            CUDA all that it has.
        compute: "float16" converts bfloat16 parameters, and so activations, to float16,
            for GPUs that emulate bfloat16 (M1 and M2). With a model of mlx-lm's, a
            prompt of 16 tokens is run to see that nothing overflows; longer ones may.
            Default: the dtype stays.
        measure: Time a model that was not timed on this machine. False, or
            `MLX_MARLIN_TUNED=0`: the cost model decides who serves what. Models whose
            weights are lazy are never timed.
        warm_up: Numbers of rows, such as (1, 2, 4, 8), for which all kernels are
            compiled and checked before this function returns, with a progress bar.
            Later calls with as many rows compile nothing.
        progress: Show a progress bar; needs tqdm.
        dry_run: Change nothing, and return what would become of each layer.

    Returns:
        The same model. With `dry_run=True` the report without rows: the layers that
        would be converted and, with reasons, those that would stay, and with
        `trace=True` the blocks that would be traced or not; `str` returns a table.

    Raises:
        TypeError: If `model` is not an `nn.Module`.
        ValueError: If `layout`, `group_size`, `bits`, `fuse`, `compute` or `warm_up` is
            invalid, if fusions are named and blocks are not traced, if the model has no
            layer to convert or does not fit float16, or if `invariant` is true and some
            quantized layers would remain stock MLX's.
    """
    check_model(model)
    conversion = LayerConversion(
        layout=layout,
        quantize=quantize,
        group_size=group_size,
        bits=bits,
        invariant=invariant,
    )
    check_rows(warm_up)
    recipe = resolve(
        model,
        conversion,
        join=join,
        trace=trace,
        fuse=fuse,
        compute=compute,
        measure=measure,
    )
    _check_layers(model, recipe.conversion)
    check_compute(model, compute)
    if dry_run:
        half = None if compute is None else outcome_of(model)
        code = tracing_code(True) if recipe.trace else None
        return model_report.dry_run(model, recipe, half, code)
    if recipe.is_stock:
        _leave_to_stock(model, progress)
    else:
        _convert_and_race(model, recipe, warm_up, progress)
    return model


@one_at_a_time
def restore(model: Model, *, progress: bool = False) -> Model:
    """Converts the layers that `optimize` converted back to MLX's, in place.

    Args:
        model: A model that `optimize` converted.
        progress: Show a progress bar; needs tqdm.

    Returns:
        The same model, with all codes, scales, biases and dtypes as before. Layers that
        `quantize` and `compute` have converted have scales and biases that are rounded
        to the dtype before. A zero point becomes a bias, and a linear layer with a
        global scale an `nn.Linear`; if that rounds a weight, a warning is given.

    Raises:
        TypeError: If `model` is not an `nn.Module`.
    """
    check_model(model)
    with Changes() as changes:
        set_tracing(model, False, changes)
        separate_layers(model, changes)
        give_back_bfloat16(model, changes)
        converted = find_layers(model, is_marlin_layer)
        replace_layers(converted, to_stock, progress, changes)
        give_back_bfloat16(model, changes)
        drop_float16_record(model, changes)
    forward_race.keep(model, None)
    return model


def _convert_and_race(
    model: nn.Module, recipe: Recipe, warm_up: Sequence[int], progress: bool
) -> None:
    """Does what a recipe says; the model is left unchanged if an error occurs."""
    forwards = None
    with Changes() as changes:
        if conditions.why_not(model, recipe) is None:
            # The race has a bar of its own.
            convert = partial(_convert, model, progress=False, changes=changes)
            forwards = at_load.run(model, recipe, convert, changes.undo)
        else:
            _convert(model, recipe, progress=progress, changes=changes)
        run_once(model, warm_up)
    forward_race.keep(model, forwards)


def _convert(
    model: nn.Module, recipe: Recipe, *, progress: bool, changes: Changes
) -> None:
    """Converts a model as a recipe says, and records the changes."""
    conversion = recipe.conversion
    is_asked = recipe.trace and "trace" in recipe.given
    separate_layers(model, changes)
    if recipe.compute is not None:
        # Its record has MLX's names, which a later change of layout does not have.
        packed = find_layers(model, can_unpack)
        replace_layers(packed, to_stock, progress, changes)
        use_float16(model, changes)
    wanted = find_layers(model, conversion.applies_to)
    replace_layers(wanted, conversion.convert, progress, changes)
    if recipe.join:
        join_layers(model, changes)
    set_tracing(model, recipe.trace, changes, recipe.fuse, is_asked)


def _leave_to_stock(model: nn.Module, progress: bool) -> None:
    """Converts layers back to MLX's, except those that MLX's layers would round."""
    with Changes() as changes:
        set_tracing(model, False, changes)
        separate_layers(model, changes)
        converted = find_layers(model, has_stock_format)
        replace_layers(converted, to_stock, progress, changes)
    forward_race.keep(model, None)


def _check_layers(model: nn.Module, conversion: LayerConversion) -> None:
    """Checks that a model has a layer to convert, and can be invariant if requested."""
    layers = computing_layers(model)
    if not any(
        conversion.applies_to(layer) or is_marlin_layer(layer) for layer in layers
    ):
        raise ValueError(
            "model has no layer to convert: expected nn.QuantizedLinear in a supported "
            "format, or quantize=True for nn.Linear"
        )
    if not conversion.invariant:
        return
    # Layers of other packages may contain modules beside their codes.
    distinct = {id(layer): layer for layer in (*layers, *model.modules())}.values()
    variant = [layer for layer in distinct if _remains_variant(layer, conversion)]
    if variant:
        raise ValueError(
            f"invariant=True: {len(variant)} quantized layers have no invariant kernel "
            f"and would stay as they are, such as {variant[0]}"
        )


def _remains_variant(layer: nn.Module, conversion: LayerConversion) -> bool:
    """Returns whether a quantized layer would depend on the other rows.

    Layers that are not quantized are MLX's responsibility, as attention is.
    """
    if is_marlin_experts(layer):
        return not supports_experts(invariant=True)
    if is_marlin_heads(layer):
        return not supports_heads(invariant=True)
    if is_marlin_layer(layer):
        return type(layer) in SHARDED  # sums of machines
    return is_quantized(layer) and not conversion.applies_to(layer)
