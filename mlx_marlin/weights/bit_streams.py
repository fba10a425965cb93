"""Codes and the words that hold them: streams of bits, low code first."""

from math import gcd

import mlx.core as mx


def codes_of_words(words: mx.array, bits: int) -> mx.array:
    """Reads the codes of words.

    Args:
        words: uint32 [..., words].
        bits: Bits of a code; codes may cross words.

    Returns:
        uint8 [..., words * 32 / bits].
    """
    run, span, dtype = _run(bits)
    octets = words.view(mx.uint8).reshape(*words.shape[:-1], -1, span)
    whole = octets[..., 0].astype(dtype)
    for place in range(1, span):
        whole = whole | octets[..., place].astype(dtype) << 8 * place
    mask = (1 << bits) - 1
    codes = [(whole >> bits * index & mask).astype(mx.uint8) for index in range(run)]
    return mx.stack(codes, axis=-1).reshape(*words.shape[:-1], -1)


def words_of_codes(codes: mx.array, bits: int) -> mx.array:
    """Writes codes into words: the inverse of `codes_of_words`.

    Args:
        codes: uint8 [..., codes], below 2^bits, that fill whole words.
        bits: Bits of a code.

    Returns:
        uint32 [..., codes * bits / 32].
    """
    run, span, dtype = _run(bits)
    runs = codes.reshape(*codes.shape[:-1], -1, run)
    whole = runs[..., 0].astype(dtype)
    for index in range(1, run):
        whole = whole | runs[..., index].astype(dtype) << bits * index
    octets = [(whole >> 8 * place & 0xFF).astype(mx.uint8) for place in range(span)]
    stacked = mx.stack(octets, axis=-1).reshape(*codes.shape[:-1], -1)
    return stacked.view(mx.uint32)


def _run(bits: int) -> tuple[int, int, mx.Dtype]:
    """Returns how many codes end where a byte ends, their bytes, and a dtype for them.

    The narrowest dtype: large weights are moved through it.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits} is not between 1 and 8")
    run = 8 // gcd(bits, 8)
    span = run * bits // 8
    return run, span, {1: mx.uint8, 3: mx.uint32, 5: mx.uint64, 7: mx.uint64}[span]
