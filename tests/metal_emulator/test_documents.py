"""docs/emulator.md warns of what kernel text can do, and its Python runs as it is."""

import re
from pathlib import Path
from typing import Any

import pytest

import metal_emulator

TEXT = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(
    metal_emulator.unavailable() is not None, reason="no compiler for Metal kernels"
)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_snippet_runs(block: str, request: pytest.FixtureRequest) -> None:
    names: dict[str, Any] = {}
    exec(compile(block, "emulator.md", "exec"), names)

    for name in [name for name in names if name.startswith("test_")]:
        names[name](request.getfixturevalue("emulated_metal"))


def test_the_first_screen_says_that_kernels_are_native_code() -> None:
    screen = TEXT.splitlines()[:24]

    assert any("native code with your rights" in line for line in screen)
