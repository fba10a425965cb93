"""The examples run, and print what their READMEs show."""

import re
from pathlib import Path

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
    }


@pytest.mark.thinned(3)
@pytest.mark.parametrize("readme", SHOWN.values(), ids=SHOWN)
def test_an_example_prints_what_its_readme_shows(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")

    # After an intended change: python tests/printed_examples.py
    assert printed_examples.page(text) == text


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
