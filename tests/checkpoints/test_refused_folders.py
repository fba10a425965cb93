"""Folders that cannot be read exactly are refused by name."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_marlin.checkpoints.reading import read_checkpoint
from support import foreign_checkpoints as foreign


def saved(path: Path, config: dict, arrays: dict[str, mx.array]) -> Path:
    foreign.Folder(config).write(path)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return path


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
@pytest.mark.parametrize("value", [5, "4-bit", [], True])
def test_settings_that_are_no_object_are_refused(
    tmp_path: Path, key: str, value: object
) -> None:
    saved(tmp_path, {key: value}, {"a.weight": mx.ones((2, 2))})
    with pytest.raises(
        ValueError, match=rf"config\.json: {key}=.*, expected an object"
    ):
        list(read_checkpoint(tmp_path))
