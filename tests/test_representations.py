"""What public functions return is a line in a REPL.

A file of its own: `test_public_api.py` runs beside an installed wheel, without support.
"""

import mlx.core as mx

import mlx_marlin
from support.choose import Choose
from support.models import tiny_llama


def test_what_is_returned_is_shown_in_a_line(backend: Choose) -> None:
    backend("emulator")
    model = tiny_llama()
    choice = mlx_marlin.plan(8, 4096, 4096, chip="M3 Max")
    packed = mlx_marlin.quantize(mx.ones((64, 128)))
    shown = {
        repr(choice): choice.explain(),
        repr(mlx_marlin.report(model)): "0 of 15 quantized products are converted",
        repr(mlx_marlin.optimize(model, dry_run=True)): "converts 15 of 15 layers",
        repr(mlx_marlin.optimize(model, dry_run=True).recipe): "measure=True",
        repr(mlx_marlin.verify(model, rows=(1,))): "15 of 15 layers passed",
        repr(packed): "PackedWeight(n=64, k=128, group_size=64, bits=4",
        repr(mlx_marlin.MarlinLinear.from_packed(packed)): "input_dims=128",
        repr(next(mlx_marlin.variants())): "Variant(",
    }
    for text, part in shown.items():
        assert part in text
        assert "\n" not in text
        assert len(text) < 350, text
