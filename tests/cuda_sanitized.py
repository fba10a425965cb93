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
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_marlin.backends import launcher
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue
from support import cuda_cases, cuda_experts, epilogues, launches, oracles
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
)
from support.format_cases import arguments
from support.oracles import exact

Run = Callable[[], float]
"""Computes a result and returns its relative error over the one that it may have."""

PAGE = 16 * 1024
"""From this on MLX's memory is whole pages (mlx/backend/cuda/allocator.cpp, 0.32)."""
FORMAT = ("affine", 4, 64)
WHOLE, SPLIT = WAYS[0], WAYS[3]
RING_WHOLES = (WGMMA_WAYS[0], STAGED_WAYS[0])
RING_SPLITS = (WGMMA_WAYS[3], STAGED_WAYS[3])
DECODED = (("affine", 3, 32), ("symmetric", 8, 128), ("mxfp4", 4, 32), ("nvfp4", 4, 16))


def runs() -> dict[str, Run]:
    """Returns what computes each variant once, by name."""
    found: dict[str, Run] = {}

    def add(kind: str, run: Callable[..., float], case: Any, *more: Any) -> None:
        found[f"{kind} {case}"] = partial(run, case, *more)

    def packed(
        m: int, way: Any, dtype: str = "float16", layout: str = "marlin"
    ) -> Case:
        return (*FORMAT, layout, dtype, m, way)

    for case in cuda_cases.cases():
        add("format", multiply, case)
    for m, way in LARGE:
        add("large block", multiply, ("affine", 4, 128, "marlin", "float16", m, way))
    for way, (dtype, m) in (
        *product(WAYS, (("float16", 7), ("bfloat16", 40))),
        *product(WGMMA_WAYS, (("float16", 13), ("bfloat16", 64))),
        *product(STAGED_WAYS, (("float16", 7), ("bfloat16", 32))),
    ):
        add("way", multiply, packed(m, way, dtype))
    for way, epilogue in product((WHOLE, SPLIT, *RING_WHOLES), EPILOGUES):
        add(f"epilogue {epilogue.explain()}", finish, packed(19, way), epilogue)
    for m, way in GATED_WAYS:
        add("gated", multiply_gated, packed(m, way))
        add("rotated", multiply_rotated, packed(m, way))
    for m, way in NORMED_WAYS:
        add("normed", multiply_normed, packed(m, way))
    for layout, way in product(("marlin", "mlx"), (WHOLE, SPLIT)):
        add("batch", multiply_batch, packed(5, way, layout=layout))
    for way in (*RING_WHOLES, *RING_SPLITS):
        add("batch", multiply_batch, packed(30, way))
    for way in (WHOLE, *RING_WHOLES):
        add("anywhere", multiply, packed(6, way), cuda_cases.moved)
    add("anywhere", multiply, packed(6, WHOLE, layout="mlx"), cuda_cases.moved)
    for name, call in cuda_experts.CALLS.items():
        found[f"experts, {name}"] = partial(multiply_experts, call)
    for choice in cuda_experts.ROUTINGS:
        add("experts chosen,", choose_experts, choice)
    for format, dtype in product(DECODED, ("float16", "bfloat16")):
        add("decode", decode, (*format, "marlin", dtype, 1, WHOLE))
    return found


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


def multiply(case: Case, place: Callable[[mx.array], mx.array] = at_end) -> float:
    weight, x = cuda_cases.draw(case)
    arrays = map(place, (x, *arguments(weight, case[3])))
    y = launcher.product(cuda_cases.plan_of(case))(*arrays)
    return judged(y, exact(x) @ weight.decoded.T, case)


def multiply_gated(case: Case) -> float:
    weight, x = cuda_cases.draw(case, n=GATED_N)
    arrays = map(at_end, (x, *arguments(weight, case[3])))
    y = launcher.product(cuda_cases.plan_of(case, epilogue=GATED, n=GATED_N))(*arrays)
    expected = epilogues.finished(exact(x) @ weight.decoded.T, (), GATED)
    return judged(y, expected, case)


def multiply_rotated(case: Case) -> float:
    weight, x = cuda_cases.draw(case, n=ROTATED_N)
    rotation = NORMED_HEADS
    bias = cuda_cases.drawn_bias(ROTATED_N, x.dtype)
    given = cuda_cases.positions_of(len(x), rotation), cuda_cases.freqs_of(rotation)
    given = *given, *cuda_cases.norms_of(rotation, x.dtype)
    x, w, scales, biases, bias, *given = map(
        at_end, (x, *arguments(weight, case[3]), bias, *given)
    )
    epilogue = Epilogue(bias=True, rotation=rotation, parts=(128, 64, 64))
    plan = cuda_cases.plan_of(case, epilogue=epilogue, n=ROTATED_N)
    y = launcher.product(plan)(x, w, scales, biases, bias, x, x, *given)
    total = exact(x) @ weight.decoded.T + exact(bias)
    expected = epilogues.rotated(total, rotation, *given)
    return judged(mx.concatenate([*y], axis=1), expected, case)


def multiply_experts(call: cuda_experts.Call) -> float:
    return judged(call.run(at_end)(), call.expected, call.case)


def choose_experts(choice: cuda_experts.Choice) -> float:
    choice.check(launches.route, at_end)
    choice.check_sum(launches.combine, at_end)
    return 0


def multiply_normed(case: Case) -> float:
    weight, x = cuda_cases.draw(case)
    norm = cuda_cases.norm_of(x)
    arrays = [*map(at_end, (x, *arguments(weight, case[3]), norm))]
    x, norm = arrays[0], arrays[-1]
    plan = cuda_cases.plan_of(case, norm=EPSILON)
    y = launcher.product(plan)(*arrays[:-1], x, x, x, norm)
    return judged(y, cuda_cases.normalized(x, norm, EPSILON) @ weight.decoded.T, case)


def multiply_batch(case: Case) -> float:
    drawn = [cuda_cases.draw(case, seed) for seed in (1, 2, 3)]
    each = ((x, *arguments(weight, case[3])) for weight, x in drawn)
    arrays = [at_end(mx.stack(parts)) for parts in zip(*each, strict=True)]
    y = launcher.product(cuda_cases.plan_of(case, batch=3))(*arrays)
    return max(
        judged(own, exact(x) @ weight.decoded.T, case)
        for own, (weight, x) in zip(y, drawn, strict=True)
    )


def finish(case: Case, epilogue: Epilogue) -> float:
    weight, x = cuda_cases.draw(case)
    operands = cuda_cases.operands(case[5])
    arrays = map(at_end, (x, *arguments(weight, case[3]), *operands))
    y = launcher.product(cuda_cases.plan_of(case, epilogue=epilogue))(*arrays)
    y = mx.concatenate([*y], axis=-1) if epilogue.parts else y
    expected = epilogues.finished(exact(x) @ weight.decoded.T, operands, epilogue)
    return judged(y, expected, case)


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
