"""A folder of results for commands in the emulator."""

from pathlib import Path

import pytest

from mlx_marlin import cache
from mlx_marlin.backends import tuned_results
from support.choose import Choose


@pytest.fixture
def kept(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs kernels in the emulator and keeps results in a folder of the test."""
    compiled = cache.folder("emulator")
    monkeypatch.setattr(
        cache, "folder", lambda name: {"emulator": compiled}.get(name, tmp_path / name)
    )
    monkeypatch.delenv(tuned_results.ENVIRONMENT)
    backend("emulator")
    return tmp_path / "tuned"
