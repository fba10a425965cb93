"""The guard, switched on in the emulator."""

from pathlib import Path

import pytest

from mlx_marlin import guard
from mlx_marlin.guard import verdicts
from support.choose import Choose


@pytest.fixture
def guarded(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Switches the guard on, for the emulator, with verdicts in an empty folder."""
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    backend("emulator")
    return tmp_path / "verdicts"
