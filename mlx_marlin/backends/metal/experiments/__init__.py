"""What only `gemm_staged` needs, which stays until a Mac has decided about it.

`plan(kernel="gemm_staged")` works, and a tuner compares it; it is never a candidate,
and `variants` lists it on request.
"""
