"""docs/emulator.md warns of what kernel text can do."""

from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")


def test_the_first_screen_says_that_kernels_are_native_code() -> None:
    screen = TEXT.splitlines()[:24]

    assert any("native code with your rights" in line for line in screen)
