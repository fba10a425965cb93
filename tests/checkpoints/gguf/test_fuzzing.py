"""Damaged files raise ValueError or OSError with the file's name, and nothing else."""

import resource
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_marlin.checkpoints.gguf import (
    Container,
    config_of,
    tensors_of,
    tokenizer_files,
)
from support.gguf_mutations import mutate, seeds

FILES = 1000
TOKENIZER_EVERY = 5
MEMORY = 200 << 20


def use(path: Path, with_tokenizer: bool) -> list[Exception]:
    """Uses all of a file; returns the errors."""
    errors: list[Exception] = []
    try:
        container = Container(path)
    except (ValueError, OSError) as error:
        return [error]
    for step in (config_of, tokenizer_files if with_tokenizer else config_of):
        try:
            step(container)
        except (ValueError, OSError) as error:
            errors.append(error)
    try:
        for tensor in tensors_of(container):
            weight = tensor.read()
            mx.eval(weight if isinstance(weight, mx.array) else weight.codes)
    except (ValueError, OSError) as error:
        errors.append(error)
    return errors


def test_whole_files_are_used_without_errors(tmp_path: Path) -> None:
    for index, octets in enumerate(seeds()[:-1]):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(octets)
        assert use(path, with_tokenizer=True) == []


def test_damaged_files_raise_errors_that_name_the_file(tmp_path: Path) -> None:
    random = np.random.default_rng(24)
    originals = seeds()
    use_first = tmp_path / "first.gguf"
    use_first.write_bytes(originals[0])
    use(use_first, with_tokenizer=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0

    for index in range(FILES):
        path = tmp_path / f"damaged{index}.gguf"
        path.write_bytes(mutate(originals[index % len(originals)], random))
        errors = use(path, with_tokenizer=index % TOKENIZER_EVERY == 0)
        path.unlink()
        refused += bool(errors)
        for error in errors:
            assert path.name in str(error), f"file {index}: {error!r}"

    assert refused > FILES // 2
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MEMORY
