"""A llama in a foreign format, its conversion, and a tokenizer for both."""

from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from support import foreign_checkpoints as foreign
from support.foreign_models import write_llama


class Tokenizer:
    """Tells characters apart, and nothing else."""

    eos_token_ids = (7,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 64 for character in text]

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer_config.json").write_text("{}")


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives every checkpoint a tokenizer."""
    own = Tokenizer()
    monkeypatch.setattr("mlx_lm.utils.load_tokenizer", lambda *_, **__: own)
    return own


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    """A GPTQ folder whose columns are in the order of their importance."""
    path = tmp_path / "gptq"
    write_llama(
        path,
        lambda layer, weight: foreign.gptq_arrays(layer, weight, 2),
        foreign.gptq_config(4, 2),
        bits=4,
        act_order=True,
    )
    return path


@pytest.fixture
def packed(gptq: Path, tmp_path: Path) -> Path:
    """The GPTQ folder in our packed layout."""
    [*convert(open_source(gptq), tmp_path / "packed")]
    return tmp_path / "packed"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with float16 weights."""
    path = tmp_path / "plain"
    write_llama(
        path,
        lambda layer, weight: {f"{layer}.weight": weight.values.astype("float16")},
        {},
        bits=8,
    )
    return path
