"""Damaged files raise ValueError or OSError with the file's name, and nothing else."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin.checkpoints.gguf import Container, tensors_of, tokenizer_files
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.stored_weight import Tensor
from mlx_marlin.lm.checkpoints.gguf_source import GgufSource
from support.gguf_cases import CASES
from support.gguf_files import write_gguf
from support.gguf_mutations import mutate, mutated_keys, nested_vocabulary, seeds
from support.limits import limited
from support.profiles import profile

FILES, KEYS = (400, 70) if profile() == "quick" else (1000, 300)
VOCABULARIES = 60
TOKENIZER_EVERY = 5
MEMORY = 200 << 20
LARGER = 64
"""Bytes of a tokenizer per byte of its file, at most. A token of one letter is 9 bytes
in the file, and 130 in the tokenizer if it is a special one."""


def use(path: Path, with_tokenizer: bool) -> list[Exception]:
    """Uses all of a file, as `load` does and part by part; returns the errors."""
    try:
        container = Container(path)
    except (ValueError, OSError) as error:
        return [error]
    steps: list[Callable[[], object]] = [
        lambda: read_all(tensors_of(container, Quantization())),
        lambda: [*GgufSource(path, Quantization()).parameters()],
    ]
    if with_tokenizer:
        steps.append(lambda: tokenizer_files(container))
    errors: list[Exception] = []
    for step in steps:
        try:
            step()
        except (ValueError, OSError) as error:
            errors.append(error)
    return errors


def read_all(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        weight = tensor.read()
        mx.eval(weight if isinstance(weight, mx.array) else weight.codes)


@contextmanager
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MEMORY


def check_names(path: Path, errors: list[Exception], what: object) -> None:
    for error in errors:
        assert path.name in str(error), f"{what}: {error!r}"


def test_whole_files_are_used_and_damaged_ones_raise_errors_that_name_them(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(24)
    originals = seeds()
    for index, octets in enumerate(originals[:-1]):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(octets)
        assert use(path, with_tokenizer=True) == []
    refused = 0

    with bounded_memory():
        for index in range(FILES):
            path = tmp_path / f"damaged{index}.gguf"
            path.write_bytes(mutate(originals[index % len(originals)], random))
            errors = use(path, with_tokenizer=index % TOKENIZER_EVERY == 0)
            path.unlink()
            refused += bool(errors)
            check_names(path, errors, index)

    assert refused > FILES // 2


def test_each_key_mutated_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    every = [*mutated_keys()]
    large = [index for index, (what, _) in enumerate(every) if str(1 << 27) in what]
    random = np.random.default_rng(25)
    half = KEYS // 2
    chosen = [random.choice(each, half, False) for each in (large, len(every))]
    if profile() != "quick":
        chosen[0] = np.array(large)  # a number may be the size of what is read
    refused = 0

    with bounded_memory():
        for index in sorted({*np.concatenate(chosen)}):
            what, made = every[index]
            path = tmp_path / f"key{index}.gguf"
            path.write_bytes(made())
            errors = use(path, with_tokenizer="tokenizer" in what)
            path.unlink()
            refused += bool(errors)
            check_names(path, errors, what)

    assert refused > KEYS // 2


def test_tokenizers_are_not_much_larger_than_their_files(tmp_path: Path) -> None:
    random = np.random.default_rng(26)
    made = 0

    with bounded_memory():
        for index in range(VOCABULARIES):
            path = tmp_path / f"vocabulary{index}.gguf"
            metadata = CASES["llama"].metadata | nested_vocabulary(random)
            size = write_gguf(path, metadata).stat().st_size
            try:
                files = tokenizer_files(Container(path))
            except ValueError as error:
                check_names(path, [error], index)
                continue
            made += 1
            assert sum(map(len, files.values())) < LARGER * size, index

    assert VOCABULARIES // 4 < made < VOCABULARIES


@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "/dev/tty", "folder", "loop"])
def test_irregular_files_raise_errors_that_name_the_file(
    tmp_path: Path, target: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / "model.gguf"
    path.symlink_to(target)

    with limited():
        (error,) = use(path, with_tokenizer=True)

    assert str(path) in str(error)
