"""Records the bits of results of many calls, as the emulator computes them.

After an intended change of a kernel's arithmetic, record them again:

    python tests/recorded_bits.py
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

import mlx_marlin
from mlx_marlin import guard, state
from mlx_marlin.backends import devices, measured_results, selection
from mlx_marlin.backends.metal.device import ARCHITECTURE_ENVIRONMENT

FILE = Path(__file__).parent / "data" / "recorded_bits.json"
CHIPS = (("Apple M1", "applegpu_g13g"), ("Apple M3 Max", "applegpu_g15s"))
CALLS = 60
"""Recorded calls of a chip."""
SIZES = ((160, 512), (136, 1024), (64, 2048), (320, 256), (96, 768))
"""n and k of a weight."""
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 33, 48)
FORMATS = (
    *(("affine", bits, 64) for bits in (1, 2, 4, 4, 4, 5, 6, 8)),
    *(("affine", 3, 32), ("affine", 4, 128)),
    *(("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)),
)
KINDS = ("plain",) * 5 + ("fused", "invariant", "parts", "experts", "backward")
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def drawn(chip: str) -> list[str]:
    """Returns descriptions of the calls that are recorded for a chip."""
    draw = random.Random(chip)
    found: dict[str, None] = {}
    while len(found) < CALLS:
        rows, (n, k) = draw.choice(ROWS), draw.choice(SIZES)
        mode, bits, group_size = draw.choice(FORMATS)
        dtype = str(draw.choice(DTYPES)).removeprefix("mlx.core.")
        layout, kind = draw.choice(("mlx", "marlin")), draw.choice(KINDS)
        sizes = f"{rows}x{n}x{k}"
        found[f"{sizes} {mode} {bits} {group_size} {dtype} {layout} {kind}"] = None
    return [*found]


def digest(text: str) -> str:
    """Returns a digest of the bits of the result of the call that a text describes."""
    sizes, mode, bits, group_size, dtype, layout, kind = text.split()
    rows, n, k = map(int, sizes.split("x"))
    seed = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    keys = mx.random.split(mx.random.key(seed), 6)
    experts = (5,) if kind == "experts" else ()
    form = {"group_size": int(group_size), "bits": int(bits), "mode": mode}
    x_dtype = getattr(mx, dtype)
    plain = mx.random.normal((*experts, n, k), key=keys[0]).astype(x_dtype)
    weight: Sequence[mx.array] = mx.quantize(plain, **form)
    x = mx.random.normal((rows, k), key=keys[1]).astype(x_dtype)
    bias, multiply, residual = (
        mx.random.normal(shape, key=key).astype(x_dtype)
        for shape, key in zip(((n,), (rows, n), (rows, n)), keys[2:5], strict=True)
    )
    chosen = mx.random.randint(0, 5, (rows, 2), mx.uint32, key=keys[5])
    if layout == "marlin":
        arguments, form = (mlx_marlin.pack(*weight, **form),), {}
    else:
        arguments = tuple(weight)
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: mlx_marlin.quantized_matmul(x, *arguments, **form),
        "backward": lambda: mlx_marlin.quantized_matmul(
            mx.pad(x, ((0, 0), (0, n)))[:, :n], *arguments, transpose=False, **form
        ),
        "fused": lambda: mlx_marlin.linear(
            x,
            *arguments,
            bias=bias,
            activation="silu",
            multiply=multiply,
            residual=residual,
            **form,
        ),
        "invariant": lambda: mlx_marlin.linear(x, *arguments, invariant=True, **form),
        "parts": lambda: mlx_marlin.linears(
            x, *arguments, parts=(n // 2, n - n // 2), **form
        ),
        "experts": lambda: mlx_marlin.gather_qmm(
            x[:, None, None], *arguments, rhs_indices=chosen, **form
        ),
    }
    result = calls[kind]()
    arrays = result if isinstance(result, tuple | list) else (result,)
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(bytes(mx.contiguous(array).view(mx.uint8)))
    return whole.hexdigest()[:16]


def settings(chip: str, architecture: str) -> dict[str, str]:
    """Returns the environment in which the calls of a chip are recorded."""
    return {
        selection.ENVIRONMENT: "emulator",
        devices.ENVIRONMENT: chip,
        ARCHITECTURE_ENVIRONMENT: architecture,
        measured_results.ENVIRONMENT: "0",
        guard.ENVIRONMENT: "0",
    }


def of_chip(chip: str, architecture: str) -> dict[str, str]:
    """Returns the digest of each call that is recorded for a chip."""
    os.environ |= settings(chip, architecture)
    state.reset()
    return {text: digest(text) for text in drawn(chip)}


def recorded() -> dict[str, dict[str, str]]:
    """Returns what the file says: of each chip, of each call."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="ascii"))
    return found


def record() -> bool:
    """Writes the file again, prints what changed, and returns whether anything did."""
    before = recorded() if FILE.exists() else {}
    after = {chip: of_chip(chip, architecture) for chip, architecture in CHIPS}
    changed = [
        f"{chip}: {text}"
        for chip, calls in after.items()
        for text, bits in calls.items()
        if before.get(chip, {}).get(text) != bits
    ]
    print(*changed, sep="\n")
    FILE.write_text(json.dumps(after, indent=0) + "\n", encoding="ascii")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(record())
