"""The examples are explained and can be made again.

`test_document_blocks` runs them.
"""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np

import document_blocks

EXAMPLES = document_blocks.ROOT / "examples"


def test_the_draft_model_can_be_trained_again(tmp_path: Path) -> None:
    tokens, folder = tmp_path / "tokens.npz", tmp_path / "draft"
    stream = np.arange(40, dtype=np.uint16)
    np.savez(tokens, train=stream, held_out=stream)
    shipped = EXAMPLES / "speculative_decoding/draft"
    train = EXAMPLES / "tiny_llama/train.py"
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


def test_every_step_is_explained_and_run() -> None:
    folder = EXAMPLES / "naive_to_marlin"
    steps = [path.stem for path in sorted(folder.glob("*.metal"))]
    readme = (folder / "README.md").read_text(encoding="utf-8")

    assert re.findall(r"^\d\. \[`(\w+)\.metal`\]", readme, re.MULTILINE) == steps
    assert re.findall(r"^(0\w+) ", readme, re.MULTILINE) == steps
