"""The tokenizer of a GGUF file, as the files that transformers reads.

transformers has converters for the vocabularies that llama.cpp stores; this module
hands them the metadata, and refuses what they would guess at.

Ways to divide a text into words are facts about llama.cpp: `llama_vocab::impl::load` in
src/llama-vocab.cpp, read at commit 00ad355e. Its regular expressions for these names
are those of transformers' `GGUF_PRE_TOKENIZER_SPLITS`, and GPT-2's own. Those for
"default", and for files without a name, are not: they divide punctuation and digits
too.
"""

import json
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from mlx_marlin.checkpoints.gguf.container import Container


@dataclass(frozen=True, slots=True)
class Split:
    """What goes with a way to divide a text."""

    # Whether a word of the vocabulary is one token, whatever the merges give
    # (llama.cpp's `ignore_merges`)
    whole_words: bool
    # Whether a text begins with BOS if the file does not say it (`add_bos`)
    begins: bool


_PLAIN = Split(whole_words=False, begins=False)
LLAMA3 = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano"),
)
QWEN2 = ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez")
GPT4O = ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")
SAME = dict.fromkeys(("glm4", "chatglm-bpe"), "smaug-bpe")
"""Names that transformers does not know -> one that it divides texts for alike."""
SPLITS: dict[str, Split] = {
    **dict.fromkeys((*LLAMA3, "tekken"), Split(whole_words=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", *SAME), _PLAIN),
    **dict.fromkeys(QWEN2, _PLAIN),
    **dict.fromkeys(GPT4O, _PLAIN),
    **dict.fromkeys(("qwen35", "gpt-2"), _PLAIN),
}
"""By the value of `tokenizer.ggml.pre`."""


_PREFIX = "tokenizer.ggml."
_MODELS = ("gpt2", "llama", "gemma4")
"""Kinds of vocabularies that are read: bytes in pairs, SentencePiece's, and Gemma 4's,
which has pairs too, but of characters."""
LONGEST_TOKEN = 1024
"""Characters of a token."""
LONGEST_PIECE = 256
"""Characters of a token if merges are derived from its divisions."""
MERGES_PER_TOKEN = 16
"""Merges that are derived at most, in characters per character of the tokens: a
vocabulary of Mistral's, with 32000 tokens of up to 16 characters, has 2.02."""
_DEFAULT_ENDS = {"llama": {"bos": 1, "eos": 2}}
"""Tokens that llama.cpp adds if the file names none (`llama_vocab::impl::load`). For
pairs of bytes it is token 11, an accident of one vocabulary, which is refused."""
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that end an answer, by the keys of the metadata."""
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
    *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    *("<turn|>", "<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~["),
)
"""Likewise by their texts, whatever the metadata name: llama.cpp's `special_eog_ids`,
as the two tables after this one (src/llama-vocab.cpp at commit 00ad355e)."""
_FIM_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of tokens that end an answer if no key names another token for their use."""
_NO_ENDS: tuple[tuple[str, tuple[set[str], ...]], ...] = (
    ("<|end|>", ({"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"})),
    ("</s>", ({"<|tool_response>"},)),
)
"""Texts that end no answer, or a part of it, beside one text of each set."""
CONTROL, NORMAL = 3, 1
"""Types of tokens."""


def tokenizer_files(container: Container) -> dict[str, str]:
    """Returns "tokenizer.json" and "tokenizer_config.json", by name."""
    convert, splits = _converter()
    architecture = container.text("general.architecture")
    vocabulary = _vocabulary(container, architecture, splits)
    split = SPLITS.get(vocabulary.get("pre_tokenizer_type", ""))
    before = _begin(container, vocabulary, split)
    after = _end(container, vocabulary, "eos", default=False)
    special = _special_tokens(container, vocabulary["tokens"])
    try:
        tokenizer, _ = convert(architecture, vocabulary)
        if split is not None:
            tokenizer.model.ignore_merges = split.whole_words
        _add_ends(tokenizer, before, after)
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


def _converter() -> tuple[Callable[..., tuple[Any, Any]], list[str]]:
    """Returns transformers' converter, and the ways to divide a text that it knows.

    For other names it would take GPT-2's.
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

    known = {"gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}
    return convert_gguf_tokenizer, [
        name for name in SPLITS if SAME.get(name, name) in known
    ]


def _vocabulary(
    container: Container, architecture: str, splits: Sequence[str]
) -> dict[str, Any]:
    """Returns the vocabulary under the names that transformers gives its parts."""
    model = container.text(f"{_PREFIX}model")
    if model not in _MODELS:
        raise container.refusal(f"{_PREFIX}model", f"is not one of {[*_MODELS]}")
    if model == "gpt2" and container.text(f"{_PREFIX}pre") not in splits:
        raise container.refusal(f"{_PREFIX}pre", f"is not one of {', '.join(splits)}")
    _check_options(container, model, architecture)
    tokens = _strings(container, "tokens")
    vocabulary: dict[str, Any] = {"tokenizer_type": model, "tokens": tokens}
    if f"{_PREFIX}merges" in container.metadata:
        vocabulary["merges"] = _strings(container, "merges")
        if not all(merge.count(" ") == 1 for merge in vocabulary["merges"]):
            raise container.refusal(f"{_PREFIX}merges", "has a merge that is no pair")
    for name in ("scores", "token_type"):
        if f"{_PREFIX}{name}" in container.metadata:
            vocabulary[name] = _numbers(container, name, len(tokens))
    _mark_ends(container, vocabulary)
    if model == "gpt2":
        pre = container.text(f"{_PREFIX}pre")
        vocabulary["pre_tokenizer_type"] = SAME.get(pre, pre)
    needed = "scores" if model == "llama" else "merges"
    if needed not in vocabulary:
        raise ValueError(f"{container.path}: metadata '{_PREFIX}{needed}' is missing")
    _check_tokens(container, tokens, derived="merges" not in vocabulary)
    return vocabulary


def _mark_ends(container: Container, vocabulary: dict[str, Any]) -> None:
    """Makes tokens that are known by their texts such that no text is divided in them.

    llama.cpp does so where a file says that they are tokens like others.
    """
    tokens = vocabulary["tokens"]
    types = vocabulary.setdefault("token_type", [NORMAL] * len(tokens))
    known = {*_END_TEXTS, *chain.from_iterable(_FIM_TEXTS.values())}
    for index in end_tokens(container):
        if index < len(tokens) and tokens[index] in known:
            types[index] = CONTROL


def _check_options(container: Container, model: str, architecture: str) -> None:
    """Refuses what transformers' tokenizers do not do."""
    pre = f"{_PREFIX}pre"
    known = model == "gpt2" and container.text(pre) in QWEN2
    if architecture == "qwen2" and not known:
        # Beside a config.json transformers takes its own tokenizer for this model.
        raise container.refusal(pre, f"is not one of {', '.join(QWEN2)} for Qwen2")
    if architecture == "gemma4" and model == "llama":
        raise container.refusal(f"{_PREFIX}model", "must be gemma4: convert it again")
    if model == "gemma4" and container.flag(f"{_PREFIX}add_space_prefix", False):
        raise container.refusal(f"{_PREFIX}add_space_prefix", "must be False")
    gemma = architecture.startswith("gemma")
    if model == "llama" and container.flag(f"{_PREFIX}add_space_prefix", True) == gemma:
        raise container.refusal(
            f"{_PREFIX}add_space_prefix",
            f"must be {not gemma} (llama.cpp's default is True) for transformers",
        )
    if container.flag(f"{_PREFIX}add_sep_token", False):
        raise container.refusal(f"{_PREFIX}add_sep_token", "must be False")
    suppressed = container.metadata.get(f"{_PREFIX}suppress_tokens", ())
    if not isinstance(suppressed, Sized) or len(suppressed):
        raise container.refusal(f"{_PREFIX}suppress_tokens", "must be empty for mlx-lm")


def _check_tokens(container: Container, tokens: list[str], *, derived: bool) -> None:
    """Refuses tokens that are not a vocabulary's, before work grows with their squares.

    Merges are `derived` from tokens: transformers makes one of each division of a token
    into two others.
    """
    longest = LONGEST_PIECE if derived else LONGEST_TOKEN
    known = set(tokens)
    if len(known) != len(tokens) or len(max(tokens, key=len)) > longest:
        raise container.refusal(
            f"{_PREFIX}tokens",
            f"has a token twice, or one of more than {longest} characters",
        )
    left = MERGES_PER_TOKEN * sum(map(len, tokens))
    for token in tokens if derived else ():
        divisions = (
            token[:at] in known and token[at:] in known for at in range(1, len(token))
        )
        left -= len(token) * sum(divisions)
        if left < 0:
            raise container.refusal(
                f"{_PREFIX}tokens",
                f"has more than {MERGES_PER_TOKEN} merges for each token",
            )


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


def end_tokens(container: Container) -> list[int]:
    """Returns the tokens that end an answer; first the one that the file names EOS."""
    named = {name: _named(container, name) for name in _END_KEYS}
    there = f"{_PREFIX}tokens" in container.metadata
    tokens = _strings(container, "tokens") if there else []
    texts = {*_END_TEXTS}
    for name, others in _FIM_TEXTS.items():
        texts.update(others if named[name] is None else ())
    ids = [index for index in named.values() if index is not None]
    ids += [index for index, token in enumerate(tokens) if token in texts]
    known = {index: tokens[index] for index in ids if index < len(tokens)}
    ends = {*known.values()}
    no_ends = {text for text, others in _NO_ENDS if all(map(ends.intersection, others))}
    return [index for index in dict.fromkeys(ids) if known.get(index) not in no_ends]


def _named(container: Container, name: str) -> int | None:
    """Returns a token that the file names, or that is one if it names none."""
    key = f"{_PREFIX}{name}_token_id"
    if key in container.metadata:
        return container.integer(key)
    model = container.metadata.get(f"{_PREFIX}model")
    return _DEFAULT_ENDS.get(str(model), {}).get(name)


def _special_tokens(container: Container, tokens: list[str]) -> dict[str, str]:
    """Returns the special tokens, by transformers' names."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        f"{name}_token": _token(container, tokens, key)
        for name, key in names.items()
        if _named(container, key) is not None
    }


def _token(container: Container, tokens: list[str], name: str) -> str:
    key, index = f"{_PREFIX}{name}_token_id", _named(container, name)
    if index is None or index >= len(tokens):
        raise container.refusal(key, f"is not one of {len(tokens)} tokens")
    return tokens[index]


def _begin(
    container: Container, vocabulary: dict[str, Any], split: Split | None
) -> str | None:
    """Returns the token before each text; Gemma 4's has one, whatever the file says."""
    if vocabulary["tokenizer_type"] == "gemma4":
        return _token(container, vocabulary["tokens"], "bos")
    begins = split is None or split.begins
    return _end(container, vocabulary, "bos", default=begins)


def _end(
    container: Container, vocabulary: dict[str, Any], name: str, default: bool
) -> str | None:
    """Returns the token before ("bos") or after ("eos") each text; None without one."""
    if not container.flag(f"{_PREFIX}add_{name}_token", default):
        return None
    return _token(container, vocabulary["tokens"], name)


def _add_ends(tokenizer: Any, before: str | None, after: str | None) -> None:
    """Makes a tokenizer put tokens before and after a text."""
    from tokenizers import processors

    if before is None and after is None:
        return
    first, last = ([token] if token else [] for token in (before, after))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B:1", *last],
        special_tokens=[
            (token, tokenizer.token_to_id(token)) for token in first + last
        ],
    )
