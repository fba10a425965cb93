"""Every command and every Python block of README, docs/ and examples/ runs.

`document_blocks` says how, and how a page marks a block that cannot run here.
"""

import builtins
import inspect
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import document_blocks
from document_blocks import PAGES, ROOT, Block
from mlx_marlin import cache
from support import auto_hook, command_names

SLOW = {
    "console": {
        "docs/import.md",
        "docs/installation.md",
        "docs/measuring.md",
        "docs/mlx_lm.md",
        "docs/plans.md",
        "docs/speculation.md",
        "examples/import_weights/README.md",
        "examples/mlx_lm_model/README.md",
        "examples/naive_to_marlin/README.md",
        "examples/own_kernel/README.md",
        "examples/seven_tiles/README.md",
        "examples/speculative_decoding/README.md",
    },
    "python": {
        "docs/import.md",
        "docs/mlx_lm.md",
        "docs/speculation.md",
        "examples/tiny_llama/README.md",
    },
}
"""Pages that take seconds, such as the demo: in the quick profile it is only checked
that what they name exists."""
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def running(page: Path, language: str) -> list[Block]:
    """Returns the blocks of a page in a language that can run here."""
    return [
        block
        for block in document_blocks.blocks(page)
        if block.language == language and block.mark != "needs"
    ]


def with_blocks(language: str) -> pytest.MarkDecorator:
    """Returns a decorator that gives a test all pages with such blocks."""
    slow = SLOW[language]
    cases = [
        pytest.param(page, id=name, marks=[pytest.mark.slow] * (name in slow))
        for page, name in zip(PAGES, NAMES, strict=True)
        if running(page, language)
    ]
    return pytest.mark.parametrize("page", cases)


@pytest.fixture
def _undone(
    kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Serves calls by our kernels; at the end, undoes what the pages change.

    A chat ends at once, and a server when it listens. Results and verdicts are kept in
    a folder of the test.
    """
    monkeypatch.setattr(cache, "folder", lambda name: tmp_path / name)

    def interrupt(server: ThreadingHTTPServer) -> None:
        server.server_close()
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", lambda *_: "q")
    monkeypatch.setattr(ThreadingHTTPServer, "service_actions", interrupt)
    yield
    auto_hook.remove()
    sys.modules.pop("mlx_marlin.auto", None)


@pytest.mark.usefixtures("_undone")
@with_blocks("python")
def test_the_python_of_a_page_runs(page: Path, request: pytest.FixtureRequest) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    with document_blocks.folder_of(page):
        for block in running(page, "python"):
            document_blocks.run_python(block, names)
            for name in [name for name in names if name.startswith("test_")]:
                test = names.pop(name)
                wanted = inspect.signature(test).parameters
                test(**{each: request.getfixturevalue(each) for each in wanted})


@pytest.mark.usefixtures("_undone")
@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
@with_blocks("console")
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: Path) -> None:
    with document_blocks.folder_of(page) as folder:
        for block in running(page, "console"):
            for command, printed in document_blocks.run_block(block):
                # After an intended change: python tests/document_blocks.py
                assert document_blocks.is_shown(printed, command.shown), printed
        for file in document_blocks.made(page, folder):
            assert file.read_bytes() == (page.parent / file.name).read_bytes()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_does_not_run_says_why_and_commands_name_what_exists(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    for block in document_blocks.blocks(page):
        if block.mark == "needs" or name in SLOW[block.language]:
            assert command_names.fault(block) is None, block.place
    assert command_names.inline_faults(page) == []


def test_a_command_in_a_sentence_that_nobody_can_run_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`mlx-marlin plam`, `make cake`, `mlx-marlin bench --best`", "utf-8"
    )

    assert len(command_names.inline_faults(page)) == 3


def test_a_language_that_nobody_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="'bash' is not one of"):
        block("```bash\n$ ls\n```\n")


def block(text: str) -> Block:
    """Returns the only block of a text."""
    (found,) = document_blocks.parsed(text, "page")
    return found


FAULTS = {
    "```console\n$ ls\n```\n": "expected one of",
    "```console\n$ make no-such-target\n```\n": "no target",
    "```console\n$ mlx-marlin no-such-command\n```\n": "not a command of ours",
    "```console\n$ A=1 mlx-marlin bench --no-such\n```\n": "not a command of ours",
    "```\npython -m benchmarks.no_such\n```\n": "no module",
    "  ```sh\n  python benchmarks/no_such.py --x\n  ```\n": "no file",
    '```console\n$ pip install ".[lm,no_such]"\n```\n': "no extras",
}
"""Blocks that cannot run here, and what is wrong with each."""


@pytest.mark.parametrize(("text", "wrong"), FAULTS.items())
def test_a_block_that_nobody_can_run_is_found(text: str, wrong: str) -> None:
    need = "luck" if wrong == "expected one of" else "gpu"

    assert wrong in str(command_names.fault(block(f"<!-- needs: {need} -->\n{text}")))


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n\nprints `2`.\n",
        "```python\nname\n```\n",
        "<!-- raises: ValueError -->\n```python\n1 / 0\n```\n",
        "<!-- raises: ValueError -->\n```python\n1 / 1\n```\n",
        "<!-- raises: KeyError -->\n```python\n{}[1]\n```\n\n    KeyError: 2\n",
    ],
)
def test_python_that_does_something_else_is_found(text: str) -> None:
    with pytest.raises((AssertionError, NameError, ZeroDivisionError)):
        document_blocks.run_python(block(text), {})


def test_a_command_that_fails_is_found() -> None:
    for command in ("mlx-marlin plan 0x1x1", "python -c 1/0"):
        with pytest.raises(RuntimeError, match="ended with"):
            document_blocks.run_command(command)


def test_output_is_compared_and_dots_stand_for_anything() -> None:
    commands = block("```console\n$ one \\\n  two\na ... c\n$ three\n```\n").commands

    assert [each.words for each in commands] == ["one    two", "three"]
    assert [each.shown for each in commands] == ["a ... c\n", ""]
    assert document_blocks.is_shown("a b\nb c\n", commands[0].shown)
    assert not document_blocks.is_shown("a b\n", commands[0].shown)


@pytest.mark.usefixtures("unfused")
def test_the_draft_model_can_be_trained_again(tmp_path: Path) -> None:
    tokens, folder = tmp_path / "tokens.npz", tmp_path / "draft"
    stream = np.arange(40, dtype=np.uint16)
    np.savez(tokens, train=stream, held_out=stream)
    shipped = ROOT / "examples" / "speculative_decoding/draft"
    train = ROOT / "examples" / "tiny_llama/train.py"
    files = f"--tokens {tokens} --out {folder} --config {shipped / 'config.json'}"
    steps = "--steps 1 --warmup 1 --batch 1 --context 8"

    said = document_blocks.run_command(f"python {train} {files} {steps}")

    assert "102,592 parameters" in said
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in shipped.iterdir()
    }
    new, old = (
        {name: each.shape for name, each in mx.load(str(path)).items()}
        for path in (folder / "model.safetensors", shipped / "model.safetensors")
    )
    assert new == old
