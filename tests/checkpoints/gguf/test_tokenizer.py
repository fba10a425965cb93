"""A vocabulary of a GGUF file is a tokenizer for mlx-lm."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from mlx_marlin.checkpoints.gguf import (
    Container,
    config_of,
    tokenizer,
    tokenizer_files,
)
from mlx_marlin.checkpoints.gguf.splits import SPLITS
from support.gguf_cases import CASES
from support.gguf_files import write_gguf
from support.gguf_models import random_model, written_model
from support.gguf_vocabularies import (
    TEMPLATE,
    byte_pairs,
    character_pairs,
    sentencepiece,
)

PREFIX = "tokenizer.ggml."


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
    for split in ("qwen2", "llama-bpe", "glm4", "chatglm-bpe"):
        vocabulary["tokenizer.ggml.pre"] = split
        words[split] = loaded(tmp_path, "qwen3", vocabulary).encode("123")

    assert words["qwen2"] == ids_of(vocabulary, "1", "2", "3")
    for split in ("llama-bpe", "glm4", "chatglm-bpe"):
        assert words[split] == ids_of(vocabulary, "123")


def test_sentencepiece(tmp_path: Path) -> None:
    vocabulary = sentencepiece()
    tokenizer = loaded(tmp_path, "llama", vocabulary)

    ids = tokenizer.encode("hello world é")

    words = ["<s>", "▁hello", "▁wor", "l", "d", "▁", "<0xC3>", "<0xA9>"]
    assert ids == ids_of(vocabulary, *words)
    assert tokenizer.decode(ids[1:]) == "hello world é"


LLAMA3 = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
)
OTHERS = (
    "dbrx smaug-bpe glm4 chatglm-bpe qwen2 deepseek-r1-qwen kormo f2llmv2 megrez "
    "qwen35 gpt-4o llama4"
)
WHOLE = dict.fromkeys([*LLAMA3.split(), "tekken"], True) | dict.fromkeys(
    [*OTHERS.split(), "kanana2", "talkie", "minimax-m2", "gpt-2"], False
)
"""Whether llama.cpp takes a whole word of the vocabulary before it merges, and begins
with BOS if the file does not say it: src/llama-vocab.cpp, `llama_vocab::impl::load`."""


def test_every_split_is_in_the_table() -> None:
    assert WHOLE.keys() == SPLITS.keys()


@pytest.mark.parametrize("split", WHOLE)
def test_words_and_beginnings_are_those_of_the_split(
    split: str, tmp_path: Path
) -> None:
    vocabulary = byte_pairs(split)
    del vocabulary[f"{PREFIX}add_bos_token"], vocabulary[f"{PREFIX}token_type"]
    vocabulary[f"{PREFIX}tokens"] += ["abc"]  # no merge gives it
    tokenizer = loaded(tmp_path, "qwen3", vocabulary)

    ids = tokenizer.encode("abc hello")

    whole = ["<|begin|>", "abc"] if WHOLE[split] else ["a", "b", "c"]
    assert ids == ids_of(vocabulary, *whole, "Ġ", "hello")


def test_sentencepiece_begins_with_token_1_if_the_file_names_none(
    tmp_path: Path,
) -> None:
    vocabulary = sentencepiece()
    del vocabulary[f"{PREFIX}bos_token_id"]

    assert loaded(tmp_path, "llama", vocabulary).encode("hello")[0] == 1


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


@pytest.mark.parametrize("begins", [False, True])
def test_pairs_of_characters(begins: bool, tmp_path: Path) -> None:
    """llama.cpp puts <bos> before Gemma 4's texts, whatever the file says."""
    vocabulary = character_pairs() | {f"{PREFIX}add_bos_token": begins}
    tokenizer = loaded(tmp_path, "gemma4", vocabulary)

    ids = tokenizer.encode("hello  world\n\n\n hello é<turn|>")

    words = ["<bos>", "hello", "▁", "▁wor", "l", "d", "\n\n", "\n", "▁", "hello", "▁"]
    words += ["<0xC3>", "<0xA9>", "<turn|>"]
    assert ids == ids_of(vocabulary, *words)
    assert tokenizer.decode(ids[1:]) == "hello  world\n\n\n hello é<turn|>"
    assert tokenizer.eos_token_ids == set(ids_of(vocabulary, "<eos>", "<turn|>"))
    assert len(tokenizer.get_vocab()) == len(vocabulary[f"{PREFIX}tokens"])


