"""Converts a GPTQ folder with act-order and a GGUF file, and lets both write.

Run it from the repository's root; it needs `pip install gguf` too:

    python examples/import_weights/run.py
"""

import argparse
import tempfile
from pathlib import Path

import gguf_file
import gptq
import mlx_lm

import mlx_marlin
from mlx_marlin.cli.main import main

MODEL = Path(__file__).parents[1] / "tiny_llama/model"
PROMPT = "def main():\n    parser = argparse."


def run(folder: Path, tokens: int) -> list[str]:
    """Writes both checkpoints to a folder, converts them, and returns their texts."""
    gptq.write(MODEL, folder / "gptq")
    gguf_file.write(MODEL, folder / "model.gguf")
    texts = []
    for source in ("gptq", "model.gguf"):
        converted = folder / f"{source}-marlin"
        if main(["convert", str(folder / source), str(converted)]):
            raise SystemExit(f"{source} could not be converted")
        model, tokenizer = mlx_marlin.load(converted)
        text = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=tokens)
        print(f"\n{source} writes:\n{PROMPT}{text}\n")
        texts.append(text)
    return texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        run(Path(path), arguments.tokens)
