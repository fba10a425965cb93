"""The checkpoint that the demo ships, and the script that trains it again."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.cli import demo
from mlx_marlin.lm.verification.texts import perplexity

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_llama"
# The shipped model has 8.4 to 9.3, depending on the running Python's modules.
BOUND = 12.0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load()[1]


def load() -> tuple[Any, Any]:
    return mlx_lm.load(str(EXAMPLE / "model"))[:2]


def test_it_is_small_and_its_products_are_not_all_powers_of_two_but_whole_groups() -> (
    None
):
    assert sum(path.stat().st_size for path in (EXAMPLE / "model").iterdir()) < 8e6
    weights = dict(load()[0].named_modules())
    shapes = {part.weight.shape for part in weights.values() if "weight" in part}
    products = [shape for shape in shapes if len(shape) == 2]

    assert all(k % 64 == 0 for _, k in products)
    assert any(n & (n - 1) for n, _ in products)
    assert any(k & (k - 1) for _, k in products)


@pytest.mark.slow
def test_it_predicts_other_modules_unless_a_layer_is_damaged() -> None:
    model, tokenizer = load()
    text = demo.held_out_tokens(tokenizer)

    assert perplexity(model, text) < BOUND
    layer = model.layers[2].mlp.down_proj
    layer.weight = layer.weight[::-1]
    assert perplexity(model, text) > BOUND


@given(st.text())
def test_the_tokenizer_gives_back_every_text(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text)

    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < 1024 for token in tokens)


def test_held_out_modules_and_their_tests_are_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    from corpus import is_training_file, training_texts

    for name in demo.HELD_OUT_MODULES:
        assert not is_training_file(Path(f"{name}.py"))
        assert not is_training_file(Path("test", f"test_{name}.py"))
        assert not is_training_file(Path("test", f"test_{name}", "test_more.py"))
    assert is_training_file(Path("json", "decoder.py"))
    names = {path.stem for path in training_texts()}
    assert names.isdisjoint(demo.HELD_OUT_MODULES)
    assert "argparse" in names


@pytest.mark.slow
@pytest.mark.usefixtures("unfused")
def test_training_makes_a_folder_that_mlx_lm_loads(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    import train

    # Five tokens in turn: a few steps are enough to learn that.
    tokens = np.tile(np.arange(5, dtype=np.uint16), 40)
    np.savez(tmp_path / "tokens.npz", train=tokens, held_out=tokens[:40])
    shipped = (EXAMPLE / "model" / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(shipped)
    command = f"train --tokens {tmp_path / 'tokens.npz'} --out {tmp_path} --steps 8"
    command += " --batch 2 --context 16 --warmup 2 --dropout 0"
    monkeypatch.setattr(sys, "argv", command.split())

    train.main()
    model, _ = mlx_lm.load(str(tmp_path))[:2]

    assert "perplexity" in capsys.readouterr().out
    assert perplexity(model, mx.array([[0, 1, 2, 3, 4] * 4])) < 50  # untrained: 1000