REFUSED: dict[str, tuple[str, Any]] = {
    "kind": ("model", "bert"),
    "split": ("pre", "deepseek-v3"),
    "a split of old files": ("pre", "default"),
    "a flag": ("add_bos_token", 1),
    "separators": ("add_sep_token", True),
    "tokens that are never drawn": ("suppress_tokens", ("array", ("i32", [1]))),
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
        tokenizer_files(opened(tmp_path, "qwen3", vocabulary))


@pytest.mark.parametrize(
    ("architecture", "options", "key"),
    [
        ("llama", {"add_space_prefix": False}, "add_space_prefix"),
        ("gemma2", {}, "add_space_prefix"),
        ("gemma2", {"add_space_prefix": True}, "add_space_prefix"),
        ("gemma4", {"add_space_prefix": False}, "model"),
        ("qwen2", {}, "pre"),
        ("qwen2", {"pre": "qwen2"}, "pre"),
    ],
)
def test_sentencepiece_that_transformers_has_not_is_refused(
    architecture: str, options: dict[str, Any], key: str, tmp_path: Path
) -> None:
    vocabulary = sentencepiece()
    vocabulary |= {f"{PREFIX}{name}": value for name, value in options.items()}

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}{key}"):
        tokenizer_files(opened(tmp_path, architecture, vocabulary))


@pytest.mark.parametrize("name", ["merges", "add_space_prefix", "bos_token_id"])
def test_pairs_of_characters_must_be_whole(name: str, tmp_path: Path) -> None:
    vocabulary = character_pairs()
    del vocabulary[PREFIX + name]
    if name == "add_space_prefix":
        vocabulary[PREFIX + name] = True

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}{name}"):
        tokenizer_files(opened(tmp_path, "gemma4", vocabulary))


def test_other_splits_of_qwen2_are_refused(tmp_path: Path) -> None:
    """Beside a config.json transformers divides texts as Qwen2 does."""
    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}pre"):
        tokenizer_files(opened(tmp_path, "qwen2", byte_pairs("llama-bpe")))


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


def test_a_beginning_that_the_file_does_not_name_is_refused(tmp_path: Path) -> None:
    vocabulary = byte_pairs("llama-bpe", add_bos=True)
    del vocabulary[f"{PREFIX}bos_token_id"]

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}bos_token_id"):
        tokenizer_files(opened(tmp_path, "llama", vocabulary))


@pytest.mark.parametrize("longest", [60, 256, 1024])
def test_merges_are_not_derived_beyond_those_of_a_vocabulary(
    longest: int, tmp_path: Path
) -> None:
    """Each division of such a token is a merge: a file of 0.5 MB made 250 MB."""
    vocabulary = sentencepiece()
    tokens = ["<unk>", "<s>", "</s>", *("a" * size for size in range(1, longest + 1))]
    vocabulary[f"{PREFIX}tokens"] = tokens
    vocabulary[f"{PREFIX}scores"] = [0.0] * len(tokens)
    del vocabulary[f"{PREFIX}token_type"]
    container = opened(tmp_path, "llama", vocabulary)

    with (
        mock.patch.object(tokenizer, "_converter", return_value=(None, [])),
        pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}tokens.*more than \d+"),
    ):
        tokenizer_files(container)


def test_tokens_of_many_spaces_are_a_vocabulary(tmp_path: Path) -> None:
    vocabulary = sentencepiece()
    spaces = ["▁" * size for size in range(2, 17)]
    tokens = vocabulary[f"{PREFIX}tokens"] + spaces
    vocabulary[f"{PREFIX}tokens"] = tokens
    vocabulary[f"{PREFIX}scores"] = [-float(rank) for rank in range(len(tokens))]
    del vocabulary[f"{PREFIX}token_type"]

    assert "tokenizer.json" in tokenizer_files(opened(tmp_path, "llama", vocabulary))
