"""Digests of our shaders' functions, whatever they and their variables are called.

After an intended change of a kernel, write them again: python tests/shader_tokens.py
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from metal_emulator.language.rewrite import definitions
from metal_emulator.language.tokens import Tokens
from mlx_marlin.backends import source
from support.metal_vocabulary import vocabulary

FILE = Path(__file__).parent / "data" / "shader_tokens.json"
CPP = frozenset(
    {"bool", "break", "const", "constexpr", "continue", "else", "false", "float", "for"}
    | {"if", "int", "namespace", "return", "static", "struct", "template", "thread"}
    | {"true", "typedef", "typename", "uint", "while"}
)
"""What is neither one of Metal's names nor one of ours."""


def digests(text: str) -> list[str]:
    """Returns a digest of each function and type of a text, in its order.

    Comments, space and our namespace do not count. Names that are not the language's
    are numbered in the order in which a definition first has them.
    """
    tokens = Tokens(text)
    return [_digest(tokens, start, end) for start, _, end in definitions(tokens)]


def of_libraries() -> dict[str, list[str]]:
    """Returns the digests of all files of `lib`."""
    files = sorted((source.shader_folder() / "lib").glob("*.metal"))
    return {file.name: digests(file.read_text(encoding="ascii")) for file in files}


def _digest(tokens: Tokens, start: int, end: int) -> str:
    words = " ".join(_renamed(tokens, start, end))
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _renamed(tokens: Tokens, start: int, end: int) -> Iterator[str]:
    known = vocabulary()
    kept = known.functions | known.others | CPP
    numbers: dict[str, int] = {}
    at = start
    while at <= end:
        word, following = tokens.text(at), tokens.after(at)
        if word == "marlin" and tokens.text(following) == "::":
            at = tokens.after(following)
            continue
        if tokens.named(at) and word not in kept:
            word = f"name{numbers.setdefault(word, len(numbers))}"
        yield word
        at = following


if __name__ == "__main__":
    FILE.write_text(json.dumps(of_libraries(), indent=1) + "\n", encoding="ascii")
