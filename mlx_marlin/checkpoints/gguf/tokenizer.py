"""The tokenizer of a GGUF file, as the files that transformers reads.

transformers has converters for the vocabularies that llama.cpp stores; this module
hands them the metadata, and refuses what they would guess at.
"""

import json
from typing import TYPE_CHECKING, Any, cast

from mlx_marlin.checkpoints.gguf.container import Container

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PREFIX = "tokenizer.ggml."
_MODELS = ("gpt2", "llama")
"""Kinds of vocabularies that are read: bytes in pairs, and SentencePiece's."""
LONGEST_TOKEN = 1024
"""Characters; merges are derived from all divisions of a token."""
_GPT2_SPLITS = ("gpt-2", "gpt2", "default")
"""Names of GPT-2's own way to divide a text, which transformers takes for any name that
it does not know."""


def tokenizer_files(container: Container) -> dict[str, str]:
    """Returns the files of a tokenizer, by name.

    Args:
        container: A GGUF file.

    Returns:
        "tokenizer.json" and "tokenizer_config.json".

    Raises:
        ImportError: If transformers, which mlx-lm needs, is missing or has no converter
            for GGUF.
        ValueError: If there is no vocabulary, or of a kind that is not read. The
            message names the file and the key.
    """
    convert, known_splits = _converter()
    architecture = container.text("general.architecture")
    vocabulary = _vocabulary(container, architecture, known_splits)
    special = _special_tokens(container, vocabulary["tokens"])
    try:
        tokenizer, _ = convert(architecture, vocabulary)
        _add_ends(tokenizer, container, special)
        text: str = tokenizer.to_str()
    except Exception as error:  # of a library, about a vocabulary that nobody checked
        raise ValueError(
            f"{container.path}: no tokenizer can be made of {_PREFIX}tokens: {error}"
        ) from error
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if "tokenizer.chat_template" in container.metadata:
        config["chat_template"] = container.text("tokenizer.chat_template")
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }


def _converter() -> "tuple[Callable[..., tuple[Any, Any]], Mapping[str, str]]":
    """Returns transformers' converter, and the ways to divide a text that it knows.

    They are regular expressions by the names that llama.cpp gives them.
    """
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError as error:
        raise ImportError(
            "the tokenizer of a GGUF file needs a transformers that has "
            "transformers.integrations.gguf, such as 5.23"
        ) from error

    gpt2 = dict.fromkeys(_GPT2_SPLITS, "GPT-2's")
    return convert_gguf_tokenizer, gpt2 | GGUF_PRE_TOKENIZER_SPLITS


def _vocabulary(
    container: Container, architecture: str, known_splits: "Mapping[str, str]"
) -> dict[str, Any]:
    """Returns the vocabulary under the names that transformers gives its parts."""
    model = container.text(f"{_PREFIX}model")
    if model not in _MODELS:
        raise container.refusal(f"{_PREFIX}model", f"is not one of {[*_MODELS]}")
    tokens = _strings(container, "tokens")
    vocabulary: dict[str, Any] = {"tokenizer_type": model, "tokens": tokens}
    if len(set(tokens)) != len(tokens) or len(max(tokens, key=len)) > LONGEST_TOKEN:
        raise container.refusal(
            f"{_PREFIX}tokens",
            f"has a token twice, or one of more than {LONGEST_TOKEN} characters",
        )
    if f"{_PREFIX}merges" in container.metadata:
        vocabulary["merges"] = _strings(container, "merges")
        if not all(merge.count(" ") == 1 for merge in vocabulary["merges"]):
            raise container.refusal(f"{_PREFIX}merges", "has a merge that is no pair")
    for name in ("scores", "token_type"):
        if f"{_PREFIX}{name}" in container.metadata:
            vocabulary[name] = _numbers(container, name, len(tokens))
    if model == "gpt2":
        split = container.text(f"{_PREFIX}pre")
        if split not in known_splits:
            raise container.refusal(
                f"{_PREFIX}pre", f"is not one of {', '.join(known_splits)}"
            )
        if architecture == "qwen2" and known_splits[split] != known_splits["qwen2"]:
            raise container.refusal(
                f"{_PREFIX}pre", "is not 'qwen2', which transformers takes for Qwen2"
            )
        vocabulary["pre_tokenizer_type"] = split
    space = container.metadata.get(f"{_PREFIX}add_space_prefix", True)
    if model == "llama" and not space and not architecture.startswith("gemma"):
        raise container.refusal(
            f"{_PREFIX}add_space_prefix", "is not in transformers' converter"
        )
    needed = "merges" if model == "gpt2" else "scores"
    if needed not in vocabulary:
        raise ValueError(f"{container.path}: metadata '{_PREFIX}{needed}' is missing")
    return vocabulary


def _strings(container: Container, name: str) -> list[str]:
    key = _PREFIX + name
    value = container.metadata.get(key)
    strings = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if not strings or (name == "tokens" and not value):
        raise container.refusal(key, "is not an array of strings")
    return cast(list[str], value)


def _numbers(container: Container, name: str, count: int) -> list[float]:
    key = _PREFIX + name
    value = container.metadata[key]
    if not isinstance(value, memoryview) or len(value) != count:
        raise container.refusal(key, f"is not an array of {count} numbers")
    return [*value]


def _special_tokens(container: Container, tokens: list[str]) -> dict[str, str]:
    special = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        key = f"{_PREFIX}{key}_token_id"
        if key not in container.metadata:
            continue
        index = container.integer(key)
        if index >= len(tokens):
            raise container.refusal(key, f"is not one of {len(tokens)} tokens")
        special[name] = tokens[index]
    return special


def _add_ends(tokenizer: Any, container: Container, special: dict[str, str]) -> None:
    """Makes the tokenizer put tokens before and after a text, if the file says so."""
    from tokenizers import processors

    sentencepiece = container.metadata[f"{_PREFIX}model"] == "llama"
    ends = []
    for name, default in (("bos", sentencepiece), ("eos", False)):
        added = container.metadata.get(f"{_PREFIX}add_{name}_token", default)
        token = special.get(f"{name}_token")
        ends.append(token if added is True else None)
    if ends == [None, None]:
        return
    before, after = ([token] if token else [] for token in ends)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=[
            (token, tokenizer.token_to_id(token)) for token in ends if token
        ],
    )
