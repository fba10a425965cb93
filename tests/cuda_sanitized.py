"""Runs every variant of the CUDA kernels once, for `compute-sanitizer` to watch.

    compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-name kns=marlin \
        python tests/cuda_sanitized.py --shard 1/8

The tool slows kernels down by ten to a hundred times: arrays are small, each product is
computed once, and shards run side by side. The filter leaves MLX's own kernels alone.
Each result is compared with float64 on the host.

MLX rounds what it asks the driver for up to powers of two and then to 16 KiB, and
keeps what it has freed. So here it keeps nothing, and each operand ends where its
memory does: reading past one is an error that memcheck sees. Results are MLX's to
place: what is written past one, inside what it was rounded up to, memcheck cannot see;
`tests/cuda/test_kernels_on_cpu.py` can, whose bounds are exact.

Exits 1 if a result is wrong.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlx_marlin.backends.cuda.limits import DTYPES
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue
from support import cuda_cases, cuda_experts, launches, oracles
from support.cuda_cases import (
    EPILOGUES,
    EPSILON,
    GATED,
    GATED_N,
    GATED_WAYS,
    LARGE,
    NORMED_HEADS,
    NORMED_WAYS,
    ROTATED_N,
    STAGED_WAYS,
    WAYS,
    WGMMA_WAYS,
    Case,
    Place,
)
from support.cuda_products import Product
from support.format_cases import arguments

Run = Callable[[], float]
"""Computes a result and returns its relative error over the one that it may have."""

PAGE = 16 * 1024
"""From this on MLX's memory is whole pages (mlx/backend/cuda/allocator.cpp, 0.32)."""
FORMAT = ("affine", 4, 64)
PACKED = (*FORMAT, "marlin", "float16")
WHOLES = (WAYS[0], WGMMA_WAYS[0], STAGED_WAYS[0])
SPLITS = (WAYS[3], WGMMA_WAYS[3], STAGED_WAYS[3])
WHOLE = WHOLES[0]
DECODED = (("affine", 3, 32), ("symmetric", 8, 128), ("mxfp4", 4, 32), ("nvfp4", 4, 16))


def runs() -> dict[str, Run]:
    """Returns what computes each variant once, by name."""
    found: dict[str, Run] = {}
    for kind, product in products():
        found[f"{kind} {product}"] = partial(multiply, product)
    for layout, way in (("mlx", WHOLE), *(("marlin", way) for way in WHOLES)):
        case = (*FORMAT, layout, "float16", 6, way)
        found[f"anywhere {case}"] = partial(multiply, Product(case), cuda_cases.moved)
    for name, call in cuda_experts.CALLS.items():
        found[f"experts, {name}"] = partial(multiply_experts, call)
    for choice in cuda_experts.ROUTINGS:
        found[f"experts chosen, {choice}"] = partial(choose_experts, choice)
    for format, dtype in itertools.product(DECODED, ("float16", "bfloat16")):
        case = (*format, "marlin", dtype, 1, WHOLE)
        found[f"decode {case[:5]}"] = partial(decode, case)
    return found


def products() -> Iterator[tuple[str, Product]]:
    """Yields each variant of a product, and what kind it is."""
    for case in cuda_cases.cases():
        yield "format", Product(case)
    for m, way in LARGE:
        yield "large block", Product(("affine", 4, 128, "marlin", "float16", m, way))
    for ways, rows in ((WAYS, (7, 40)), (WGMMA_WAYS, (13, 64)), (STAGED_WAYS, (7, 32))):
        for way, dtype_and_m in itertools.product(ways, zip(DTYPES, rows, strict=True)):
            yield "way", Product((*FORMAT, "marlin", *dtype_and_m, way))
    for way, epilogue in itertools.product((*WHOLES, SPLITS[0]), EPILOGUES):
        yield "epilogue", Product((*PACKED, 19, way), epilogue)
    heads = Epilogue(bias=True, rotation=NORMED_HEADS, parts=(128, 64, 64))
    for call in GATED_WAYS:
        yield "gated", Product((*PACKED, *call), GATED, GATED_N)
        yield "rotated", Product((*PACKED, *call), heads, ROTATED_N)
    for call in NORMED_WAYS:
        yield "normed", Product((*PACKED, *call), norm=EPSILON)
    for layout, way in itertools.product(("marlin", "mlx"), (WHOLE, SPLITS[0])):
        yield "batch", Product((*FORMAT, layout, "float16", 5, way), batch=3)
    for way in (*WHOLES[1:], *SPLITS[1:]):
        yield "batch", Product((*PACKED, 30, way), batch=3)


