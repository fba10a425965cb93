"""A vocabulary of a GGUF file is a tokenizer for mlx-lm."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from mlx_marlin.checkpoints.gguf import config_of, tokenizer, tokenizer_files
from mlx_marlin.checkpoints.gguf.tokenizer import SPLITS
from support.gguf_models import opened
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


def ids_of(vocabulary: dict[str, Any], *tokens: str) -> list[int]:
    return [vocabulary[f"{PREFIX}tokens"].index(token) for token in tokens]


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
    vocabulary[f"{PREFIX}tokens"][:0] = ["12", "123"]
    vocabulary[f"{PREFIX}merges"] += ["1 2", "12 3"]
    del vocabulary[f"{PREFIX}token_type"]
    words = {}
    for split in ("qwen2", "llama-bpe", "glm4", "chatglm-bpe"):
        vocabulary[f"{PREFIX}pre"] = split
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


TEXTS = """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|>
<end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|>
<end_of_utterance> <eos> <turn|> <|tool_response> [e~[ <|fim_pad|> <fim-pad> <fim_pad>
<PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
<\uff5cend▁of▁sentence\uff5c>"""
"""Tokens that end an answer in llama.cpp by their text alone: src/llama-vocab.cpp."""
ENDS = TEXTS.split()


def with_tokens(*added: str, **keys: str | None) -> dict[str, Any]:
    """Returns a vocabulary with more tokens, of the type of words."""
    vocabulary = byte_pairs() | {f"{PREFIX}eot_token_id": None}
    tokens = vocabulary[f"{PREFIX}tokens"]
    tokens[-2:] = ["<|stop|>", "<|turn|>", *added]
    kind, (item, types) = vocabulary[f"{PREFIX}token_type"]
    vocabulary[f"{PREFIX}token_type"] = kind, (item, types + [1] * len(added))
    vocabulary |= {
        f"{PREFIX}{key}_token_id": None if text is None else tokens.index(text)
        for key, text in keys.items()
    }
    return vocabulary


@pytest.mark.parametrize("text", ENDS)
def test_answers_end_at_tokens_that_are_known_by_their_text(
    text: str, tmp_path: Path
) -> None:
    vocabulary = with_tokens(text, "<|other|>")
    tokenizer = loaded(tmp_path, "qwen3", vocabulary)

    assert tokenizer.eos_token_ids == set(ids_of(vocabulary, "<|stop|>", text))
    if text.isascii():  # others have no spelling in bytes
        assert tokenizer.encode(f"hello{text}") == ids_of(vocabulary, "hello", text)


def test_the_list_of_ends_is_complete() -> None:
    listed = {*tokenizer._END_TEXTS, *chain(*tokenizer._FIM_TEXTS.values())}
    assert listed == {*ENDS}


HARMONY, SOLAR = ["<|return|>", "<|call|>"], ["<|flush|>", "<|calls|>"]


@pytest.mark.parametrize(
    ("added", "keys", "ends"),
    [
        # "<|end|>" ends a message of several, and "</s>" is a part of web pages.
        ([*HARMONY, "<|end|>"], {}, ["<|stop|>", *HARMONY]),
        ([*HARMONY, "<|end|>"], {"eot": "<|end|>"}, ["<|stop|>", *HARMONY]),
        ([*SOLAR, "<|end|>"], {}, ["<|stop|>", *SOLAR]),
        (["<|return|>", "<|end|>"], {}, ["<|stop|>", "<|return|>", "<|end|>"]),
        (["<|call|>", "<|end|>"], {}, ["<|stop|>", "<|call|>", "<|end|>"]),
        (["<|tool_response>", "</s>"], {}, ["<|stop|>", "<|tool_response>"]),
        # A key for the use of a token stands above its text, except at ends of turns.
        (["<|fim_pad|>"], {"fim_pad": "hello"}, ["<|stop|>", "hello"]),
        (["<|im_end|>"], {"eot": "hello"}, ["<|stop|>", "hello", "<|im_end|>"]),
        (["<|im_end|>"], {"eos": None}, ["<|im_end|>"]),
        ([], {"eom": "hello"}, ["<|stop|>", "hello"]),
    ],
)
def test_ends_by_text_and_by_key(
    added: list[str], keys: dict[str, str | None], ends: list[str], tmp_path: Path
) -> None:
    vocabulary = with_tokens(*added, **keys)

    found = config_of(opened(tmp_path, "qwen3", vocabulary))["eos_token_id"]

    assert (found if isinstance(found, list) else [found]) == ids_of(vocabulary, *ends)


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


def test_sentencepiece_has_tokens_1_and_2_at_its_ends_if_the_file_names_none(
    tmp_path: Path,
) -> None:
    vocabulary = sentencepiece()
    vocabulary[f"{PREFIX}tokens"][2] = "<end>"
    del vocabulary[f"{PREFIX}bos_token_id"], vocabulary[f"{PREFIX}eos_token_id"]

    tokenizer = loaded(tmp_path, "llama", vocabulary)

    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.eos_token_ids == {2}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<end>")


@pytest.mark.parametrize(("begins", "ends"), [(False, True), (True, False)])
def test_ends_are_added_if_the_file_says_so(
    begins: bool, ends: bool, tmp_path: Path
) -> None:
    vocabulary = byte_pairs("llama-bpe", add_bos=begins)
    vocabulary[f"{PREFIX}add_eos_token"] = ends
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


LLAMA, QWEN = ("llama", sentencepiece), ("qwen3", byte_pairs)
GEMMA = ("gemma4", character_pairs)
NO_TYPES = {"token_type": None}
REFUSED: list[tuple[tuple[str, Callable[..., dict]], str, dict[str, Any]]] = [
    # A kind, a split and a flag that are not known, and one that is no flag.
    (QWEN, "model", {"model": "bert"}),
    (QWEN, "pre", {"pre": "deepseek-v3"}),
    (QWEN, "pre", {"pre": "default"}),
    (QWEN, "add_bos_token", {"add_bos_token": 1}),
    (QWEN, "add_sep_token", {"add_sep_token": True}),
    (QWEN, "suppress_tokens", {"suppress_tokens": ("array", ("i32", [1]))}),
    # Lists that do not fit.
    (QWEN, "tokens", {"tokens": [1, 2], **NO_TYPES}),
    (QWEN, "tokens", {"tokens": ("array", ("string", [])), **NO_TYPES}),
    (QWEN, "tokens", {"tokens": ["a", "b", "a"], **NO_TYPES}),
    (QWEN, "tokens", {"tokens": ["a", "b" * 1025], **NO_TYPES}),
    (QWEN, "merges", {"merges": ["a b c"]}),
    (QWEN, "token_type", {"token_type": ("array", ("i32", [1, 2, 3]))}),
    (QWEN, "eos_token_id", {"eos_token_id": 10_000}),
    # Beside a config.json transformers divides texts as Qwen2 does.
    (("qwen2", byte_pairs), "pre", {"pre": "llama-bpe"}),
    # What transformers has not.
    (LLAMA, "add_space_prefix", {"add_space_prefix": False}),
    (("gemma2", sentencepiece), "add_space_prefix", {}),
    (("gemma2", sentencepiece), "add_space_prefix", {"add_space_prefix": True}),
    (("gemma4", sentencepiece), "model", {"add_space_prefix": False}),
    (("qwen2", sentencepiece), "pre", {}),
    (("qwen2", sentencepiece), "pre", {"pre": "qwen2"}),
    # What is missing.
    *((QWEN, name, {name: None}) for name in ("model", "pre", "tokens", "merges")),
    (LLAMA, "scores", {"scores": None}),
    (
        ("llama", byte_pairs),
        "bos_token_id",
        {"pre": "llama-bpe", "add_bos_token": True, "bos_token_id": None},
    ),
    (GEMMA, "merges", {"merges": None}),
    (GEMMA, "bos_token_id", {"bos_token_id": None}),
    (GEMMA, "add_space_prefix", {"add_space_prefix": True}),
]


@pytest.mark.parametrize(("usual", "key", "changes"), REFUSED)
def test_vocabularies_that_are_not_read_are_refused(
    usual: tuple[str, Callable[..., dict]],
    key: str,
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    architecture, vocabulary = usual
    whole = vocabulary() | {PREFIX + name: each for name, each in changes.items()}

    with pytest.raises(ValueError, match=rf"t\.gguf.*{PREFIX}{key}"):
        tokenizer_files(opened(tmp_path, architecture, whole))


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
