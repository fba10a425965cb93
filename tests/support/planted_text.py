"""Puts other shaders in the place of ours: bugs, or another reading of the language."""

from pathlib import Path

import pytest

from mlx_marlin.backends import source

TEXTS = (
    source.product_source,
    source.gather_source,
    source.dequantize_source,
    source.reduce_source,
    source.repack_source,
)


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `source` read the shaders of a folder; undo with `monkeypatch`."""
    monkeypatch.setattr(source, "shader_folder", lambda: folder)
    forget_texts()


def forget_texts() -> None:
    """Drops the texts that were read, before and after others are planted."""
    for text in TEXTS:
        text.cache_clear()
