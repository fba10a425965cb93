"""Puts other shaders in the place of ours: bugs, or another reading of the language."""

from pathlib import Path

import pytest

from mlx_marlin.backends import graph, source
from mlx_marlin.backends.metal import source as metal_source


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `source` read the shaders of a folder; undo with `monkeypatch`."""
    monkeypatch.setattr(source, "shader_folder", lambda: folder)
    forget_texts()


def forget_texts() -> None:
    """Drops the texts that were read, and calls of them, before and after planting."""
    metal_source.kernel_source.cache_clear()
    graph.call.cache_clear()  # type: ignore[attr-defined]
