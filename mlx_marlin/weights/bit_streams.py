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
    run, span = _run(bits)
    octets = words.view(mx.uint8).reshape(*words.shape[:-1], -1, span)
    whole = mx.zeros(octets.shape[:-1], mx.uint64)
    for place in range(span):
        whole = whole | octets[..., place].astype(mx.uint64) << 8 * place
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
    run, span = _run(bits)
    runs = codes.reshape(*codes.shape[:-1], -1, run)
    whole = mx.zeros(runs.shape[:-1], mx.uint64)
    for index in range(run):
        whole = whole | runs[..., index].astype(mx.uint64) << bits * index
    octets = [(whole >> 8 * place & 0xFF).astype(mx.uint8) for place in range(span)]
    stacked = mx.stack(octets, axis=-1).reshape(*codes.shape[:-1], -1)
    return stacked.view(mx.uint32)


def _run(bits: int) -> tuple[int, int]:
    """Returns how many codes end where a byte ends, and how many bytes that are."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits} is not between 1 and 8")
    run = 8 // gcd(bits, 8)
    return run, run * bits // 8
