"""Exits with 0 if this machine's GPU multiplies 8x8 simdgroup matrices, else with 1.

Usage: python benchmarks/probe_metal.py
"""

import sys

import mlx.core as mx

SOURCE = """
simdgroup_matrix<float, 8, 8> product = simdgroup_matrix<float, 8, 8>(0);
simdgroup_matrix<half, 8, 8> ones = simdgroup_matrix<half, 8, 8>(1);
simdgroup_multiply_accumulate(product, ones, ones, product);
out[thread_index_in_simdgroup] = product.thread_elements()[0];
"""


def multiplies() -> bool:
    kernel = mx.fast.metal_kernel(
        name="probe", input_names=[], output_names=["out"], source=SOURCE
    )
    out = kernel(
        inputs=[],
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    )[0]
    # The fragment of ones is the identity here: MSL fills the diagonal only.
    return bool((out.sum() == 8).item())


if __name__ == "__main__":
    try:
        works = mx.metal.is_available() and multiplies()
    except RuntimeError as error:
        print(error)
        works = False
    print("simdgroup matrices work" if works else "no simdgroup matrices here")
    sys.exit(not works)