def allotted(nbytes: int) -> int:
    """Returns the bytes that MLX asks for where an array needs some."""
    if nbytes >= PAGE:
        return -(-nbytes // PAGE) * PAGE
    return max(8, 1 << (nbytes - 1).bit_length())


def at_end(array: mx.array) -> mx.array:
    """Returns an array that ends where its memory does."""
    missing = (allotted(array.nbytes) - array.nbytes) // array.itemsize
    whole = mx.concatenate([mx.zeros(missing, array.dtype), array.flatten()])
    mx.eval(whole)
    return whole[missing:].reshape(array.shape)


def multiply(product: Product, place: Place = at_end) -> float:
    y = product.run(product.plan, place)()
    return product.error(y) / oracles.TOLERANCES[product.case[4]]


def multiply_experts(call: cuda_experts.Call) -> float:
    return judged(call.run(at_end)(), call.expected, call.case)


def choose_experts(choice: cuda_experts.Choice) -> float:
    choice.check(launches.route, at_end)
    choice.check_sum(launches.combine, at_end)
    return 0


def decode(case: Case) -> float:
    weight, _ = cuda_cases.draw(case)
    plan = dequantize_plan(cuda_cases.plan_of(case).problem)
    y = launches.dequantized(plan)(*map(at_end, arguments(weight, case[3])))
    return judged(y, weight.decoded, case)


def judged(y: mx.array, expected: oracles.Floats, case: Case) -> float:
    return oracles.error(y, expected) / oracles.TOLERANCES[case[4]]


def in_shard(names: Sequence[str], shard: tuple[int, int]) -> list[str]:
    """Returns every n-th name, from the i-th on."""
    i, n = shard
    return [*names[i - 1 :: n]]


def parsed(text: str) -> tuple[int, int]:
    """Reads "3/8": the third of eight."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 3/8")
    return int(i), int(n)


def prepare(shard: tuple[int, int]) -> None:
    """Makes MLX keep no memory, and compiled kernels where no other shard writes.

    MLX writes there without looking for others, who could read half a file.
    """
    mx.set_cache_limit(0)
    name = "marlin-shard-{}-of-{}".format(*shard)
    own = Path(tempfile.gettempdir(), "mlx", mx.__version__, name)
    os.environ.setdefault("MLX_PTX_CACHE_DIR", str(own))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shard", type=parsed, default=(1, 1), metavar="I/N")
    parser.add_argument("--list", action="store_true", help="names only")
    asked = parser.parse_args(given)
    every = runs()
    chosen = in_shard([*every], asked.shard)
    if asked.list:
        print(*chosen, sep="\n")
        return 0
    prepare(asked.shard)
    wrong, started = 0, time.monotonic()
    for name in chosen:
        begun = time.monotonic()
        verdict = attempted(every[name])
        wrong += verdict != "ok"
        print(f"{verdict}  {time.monotonic() - begun:6.1f} s  {name}", flush=True)
    i, n = asked.shard
    seconds = time.monotonic() - started
    print(f"shard {i}/{n}: {len(chosen)} products, {wrong} wrong, {seconds:.0f} s")
    return int(wrong > 0)


def attempted(run: Run) -> str:
    """Returns "ok", or what is wrong."""
    try:
        error = run()
    except (AssertionError, RuntimeError, ValueError) as raised:
        return f"WRONG {type(raised).__name__}: {raised}"
    return "ok" if error < 1 else f"WRONG by {error:.1g} times what is allowed"


if __name__ == "__main__":
    sys.exit(main())
