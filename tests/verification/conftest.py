"""A llama in a foreign format, its conversion, and a tokenizer for both."""

from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from support.foreign_models import write


class Tokenizer:
    """Tells characters apart, and nothing else."""

    eos_token_ids = (7,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 64 for character in text]

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer_config.json").write_text("{}")


@pytest.fixture(autouse=True)
def _operation_by_operation(unfused: None) -> None:
    """Has MLX compile no function, which takes longer than these models."""


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives every checkpoint a tokenizer."""
    own = Tokenizer()
    monkeypatch.setattr("mlx_lm.utils.load_tokenizer", lambda *_, **__: own)
    return own


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    """A GPTQ folder whose columns are in the order of their importance."""
    write(tmp_path / "gptq", "gptq-act-order")
    return tmp_path / "gptq"


@pytest.fixture
def packed(gptq: Path, tmp_path: Path) -> Path:
    """The GPTQ folder in our packed layout."""
    [*convert(open_source(gptq), tmp_path / "packed")]
    return tmp_path / "packed"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with float16 weights."""
    write(tmp_path / "plain", "plain")
    return tmp_path / "plain"
