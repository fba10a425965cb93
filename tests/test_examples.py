"""The examples run, and print what their READMEs show."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import printed_examples
from mlx_marlin.backends import selection

pytestmark = pytest.mark.skipif(
    selection.backend() != "emulator", reason="the emulator does not run here"
)

EXAMPLES = printed_examples.ROOT / "examples"
SHOWN = {path.parent.name: path for path in printed_examples.readmes()}


def test_these_examples_show_their_output() -> None:
    assert set(SHOWN) == {
        "explain_a_plan",
        "mlx_lm_model",
        "naive_to_marlin",
        "own_kernel",
        "quantize_a_layer",
        "speculative_decoding",
    }


@pytest.mark.thinned(3)
@pytest.mark.parametrize("readme", SHOWN.values(), ids=SHOWN)
def test_an_example_prints_what_its_readme_shows(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")

    # After an intended change: python tests/printed_examples.py
    assert printed_examples.page(text) == text


def test_the_draft_model_can_be_trained_again(tmp_path: Path) -> None:
    tokens, folder = tmp_path / "tokens.npz", tmp_path / "draft"
    stream = np.arange(40, dtype=np.uint16)
    np.savez(tokens, train=stream, held_out=stream)
    shipped = EXAMPLES / "speculative_decoding/draft"
    files = ["--tokens", str(tokens), "--out", str(folder)]
    config = ["--config", str(shipped / "config.json")]
    steps = ["--steps", "1", "--warmup", "1", "--batch", "1", "--context", "8"]
    train = str(EXAMPLES / "tiny_llama/train.py")

    said = printed_examples.printed(train, *files, *config, *steps)

    assert "102,592 parameters" in said
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in shipped.iterdir()
    }
    new, old = (
        {name: each.shape for name, each in mx.load(str(path)).items()}
        for path in (folder / "model.safetensors", shipped / "model.safetensors")
    )
    assert new == old


def test_the_tests_of_your_own_kernel_pass() -> None:
    folder = EXAMPLES / "own_kernel"
    readme = (folder / "README.md").read_text(encoding="utf-8")

    output = printed_examples.printed("-m", "pytest", "-q", folder=folder)

    promised = re.search(r"`(\d+ passed)`", readme)[1]
    assert promised in output


def test_the_repository_lists_every_example() -> None:
    text = (printed_examples.ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\(examples/(\w+)/README\.md\)", text))

    assert linked == {path.parent.name for path in EXAMPLES.glob("*/README.md")}


def test_every_step_is_explained_and_run() -> None:
    folder = EXAMPLES / "naive_to_marlin"
    steps = [path.stem for path in sorted(folder.glob("*.metal"))]
    readme = (folder / "README.md").read_text(encoding="utf-8")

    assert re.findall(r"^\d\. \[`(\w+)\.metal`\]", readme, re.MULTILINE) == steps
    assert re.findall(r"^(0\w+) ", readme, re.MULTILINE) == steps
