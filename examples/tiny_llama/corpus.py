"""The training text: sources of the running Python's standard library, as tokens."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from mlx_marlin.cli.demo import HELD_OUT_MODULES, held_out_text

VOCABULARY = 1024
END_OF_TEXT = "<|endoftext|>"

# Not the standard library, tables instead of code, or the Python 2 language.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "pydoc_data"}
SKIPPED_FOLDERS |= {"lib2to3", "__pycache__"}


def is_training_file(path: Path) -> bool:
    """Whether a file, named relative to the library's folder, is trained on.

    The held-out modules are left out together with their tests, which quote them.
    """
    if SKIPPED_FOLDERS.intersection(path.parts):
        return False
    names = {Path(part).stem.removeprefix("test_") for part in path.parts}
    return names.isdisjoint(HELD_OUT_MODULES)


def is_test(path: Path) -> bool:
    """Whether a file, named relative to the library's folder, is a test."""
    return not {"test", "tests", "idle_test"}.isdisjoint(path.parts)


def training_texts() -> dict[Path, str]:
    """Reads the training files: relative path to text, in the order of the paths."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    texts: dict[Path, str] = {}
    for path in filter(is_training_file, paths):
        try:
            texts[path] = (library / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a test of other encodings
            continue
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer: every text has tokens, and they join to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    """Encodes texts to one stream of tokens, an end-of-text token after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream: list[int] = []
    for text in tqdm(texts, desc="tokens", unit="file", disable=None):
        stream += [*tokenizer.encode(text).ids, end]
    return np.array(stream, dtype=np.uint16)


def write_tokens(tokenizer_file: Path, tokens_file: Path) -> None:
    """Saves the tokens of both parts of the text, and the tokenizer if it is missing.

    Args:
        tokenizer_file: `tokenizer.json`, which is trained and saved if it is missing.
        tokens_file: A `.npz` with the uint16 streams `train` and `held_out`.
    """
    texts = training_texts()
    if not tokenizer_file.exists():
        train_tokenizer(list(texts.values())).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    # Two thirds of the text are tests; what they test is read twice as often.
    library = [text for path, text in texts.items() if not is_test(path)]
    train = encode(tokenizer, [*texts.values(), *library])
    held_out = encode(tokenizer, [held_out_text()])
    np.savez_compressed(tokens_file, train=train, held_out=held_out)
    characters = sum(map(len, texts.values()))
    print(f"{len(texts)} files, {characters:,} characters, {train.size:,} tokens")
    print(f"held out: {', '.join(HELD_OUT_MODULES)}, {held_out.size:,} tokens")
