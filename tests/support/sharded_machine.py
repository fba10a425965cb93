"""One of several processes with a sharded model: prints a JSON object, its result.

usage: sharded_machine.py LAYOUT [dies | starts late | shards converted layers]
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear

import mlx_marlin
from support.models import Layers, arrays

WIDTH, HIDDEN = 128, 384  # each of 2 or 3 machines has whole groups of 64
LATE_SECONDS = 2.0


def whole_model() -> Layers:
    mx.random.seed(5)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    down.bias = mx.random.normal((WIDTH,))
    return Layers(up.to_quantized(), down.to_quantized())


def sharded(model: Layers, group: mx.distributed.Group) -> Layers:
    up, down = model.layers
    return Layers(
        shard_linear(up, "all-to-sharded", group=group),
        shard_linear(down, "sharded-to-all", group=group),
    )


def run(model: Layers, x: mx.array) -> mx.array:
    for layer in model.layers:
        x = layer(x)
    return x


def relative_error(y: mx.array, expected: mx.array) -> float:
    return (mx.linalg.norm(y - expected) / mx.linalg.norm(expected)).item()


def refusal(call: Callable[[], object]) -> str:
    """Returns the message of a call's ValueError, or nothing."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def sharded_after_conversion(
    layout: str, group: mx.distributed.Group
) -> tuple[Layers, str]:
    """Returns a model sharded after `optimize`, and why it had to be restored."""
    model = mlx_marlin.optimize(whole_model(), layout=layout)
    reason = refusal(lambda: sharded(model, group))
    if reason:
        mlx_marlin.restore(model)
    return sharded(model, group), reason


def uneven_refusals(group: mx.distributed.Group) -> list[str]:
    """Shards one row, and one group of columns, more than machines have evenly."""
    rows = nn.QuantizedLinear(64, 64 * group.size() + 1)
    columns = nn.QuantizedLinear(64 * (group.size() + 1), 64)
    return [
        refusal(lambda: shard_linear(rows, "all-to-sharded", group=group)),
        refusal(lambda: shard_linear(columns, "sharded-to-all", group=group)),
    ]


def main(layout: str, fault: str = "") -> None:
    rank = int(os.environ["MLX_RANK"])
    if fault == "starts late" and rank == 1:
        time.sleep(LATE_SECONDS)
    group = mx.distributed.init(strict=True, backend="ring")
    x = mx.random.normal((5, WIDTH), key=mx.random.key(1))
    expected = run(whole_model(), x)
    model, reason = sharded(whole_model(), group), ""
    if fault == "shards converted layers":
        model, reason = sharded_after_conversion(layout, group)
    unconverted = relative_error(run(model, x), expected)
    before = {name: array.tolist() for name, array in arrays(model).items()}
    mlx_marlin.optimize(model, layout=layout)
    if fault == "dies" and rank == 1:
        os._exit(1)
    result: dict[str, Any] = {
        "rank": rank,
        "classes": [type(layer).__name__ for layer in model.layers],
        "error": relative_error(run(model, x), expected),
        "error before conversion": unconverted,
        "sharding packed layers": reason,
        "sharding unevenly": uneven_refusals(group),
        "saving": refusal(lambda: mlx_marlin.save("saved", model, None)),
        "served_by": sorted(
            {
                call.served_by
                for layer in mlx_marlin.report(model, rows=(5,)).layers
                for call in layer.decisions
            }
        ),
    }
    after = arrays(mlx_marlin.restore(model))
    result["restored"] = [*before] == [*after] and all(
        before[name] == array.tolist() for name, array in after.items()
    )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
