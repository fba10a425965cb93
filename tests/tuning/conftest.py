"""A folder of results that a test reads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_marlin import cache, state
from mlx_marlin.backends import measured_results


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Keeps results in a folder of the test, and reads them."""
    monkeypatch.setattr(cache, "folder", tmp_path.joinpath)
    monkeypatch.delenv(measured_results.ENVIRONMENT)
    state.reset()
    yield tmp_path / "tuned"
    state.reset()
