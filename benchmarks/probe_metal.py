"""Exits with 0 if this machine's GPU multiplies 8x8 simdgroup matrices, else with 1.

The GPU of a virtual machine multiplies them too, whatever families it claims. A copy of
a virtual machine whose shader compiler broke does not recover, so CI asks before its
tests and after them.

Usage: python -m benchmarks.probe_metal [--backend NAME]
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

import metal_emulator

SOURCE = """
simdgroup_matrix<float, 8, 8> product;
simdgroup_matrix<half, 8, 8> ones;
for (int i = 0; i < 2; ++i) {
  product.thread_elements()[i] = 1.0f;
  ones.thread_elements()[i] = half(1.0f);
}
simdgroup_multiply_accumulate(product, ones, ones, product);
out[2 * thread_index_in_simdgroup] = product.thread_elements()[0];
out[2 * thread_index_in_simdgroup + 1] = product.thread_elements()[1];
"""


def multiplies(metal_kernel: Any) -> bool:
    kernel = metal_kernel(
        name="probe", input_names=[], output_names=["out"], source=SOURCE
    )
    out = kernel(
        inputs=[],
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )[0]
    return bool((out == 9).all().item())


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe_metal")
    parser.add_argument("--backend", default="metal", choices=["metal", "emulator"])
    if parser.parse_args(given).backend == "emulator":
        metal_kernel, name = metal_emulator.metal_kernel, "the emulator"
    elif not mx.metal.is_available():
        print("::error::there is no Metal device here: MLX has none")
        return 1
    else:
        metal_kernel = mx.fast.metal_kernel
        info = mx.device_info(mx.gpu)
        name = f"{info.get('device_name')}, {info.get('architecture')}"
    try:
        works, reason = multiplies(metal_kernel), "a wrong product"
    except RuntimeError as error:
        works, reason = False, str(error).splitlines()[0]
    if works:
        print(f"{name}: simdgroup matrices work")
    else:
        print(f"::error::{name}: simdgroup matrices do not work: {reason}")
    return int(not works)


if __name__ == "__main__":
    sys.exit(main())
