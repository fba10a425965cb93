"""Results have the bits that are recorded: `python tests/recorded_bits.py`."""

import pytest

import recorded_bits
from mlx_marlin import state
from support.marks import needs_emulator
from support.profiles import sampled

pytestmark = needs_emulator


@sampled(0, 1)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("chip", "architecture"), recorded_bits.CHIPS)
def test_results_have_the_recorded_bits(
    chip: str, architecture: str, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in recorded_bits.settings(chip, architecture).items():
        monkeypatch.setenv(name, value)
    state.reset()
    recorded = recorded_bits.recorded()[chip]
    assert [*recorded] == recorded_bits.drawn(chip)

    found = {text: recorded_bits.digest(text) for text in [*recorded][half::2]}

    assert {text for text in found if found[text] != recorded[text]} == set()
    monkeypatch.undo()
    state.reset()
