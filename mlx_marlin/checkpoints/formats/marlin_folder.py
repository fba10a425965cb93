"""Reads the layers of our own checkpoints, which config.json lists.

`config["mlx_marlin"]` is {"version": 1, "layers": {LAYER: RECORD}}. A record has the
layout's tag, n, k, group_size, bits and mode; the arrays are LAYER.words,
LAYER.packed_scales (once LAYER.quantizers) and perhaps LAYER.global_scale and
LAYER.input_order. The key
"stock_layers" may list layers, packed or not, that are loaded as layers of stock MLX.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.folder import Folder
from mlx_marlin.checkpoints.stored_weight import TILES, PackedLayer
from mlx_marlin.regular_files import quoted
from mlx_marlin.weights import codebooks
from mlx_marlin.weights.packed_weight import PackedWeight

VERSION = 1
PARTS = ("words", "packed_scales", "global_scale", "input_order")
OLD_SCALES = "quantizers"
"""Name of `packed_scales` in checkpoints that were written before November 2026."""
SIZES = ("n", "k", "group_size", "bits")


def layers_of(folder: Folder) -> dict[str, dict[str, Any]]:
    """Returns the record of each packed layer; none if there are no such layers."""
    ours = folder.config.get("mlx_marlin")
    if ours is None:
        return {}
    where = f"{folder.path / 'config.json'}: mlx_marlin"
    if not isinstance(ours, dict) or not isinstance(ours.get("layers"), dict):
        raise ValueError(f"{where}: expected an object with version and layers")
    version = ours.get("version")
    if version != VERSION:
        raise ValueError(f"{where}: version {quoted(version)}, expected {VERSION}")
    layers: dict[str, dict[str, Any]] = ours["layers"]
    for layer, record in layers.items():
        _check_record(f"{where}: layer {quoted(layer)}", record)
    return layers


def stock_layers_of(config: dict[str, Any], path: Path) -> list[str]:
    """Returns the layers that stay on stock MLX."""
    ours = config.get("mlx_marlin")
    names = ours.get("stock_layers", []) if isinstance(ours, dict) else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{path / 'config.json'}: mlx_marlin: stock_layers={quoted(names)}, "
            f"expected a list of names"
        )
    return names


def _check_record(where: str, record: object) -> None:
    if not isinstance(record, dict) or record.get("layout") != TILES:
        raise ValueError(
            f"{where}: {quoted(record)}, expected an object with layout={TILES}"
        )
    for name in SIZES:
        size = record.get(name)
        if type(size) is not int or not 0 < size < 2**31:
            raise ValueError(
                f"{where}: {name}={quoted(size)}, expected an integer from 1"
            )
    if not isinstance(record.get("mode"), str):
        raise ValueError(
            f"{where}: mode={quoted(record.get('mode'))}, expected a string"
        )


def names_of(folder: Folder, layer: str) -> dict[str, str]:
    """Returns the names that a packed layer's arrays have or would have, by part."""
    names = {part: f"{layer}.{part}" for part in PARTS}
    old = f"{layer}.{OLD_SCALES}"
    if names["packed_scales"] not in folder.arrays and old in folder.arrays:
        names["packed_scales"] = old
    return names


def read(
    folder: Folder, layer: str, record: dict[str, Any], check_values: bool = True
) -> PackedLayer:
    """Reads a layer's weight, or a batch of them."""
    arrays = {
        part: folder.read(name)
        for part, name in names_of(folder, layer).items()
        if part in PARTS[:2] or name in folder.arrays
    }
    packed = PackedWeight(
        words=arrays["words"],
        scales=arrays["packed_scales"],
        mode=record["mode"],
        global_scale=arrays.get("global_scale"),
        **{name: record[name] for name in SIZES},
    )
    if check_values:
        PackedLayer(packed).stored().checked()
    if check_values and packed.codebook is not None:
        tables = codebooks.tables(packed.scales)
        if not mx.all(tables == packed.codebook):
            raise ValueError("rows have several codebooks, expected one")
    order = arrays.get("input_order")
    if order is not None and (order.dtype != mx.int32 or order.shape != (packed.k,)):
        raise ValueError(
            f"input_order {order.dtype} {order.shape}, expected int32 {(packed.k,)}"
        )
    return PackedLayer(packed, order)
