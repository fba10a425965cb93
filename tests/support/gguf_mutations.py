"""Damaged and hostile GGUF files, drawn from a seed."""

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from support.gguf_blocks import DECODED, QUANTIZED
from support.gguf_cases import CASES
from support.gguf_files import Written, gguf_bytes, random_tensor
from support.gguf_models import llama3_factors, random_model, written_model
from support.gguf_vocabularies import byte_pairs, character_pairs, sentencepiece

EXTREMES = [0, 1, 7, 8, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1]


HOSTILE: list[Any] = [
    None,  # the key is removed
    0,
    7,
    ("u64", 1 << 27),
    ("u64", 1 << 63),
    ("i32", -1),
    0.5,
    float("nan"),
    float("inf"),
    True,
    False,
    "odd",
    ("array", ("u32", [1, 2])),
    ("array", ("string", ["a", "b", "a"])),
]

OTHER_KEYS = (
    "attention.causal",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window_pattern",
    "expert_count",
    "rope.dimension_count",
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scaling.type",
)
"""Keys under an architecture's prefix that not every model has."""


def models() -> list[tuple[dict[str, Any], list[Written]]]:
    """Returns whole models with vocabularies: metadata and tensors."""
    found = []
    of_pairs = ("qwen3moe", "glm4moe", "lfm2", "mistral3", "qwen35")
    of_characters = ("gemma4", "gemma4_experts")
    for name in ("llama", "gemma2", "phi3", "gpt-oss", *of_pairs, *of_characters):
        case = CASES[name]
        vocabulary = byte_pairs() if name in of_pairs else sentencepiece()
        if name in of_characters:
            vocabulary = character_pairs()
        if name == "gemma2":
            vocabulary["tokenizer.ggml.add_space_prefix"] = False
        written = written_model(case, random_model(case))
        if name == "llama":
            written.append(llama3_factors(8.0, 10000.0, 16))
        found.append((case.metadata | vocabulary, written))
    return found


def mutated_keys() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yields each mutation of each key of each model, and what makes its file."""
    for metadata, tensors in models():
        prefix = metadata["general.architecture"]
        more = (f"{prefix}.{key}" for key in OTHER_KEYS)
        for key in dict.fromkeys((*metadata, *more)):
            for value in HOSTILE:
                changed = {k: v for k, v in metadata.items() if k != key}
                if value is not None:
                    changed[key] = value
                yield f"{key}={value}", partial(gguf_bytes, changed, tensors)


def seeds() -> list[bytes]:
    """Returns whole files: models with vocabularies, and one tensor of each type."""
    whole = [gguf_bytes(metadata, tensors) for metadata, tensors in models()]
    random = np.random.default_rng(0)
    kinds = [
        random_tensor(f"blk.{layer}.attn_v.weight", kind, (2, 256), random)
        for layer, kind in enumerate([*QUANTIZED, *DECODED, "F16", "BF16"])
    ]
    values = {
        "nested": ("array", ("array", [("u8", [1, 2]), ("string", ["a", "b"])])),
        "wide": ("u64", 1 << 60),
        "texts": ["one", "two"],
        "general.alignment": 64,
    }
    metadata = CASES["llama"].metadata | values
    return [*whole, gguf_bytes(metadata, kinds, alignment=64)]


def mutate(octets: bytes, random: np.random.Generator) -> bytes:
    """Returns a copy with up to four changes, most of them before the tensors' data."""
    changed = bytearray(octets)
    for _ in range(random.integers(1, 5)):
        change = _CHANGES[random.integers(len(_CHANGES))]
        whole = random.random() < 0.1
        last = len(changed) if whole else min(len(changed), 6000)
        change(changed, int(random.integers(0, max(1, last))), random)
    return bytes(changed)


def nested_vocabulary(random: np.random.Generator) -> dict[str, Any]:
    """Returns a vocabulary of which many tokens are made of others."""
    letters = "ab"[: random.integers(1, 3)]
    count, longest = (1 << int(random.integers(2, limit)) for limit in (11, 10))
    texts = {"".join(random.choice([*letters], size)) for size in range(1, longest)}
    tokens = ["<unk>", "<s>", "</s>", *letters, *sorted(texts - {*letters}, key=len)]
    tokens = tokens[:count]
    vocabulary = sentencepiece() if random.random() < 0.7 else byte_pairs("llama-bpe")
    del vocabulary["tokenizer.ggml.token_type"]
    if "tokenizer.ggml.merges" in vocabulary:
        tokens += vocabulary["tokenizer.ggml.tokens"]
        vocabulary["tokenizer.ggml.merges"] *= int(random.integers(1, 100))
        tokens = list(dict.fromkeys(tokens))
    else:
        vocabulary["tokenizer.ggml.scores"] = [0.0] * len(tokens)
    return vocabulary | {"tokenizer.ggml.tokens": tokens}


def _flip(octets: bytearray, at: int, random: np.random.Generator) -> None:
    if octets:
        octets[min(at, len(octets) - 1)] ^= 1 << int(random.integers(8))


def _extreme(octets: bytearray, at: int, random: np.random.Generator) -> None:
    value = EXTREMES[random.integers(len(EXTREMES))]
    letter = "<Q" if random.random() < 0.6 else "<I"
    stored = struct.pack(letter, value & (1 << 8 * struct.calcsize(letter)) - 1)
    octets[at : at + len(stored)] = stored


def _count(octets: bytearray, at: int, random: np.random.Generator) -> None:
    """Changes the version, the number of tensors or the number of values."""
    _extreme(octets, int(random.choice([4, 8, 16])), random)


def _length(octets: bytearray, at: int, random: np.random.Generator) -> None:
    """Changes what is likely to be a length, a count, a type or an offset."""
    for start in range(at, max(0, len(octets) - 8)):
        if octets[start] and not any(octets[start + 1 : start + 4]):
            value = EXTREMES[random.integers(len(EXTREMES))]
            near = octets[start] + int(random.integers(-2, 3))
            chosen = value if random.random() < 0.5 else near % 256
            letter = "<I" if random.random() < 0.5 else "<Q"
            size = struct.calcsize(letter)
            limited = chosen & (1 << 8 * size) - 1
            octets[start : start + size] = struct.pack(letter, limited)
            return


def _truncate(octets: bytearray, at: int, random: np.random.Generator) -> None:
    del octets[at:]


def _delete(octets: bytearray, at: int, random: np.random.Generator) -> None:
    del octets[at : at + int(random.integers(1, 40))]


def _repeat(octets: bytearray, at: int, random: np.random.Generator) -> None:
    octets[at:at] = octets[at : at + int(random.integers(1, 200))]


def _noise(octets: bytearray, at: int, random: np.random.Generator) -> None:
    count = int(random.integers(1, 16))
    octets[at : at + count] = random.bytes(count)


_CHANGES = [_flip, _extreme, _count, _length, _length, _truncate, _delete]
_CHANGES += [_repeat, _noise, _flip, _length]
