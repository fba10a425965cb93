"""The documents warn of what kernel text can do, and show what is found."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.tuner import losses

import metal_emulator
from metal_emulator.compiling import limited
from support.marks import needs_emulator

ROOT = Path(__file__).parents[2]
TEXTS = {
    file.name: file.read_text(encoding="utf-8")
    for file in (ROOT / "docs" / "emulator.md", ROOT / "metal_emulator" / "README.md")
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_first_screen_says_that_kernels_are_native_code(name: str) -> None:
    screen = TEXTS[name].splitlines()[:24]

    assert any("native code with your rights" in line for line in screen)


def test_the_limit_of_a_compile_is_a_minute_and_told() -> None:
    assert limited.SECONDS <= 60
    assert (
        f"Compilation ends with an error after {limited.SECONDS} s"
        in (TEXTS["emulator.md"])
    )


@needs_emulator
def test_the_race_of_mlx_lm_is_found_as_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "can_run_metal", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    kernel = losses._make_kl_forward_kernel()
    logits = [mx.random.normal((1, 500), key=mx.random.key(n)) for n in range(2)]

    with metal_emulator.emulated(trace=True), pytest.raises(RuntimeError) as caught:
        kernel(
            inputs=logits,
            template=[("V", 500), ("T", mx.float32)],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1024, 1, 1),
            threadgroup=(1024, 1, 1),
        )

    shown = re.search(r"^ +kernel kl_forward.*?\n\n", TEXTS["README.md"], re.M | re.S)
    assert shown is not None
    for line in str(caught.value).splitlines():
        if "source line" in line or "race" in line:
            # Which lane is reported first depends on the order of simdgroups.
            words = re.sub(r"byte \d+", "byte 248", line.strip())
            assert words in shown[0]
