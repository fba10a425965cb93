"""Packs codes into 32-bit words as a bit stream, low code first, and unpacks them."""

from math import gcd

import mlx.core as mx


def codes_of_words(words: mx.array, bits: int) -> mx.array:
    """Unpacks codes.

    `words`: uint32 [..., words].
    """
    run, span, dtype = _run(bits)
    octets = words.view(mx.uint8).reshape(*words.shape[:-1], -1, span)
    whole = octets[..., 0].astype(dtype)
    for octet in range(1, span):
        whole = whole | octets[..., octet].astype(dtype) << 8 * octet
    codes = [
        bits_at(whole, bits * index, bits).astype(mx.uint8) for index in range(run)
    ]
    return mx.stack(codes, axis=-1).reshape(*words.shape[:-1], -1)


def words_of_codes(codes: mx.array, bits: int) -> mx.array:
    """Packs codes: the inverse of `codes_of_words`.

    `codes`: uint8 [..., codes], less than 2^bits, which fill whole words.
    """
    run, span, dtype = _run(bits)
    runs = codes.reshape(*codes.shape[:-1], -1, run)
    whole = runs[..., 0].astype(dtype)
    for index in range(1, run):
        whole = whole | runs[..., index].astype(dtype) << bits * index
    octets = [bits_at(whole, 8 * octet, 8).astype(mx.uint8) for octet in range(span)]
    stacked = mx.stack(octets, axis=-1).reshape(*codes.shape[:-1], -1)
    return stacked.view(mx.uint32)


def bits_at(whole: mx.array, low: int, bits: int) -> mx.array:
    """Returns some bits of each unsigned integer, from bit `low` on.

    MLX computes each operation of large weights in memory, also one without effect.
    """
    shifted = whole >> low if low else whole
    is_rest = low + bits == 8 * whole.itemsize
    return shifted if is_rest else shifted & (1 << bits) - 1


def _run(bits: int) -> tuple[int, int, mx.Dtype]:
    """Returns the least number of codes that fill whole bytes, the bytes, and a dtype.

    The dtype is the narrowest that holds them, because large weights are converted
    through it.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits} is not between 1 and 8")
    run = 8 // gcd(bits, 8)
    span = run * bits // 8
    return run, span, {1: mx.uint8, 3: mx.uint32, 5: mx.uint64, 7: mx.uint64}[span]
