"""The text that MLX gets has the tokens of the files, on their lines."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_emulator.language.tokens import Tokens
from mlx_marlin.backends import source
from mlx_marlin.backends.metal.source import stripped

FILES = sorted(source.shader_folder().rglob("*.metal"))


def tokens_of_lines(text: str) -> list[list[str]]:
    """Returns the tokens of each line, as the emulator's tokenizer reads them."""
    tokens = Tokens(text)
    lines: list[list[str]] = [[]]
    for at in range(len(tokens)):
        if tokens.space(at):
            lines += [[] for _ in range(tokens.text(at).count("\n"))]
        else:
            lines[-1].append(tokens.text(at))
    return lines


def assert_same_lines(short: str, long: str) -> None:
    assert tokens_of_lines(short) == tokens_of_lines(long)
    assert short.count("\n") == long.count("\n")


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_shader_keeps_each_token_on_its_line(path: Path) -> None:
    text = path.read_text(encoding="ascii")

    assert_same_lines(stripped(text), text)
    assert "//" not in stripped(text)
    assert not re.search(r"^[ \t]|[ \t]$", stripped(text), re.MULTILINE)
    assert stripped(stripped(text)) == stripped(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int a = 1;  // one\n", "int a=1;\n"),
        ("  return x;\n", "return x;\n"),
        ("  // none\n\n", "\n\n"),
        ("a - -b + +c & &d", "a- -b+ +c& &d"),
        ("x < -1 > > y", "x< -1> >y"),
        ("#define F (x)  // c\n", "#define F (x)\n"),
        ("  #define F (x)\n", "#define F (x)\n"),
        ("#define F(x) \\\n    x + 1\ny", "#define F(x) \\\nx+1\ny"),
    ],
)
def test_text_without_comments_and_spaces(text: str, expected: str) -> None:
    assert stripped(text) == expected


PARTS = (
    *("a", "b1", "1", "0x1eu", ".5f", "2e-3", "+", "-", "*", "/ ", "<", ">", "&", "="),
    *("!", "|", ":", ",", ";", "(", ")", "->", "template", "// d\n", "\n", " ", "  "),
    *("\t", "\n#if a  (b)\n", "\n#define m(a) \\\n  a\n"),
)


@given(st.lists(st.sampled_from(PARTS), max_size=40).map("".join))
def test_any_text_keeps_its_tokens_and_lines(text: str) -> None:
    assert_same_lines(stripped(text), text)
    assert stripped(stripped(text)) == stripped(text)
