"""What the trace finds in llama.cpp's kernels, and what it would do.

A release of llama.cpp that mends one fails its test here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import metal_emulator
from peers.foreign import reports
from peers.llama_cpp import Llama, arguments, sizes
from peers.test_llama_cpp_blocks import matrix_product, matrix_vector
from peers.test_llama_cpp_kernels import close, soft_max
from support import oracles

pytestmark = pytest.mark.peer

Array = npt.NDArray[Any]
RACE = "race between threads on byte .* of threadgroup variable"


def group_norm(llama: Llama, x: Array, threads: int) -> Array:
    """Returns two groups [2, 1, n], each with mean 0 and variance 1."""
    fields = {**sizes("0", x), "n_groups": 2, "eps": 1e-5}
    given = {"src0": x, "args": arguments("group_norm", **fields)}
    return llama.launch("group_norm", given, x, (2, 1, 1), (threads, 1, 1), 128)


def test_group_norm_clears_sums_that_others_still_read(llama: Llama) -> None:
    x = llama.normal(2, 1, 256) + 3
    exact = x.astype(float)
    exact -= exact.mean(axis=-1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5)

    with reports(RACE):
        group_norm(llama, x, 64)
    with metal_emulator.emulated(trace=True):
        one_simdgroup = group_norm(llama, x, 32)
    errors = []
    for seed in range(8):
        with metal_emulator.emulated(seed=seed):
            errors.append(np.abs(group_norm(llama, x, 64) - exact).max())

    np.testing.assert_allclose(one_simdgroup, exact, atol=1e-5)
    assert max(errors) > 0.5  # some order of simdgroups gives another mean
    assert min(errors) < 1e-5


TOKENS = 4


def ssm_scan(llama: Llama, threads: int, start: Array | None) -> Any:
    """Returns y [TOKENS] of a Mamba-1 scan with one head, whose inputs are all 1."""
    x = np.ones((1, TOKENS, 1, 1), np.float32)
    dt = np.ones((1, TOKENS, 1), np.float32)
    state = np.zeros((1, 1, 1, threads), np.float32)
    a = -np.ones((1, 1, 1, threads), np.float32)
    b = np.ones((1, TOKENS, 1, threads), np.float32)
    extents = {"d_state": threads, "d_inner": 1, "n_head": 1, "n_group": 1}
    extents |= {"n_seq_tokens": TOKENS, "n_seqs": 1, "s_off": x.nbytes}
    fields = {**extents, **sizes("0", state), **sizes("1", x), **sizes("2", dt)}
    fields |= {**sizes("3", a), **sizes("4", b), **sizes("5", b)}
    given = {"src0": state, "src1": x, "src2": dt, "src3": a, "src4": b, "src5": b}
    given |= {"src6": np.zeros(1, np.int32), "args": arguments("ssm_scan", **fields)}
    if start is not None:
        given["dst"] = start
    output = np.empty(TOKENS + threads, np.float32)
    size = (threads, 1, 1)
    return llama.launch("ssm_scan_f32", given, output, (1, 1, 1), size, 128)[:TOKENS]


def test_ssm_scan_overwrites_sums_of_a_token_that_are_still_read(llama: Llama) -> None:
    start = np.zeros(TOKENS + 64, np.float32)
    dt = np.log1p(np.e)
    decay = np.exp(-dt)
    exact = 64 * dt * np.cumsum(decay ** np.arange(TOKENS))

    with reports(RACE):
        ssm_scan(llama, 64, start)
    errors = []
    for seed in range(8):
        with metal_emulator.emulated(seed=seed):
            errors.append(np.abs(ssm_scan(llama, 64, start) - exact).max())

    assert max(errors) > 1  # some order of simdgroups adds sums of two tokens
    with metal_emulator.emulated(trace=True):
        alone = ssm_scan(llama, 32, start[: TOKENS + 32])
    np.testing.assert_allclose(alone, exact / 2, rtol=1e-6)


def test_ssm_scan_reads_a_state_that_nobody_has_written(llama: Llama) -> None:
    with reports(r"never written.*'dst'"):
        ssm_scan(llama, 32, None)


def test_the_barrier_between_two_uses_of_a_buffer_in_soft_max_orders_nothing(
    llama: Llama,
) -> None:
    x = llama.normal(1, 1, 100)

    with reports(f"{RACE} 'buf': write after"):
        soft_max(llama, x, None, 64)


def test_every_simdgroup_of_argmax_writes_the_result(llama: Llama) -> None:
    x = llama.normal(1, 100)
    given = {"x": x, "ncols": 100, "nb01": x.nbytes}
    output = np.empty(1, np.int32)

    with reports("'dst': write after write"):
        llama.launch("argmax", given, output, (1, 1, 1), (64, 1, 1), 128)
    plain = llama.launch("argmax", given, output, (1, 1, 1), (64, 1, 1), 128)

    assert plain == x.argmax()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_matrix_vector_products_read_rows_behind_the_last_one(
    llama: Llama, kind: str
) -> None:
    with pytest.raises(
        metal_emulator.EmulatorError, match="read outside buffer 'src0'"
    ):
        matrix_vector(llama, kind, n=37)


def test_matrix_products_store_vectors_at_any_multiple_of_four_bytes(
    llama: Llama,
) -> None:
    with pytest.raises(
        metal_emulator.EmulatorError, match=r"misaligned access.*\n.*\n.*D4"
    ):
        matrix_product(llama, "F16", (70, 37, 64))


def attention(llama: Llama, masked: bool) -> tuple[Array, Array]:
    """Returns attention of two heads, and what it is in float64."""
    heads, queries, keys, size, simdgroups = 2, 11, 64, 64, 4
    q = llama.normal(heads, queries, size)
    k, v = llama.random.standard_normal((2, heads, keys, size)).astype(np.float16)
    mask = np.zeros((1, 16, keys), np.float16)
    mask[0, :queries][~np.tri(queries, keys, keys - queries, bool)] = -np.inf
    fields = {**sizes("0", q), **sizes("1", k), **sizes("2", v), **sizes("3", mask)}
    fields |= {"ne_12_2": heads, "ne_12_3": 1, "ne1": heads, "ne2": queries}
    fields |= {"scale": size**-0.5, "max_bias": 0, "m0": 1, "m1": 1}
    fields |= {"n_head_log2": 2, "logit_softcap": 0}
    given = {
        "args": arguments("flash_attn_ext", **fields),
        "q": q,
        "k": k,
        "v": v,
        "mask": mask if masked else q,
        "sinks": q,
    }
    y = np.empty((queries, heads, size), np.float32)
    memory = 8 * (2 * size + 2 * (2 * 32 + 8) * simdgroups) * 2

    groups, threads = (-(-queries // 8), heads, 1), (32, simdgroups, 1)
    result = llama.launch(
        "flash_attn_ext_f16_h64", given, y, groups, threads, memory=memory
    )

    wide = (each.astype(float) for each in (q, k, v))
    expected = oracles.attention(*wide, causal=masked)
    return result, expected.swapaxes(0, 1)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_reads_scores_of_other_lanes_without_a_barrier(
    llama: Llama, masked: bool
) -> None:
    result, expected = attention(llama, masked)
    first = np.arange(len(result)) % 8 == 0

    # The emulator's lanes run in turn, those of a GPU in step. Only the first query of
    # a threadgroup has scores that no later operation of the simdgroup orders.
    close(result[~first], expected[~first], 2e-3)  # operands in half
    with reports(f"{RACE} 'shmem_f16': read"):
        attention(llama, masked)
