"""No kernel changes by accident: functions are those that were counted and reviewed."""

import json

import pytest

import metal_emulator
import shader_tokens

pytestmark = pytest.mark.skipif(
    metal_emulator.unavailable() is not None, reason="no compiler for Metal kernels"
)

TEXT = """
template <typename T>
METAL_FUNC T larger(T a, T b) {
  return max(a, b);  // the larger one
}
"""


def test_the_functions_are_those_that_were_recorded() -> None:
    recorded = json.loads(shader_tokens.FILE.read_text(encoding="ascii"))

    # After an intended change: python tests/shader_tokens.py
    assert shader_tokens.of_libraries() == recorded


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("larger", "greater"),
        ("(T a, T b) {\n  return max(a, b)", "(T x, T y) {\n  return max(x, y)"),
        ("  // the larger one", ""),
        ("return max", "return  marlin::max"),
    ],
)
def test_names_comments_and_the_namespace_do_not_count(old: str, new: str) -> None:
    assert old in TEXT
    assert shader_tokens.digests(TEXT.replace(old, new)) == shader_tokens.digests(TEXT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max", "min"),
        ("(a, b)", "(b, a)"),
        ("T b)", "int b)"),
        ("return", "return 1 +"),
    ],
)
def test_tokens_do(old: str, new: str) -> None:
    assert old in TEXT
    assert shader_tokens.digests(TEXT.replace(old, new)) != shader_tokens.digests(TEXT)
