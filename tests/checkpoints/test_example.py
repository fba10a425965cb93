"""The example of importing weights runs as its README says."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/import_weights"


@pytest.mark.grid
@pytest.mark.usefixtures("kernels")
def test_both_checkpoints_write_python(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("gptq", "gguf_file"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    texts = runpy.run_path(str(EXAMPLE / "run.py"))["run"](tmp_path, tokens=10)

    assert len(texts) == 2
    assert all(text.startswith("ArgumentParser(") for text in texts)
    printed = capsys.readouterr().out
    assert printed.count(" bytes; 0 of them rounded") == 2
