"""Puts other shaders in the place of ours: bugs, or another reading of the language."""

from pathlib import Path

import pytest

from mlx_marlin.backends import launcher, source
from mlx_marlin.backends.metal import source as metal_source

TEXTS = (
    metal_source.product_source,
    metal_source.gated_source,
    metal_source.normed_source,
    metal_source.gather_source,
    metal_source.dequantize_source,
    metal_source.reduce_source,
    metal_source.repack_source,
    metal_source.routing_source,
    metal_source.block_source,
)


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `source` read the shaders of a folder; undo with `monkeypatch`."""
    monkeypatch.setattr(source, "shader_folder", lambda: folder)
    forget_texts()


def forget_texts() -> None:
    """Drops the texts that were read, and calls of them, before and after planting."""
    for text in TEXTS:
        text.cache_clear()
    launcher.call.cache_clear()  # type: ignore[attr-defined]
