"""Small vocabularies as GGUF stores them."""

from typing import Any

CONTROL, NORMAL, BYTE, UNKNOWN = 3, 1, 6, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_letters() -> list[str]:
    """Returns the letters that stand for bytes in byte-level vocabularies."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def byte_pairs(split: str = "qwen2", add_bos: bool = False) -> dict[str, Any]:
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "Ġworl"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l"]
    special = ["<|begin|>", "<|end|>", "<|turn|>"]
    tokens = [*byte_letters(), *words, *special]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL] * 3
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": ("array", ("i32", types)),
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eot_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": TEMPLATE,
    }


def character_pairs() -> dict[str, Any]:
    """Returns a vocabulary as Gemma 4 has it: pairs of characters, and bytes."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<turn|>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = ["h e", "l l", "he ll", "hell o", "▁ w", "o r", "▁w or", "\n \n", "▁ ▁"]
    words = [*"helowrd▁\n", *(merge.replace(" ", "") for merge in merges)]
    types = [CONTROL] * len(special) + [BYTE] * 256 + [NORMAL] * len(words)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*special, *octets, *words],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.scores": [0.0] * len(types),
        "tokenizer.ggml.token_type": ("array", ("i32", types)),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }


def sentencepiece() -> dict[str, Any]:
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "h", "e", "l", "o", "w", "r", "d"]
    words += ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor"]
    tokens = ["<unk>", "<s>", "</s>", *octets, *words]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": ("array", ("i32", types)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
