"""A vocabulary of a GGUF file is a tokenizer for mlx-lm."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from mlx_marlin.checkpoints.gguf import Container, config_of, tokenizer_files
from support.gguf_files import write_gguf
from support.gguf_models import CASES, random_model, written_model
from support.gguf_vocabularies import TEMPLATE, byte_pairs, sentencepiece


def loaded(folder: Path, name: str, vocabulary: dict[str, Any]) -> TokenizerWrapper:
    """Returns the tokenizer that mlx-lm makes of the files."""
    container = opened(folder, name, vocabulary)
    for file, content in tokenizer_files(container).items():
        (folder / file).write_text(content, encoding="utf-8")
    config = config_of(container)
    (folder / "config.json").write_text(json.dumps(config))
    ends = config["eos_token_id"]
    return load(folder, eos_token_ids=ends)


def opened(folder: Path, name: str, vocabulary: dict[str, Any]) -> Container:
    case = CASES[name]
    tensors = written_model(case, random_model(case))
    return Container(write_gguf(folder / "t.gguf", case.metadata | vocabulary, tensors))


def ids_of(vocabulary: dict[str, Any], *tokens: str) -> list[int]:
    return [vocabulary["tokenizer.ggml.tokens"].index(token) for token in tokens]


@pytest.mark.parametrize("split", ["qwen2", "llama-bpe", "gpt-2"])
def test_pairs_of_bytes(split: str, tmp_path: Path) -> None:
    vocabulary = byte_pairs(split)
    tokenizer = loaded(tmp_path, "qwen3", vocabulary)

    ids = tokenizer.encode("hello world<|turn|>é")

    words = ["hello", "Ġworl", "d", "<|turn|>", "Ã", "©"]
    assert ids == ids_of(vocabulary, *words)
    assert tokenizer.decode(ids) == "hello world<|turn|>é"
    assert tokenizer.eos_token_ids == set(ids_of(vocabulary, "<|end|>", "<|turn|>"))


def test_splits_of_text_are_those_of_the_name(tmp_path: Path) -> None:
    vocabulary = byte_pairs("qwen2")
    vocabulary["tokenizer.ggml.tokens"][:0] = ["12", "123"]
    vocabulary["tokenizer.ggml.merges"] += ["1 2", "12 3"]
    del vocabulary["tokenizer.ggml.token_type"]
    words = {}
    for split in ("qwen2", "llama-bpe"):
        vocabulary["tokenizer.ggml.pre"] = split
        words[split] = loaded(tmp_path, "qwen3", vocabulary).encode("123")

    assert words["qwen2"] == ids_of(vocabulary, "1", "2", "3")
    assert words["llama-bpe"] == ids_of(vocabulary, "123")


def test_sentencepiece(tmp_path: Path) -> None:
    vocabulary = sentencepiece()
    tokenizer = loaded(tmp_path, "llama", vocabulary)

    ids = tokenizer.encode("hello world é")

    words = ["<s>", "▁hello", "▁wor", "l", "d", "▁", "<0xC3>", "<0xA9>"]
    assert ids == ids_of(vocabulary, *words)
    assert tokenizer.decode(ids[1:]) == "hello world é"


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_ends_are_added_if_the_file_says_so(
    begins: bool, ends: bool, tmp_path: Path
) -> None:
    vocabulary = byte_pairs("llama-bpe", add_bos=begins)
    vocabulary["tokenizer.ggml.add_eos_token"] = ends
    tokenizer = loaded(tmp_path, "llama", vocabulary)

    words = ["<|begin|>"] * begins + ["hello"] + ["<|end|>"] * ends

    assert tokenizer.encode("hello") == ids_of(vocabulary, *words)


def test_templates_of_chats_are_kept(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "qwen2", byte_pairs())

    assert tokenizer.chat_template == TEMPLATE
    message = {"role": "user", "content": "hello"}
    assert tokenizer.apply_chat_template([message], tokenize=False) == "hello"


PREFIX = "tokenizer.ggml."
REFUSED: dict[str, tuple[str, Any]] = {
    "kind": ("model", "bert"),
    "split": ("pre", "chatglm-bpe"),
    "another split": ("pre", "llama-bpe"),
    "tokens": ("tokens", [1, 2]),
    "no token": ("tokens", ("array", ("string", []))),
    "same token": ("tokens", ["a", "b", "a"]),
    "long token": ("tokens", ["a", "b" * 1025]),
    "merges": ("merges", ["a b c"]),
    "types": ("token_type", ("array", ("i32", [1, 2, 3]))),
    "last token": ("eos_token_id", 10_000),
}


@pytest.mark.parametrize("case", REFUSED)
def test_vocabularies_that_are_not_read_are_refused(case: str, tmp_path: Path) -> None:
    name, value = REFUSED[case]
    vocabulary = byte_pairs() | {PREFIX + name: value}
    if name == "tokens":
        del vocabulary[f"{PREFIX}token_type"]

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}{name}"):
        tokenizer_files(opened(tmp_path, "qwen2", vocabulary))


@pytest.mark.parametrize("name", ["model", "pre", "tokens", "merges"])
def test_vocabularies_must_be_whole(name: str, tmp_path: Path) -> None:
    vocabulary = byte_pairs()
    del vocabulary[PREFIX + name]

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}{name}"):
        tokenizer_files(opened(tmp_path, "qwen2", vocabulary))


def test_scores_must_be_there(tmp_path: Path) -> None:
    vocabulary = sentencepiece()
    del vocabulary[f"{PREFIX}scores"]

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}scores"):
        tokenizer_files(opened(tmp_path, "llama", vocabulary))


def test_sentencepiece_without_a_first_space_is_refused(tmp_path: Path) -> None:
    vocabulary = sentencepiece() | {f"{PREFIX}add_space_prefix": False}

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}add_space_prefix"):
        tokenizer_files(opened(tmp_path, "llama", vocabulary))
