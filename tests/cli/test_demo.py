"""The demo and its model: generation and perplexity are right, a wrong answer fails."""

import math
import re
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_marlin
from cli.conftest import Run
from mlx_marlin.backends import selection
from mlx_marlin.cli import demo
from mlx_marlin.cli.demo import Generation, generate
from mlx_marlin.cli.main import main
from mlx_marlin.lm.verification.inputs import ROWS, passes, perplexity, read
from support.choose import Choose
from support.profiles import sampled

ROOT = Path(__file__).parents[2]
SHORT = "demo --batch 2 --tokens 3"


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(demo.checkpoint()))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


@sampled(1, 3)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_generated_token_is_the_best_of_one_pass_over_the_text(
    loaded: tuple[Any, Any], batch: int
) -> None:
    model, tokenizer = loaded
    prompts = demo.prompt_tokens(tokenizer, batch)
    result = generate(model, prompts, 4)

    text = mx.concatenate([prompts, mx.array(result.tokens)], axis=1)
    logits = model(text)[:, prompts.shape[1] - 1 : -1]
    assert result.tokens == logits.argmax(axis=-1).tolist()
    first, second = mx.moveaxis(-mx.sort(-logits, axis=-1)[..., :2], -1, 0)
    assert mx.allclose(mx.array(result.leads), first - second, atol=1e-3)


def test_perplexity_is_that_of_one_pass_over_each_window(
    loaded: tuple[Any, Any],
) -> None:
    model, tokenizer = loaded
    text = demo.held_out_tokens(tokenizer, windows=3, length=50)

    measured = perplexity(model, text)

    loss = nn.losses.cross_entropy(model(text[:, :-1]), text[:, 1:], reduction="mean")
    assert measured == pytest.approx(math.exp(loss.item()), rel=1e-4)


def test_prompts_have_one_length_and_end_as_they_are_written(
    loaded: tuple[Any, Any],
) -> None:
    _, tokenizer = loaded

    rows = demo.prompt_tokens(tokenizer, len(demo.PROMPTS) + 1).tolist()

    assert len({len(row) for row in rows}) == 1
    for row, prompt in zip(rows, [*demo.PROMPTS, demo.PROMPTS[0]], strict=True):
        assert tokenizer.decode(row).lstrip("\n") == prompt


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))),
    st.lists(st.integers(0, 3)),
)
def test_texts_part_at_the_first_token_that_differs(
    pairs: list[tuple[int, int]], same: list[int]
) -> None:
    both = [(token, token) for token in same] + pairs
    ours, stock = [pair[0] for pair in both], [pair[1] for pair in both]

    sure = [10.0 + index for index in range(len(both))]
    written = Generation(tokens=[ours], leads=[sure], step_ms=1)
    found = demo.wrong_texts(
        written, Generation(tokens=[stock], leads=[sure], step_ms=1)
    )

    if not found:
        assert ours == stock
    else:
        (part,) = map(int, re.findall(r"parts at token (\d+),", *found))
        assert f"by {9 + part} in the logits" in found[0]
        assert ours[: part - 1] == stock[: part - 1]
        assert ours[part - 1] != stock[part - 1]


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize(
    ("ours", "wrong"), [(8.0, 0), (8.03, 0), (8.05, 1), (7.95, 1), (math.nan, 1)]
)
def test_a_perplexity_half_a_percent_off_is_wrong(ours: float, wrong: int) -> None:
    assert len(demo.wrong_results(ours, 8.0)) == wrong


@pytest.mark.parametrize(
    ("ours", "lead", "wrong"),
    [([1, 2, 3], 9.0, 0), ([1, 5, 3], 0.4, 0), ([1, 5, 3], 0.6, 1), ([4, 2, 3], 9, 0)],
)
def test_a_text_that_parts_where_stock_is_sure_is_wrong(
    ours: list[int], lead: float, wrong: int
) -> None:
    stock = Generation(tokens=[[1, 2, 3]], leads=[[0.1, lead, 9.0]], step_ms=1.0)
    written = Generation(tokens=[ours], leads=[[1.0] * 3], step_ms=1.0)

    assert len(demo.wrong_texts(written, stock)) == wrong


def test_stock_mlx_in_our_place_is_wrong_unless_asked_for(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend(None)
    with monkeypatch.context() as patch:
        patch.setattr(selection, "backend", lambda: "stock")
        assert demo.wrong_results(8.0, 8.0)

    backend("stock")
    assert not demo.wrong_results(8.0, 8.0)


def read_text(monkeypatch: pytest.MonkeyPatch, windows: int) -> None:
    """Makes the demo read so many windows of the held-out text."""
    fewer = partial(demo.held_out_tokens, windows=windows)
    monkeypatch.setattr(demo, "held_out_tokens", fewer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "windows"),
    [
        ("mlx", 1),
        ("marlin", demo.WINDOWS),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_the_demo_succeeds_through_our_kernels_and_ends_with_its_result(
    layout: str, windows: int, monkeypatch: pytest.MonkeyPatch, printed: Run
) -> None:
    read_text(monkeypatch, windows)

    output = printed(f"{SHORT} --layout {layout} --plans")

    *others, last = output.splitlines()
    assert re.fullmatch(
        r"result: passed: 2 of 2 texts equal stock MLX's, "
        r"\d+ plans \(--plans lists them\)",
        last,
    )
    assert any("gemm_register" in line for line in others)
    assert demo.BACKENDS[selection.backend()] in output
    if windows == 1:
        assert "gemm_register" not in printed(f"{SHORT} --layout {layout}")


def test_a_wrong_weight_fails_the_demo(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damage(model: Any, **_: object) -> Any:
        layer = model.layers[2].mlp.down_proj
        layer.scales = layer.scales[::-1]
        return model

    backend("stock")
    monkeypatch.setattr(mlx_marlin, "optimize", damage)
    read_text(monkeypatch, windows=1)

    assert main([*SHORT.split(), "--dtype", "float32"]) == 1
    output, errors = capsys.readouterr()
    assert "our perplexity" in errors
    assert "result: FAILED" in output


def test_a_missing_checkpoint_is_said_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "MODEL_FOLDERS", (tmp_path / "nowhere",))

    with pytest.raises(ValueError, match="--model"):
        demo.checkpoint()


def test_the_wheel_has_the_model_where_the_demo_looks_for_it() -> None:
    installed, checkout = demo.MODEL_FOLDERS
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wheel = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["wheel"]

    target = wheel["force-include"][checkout.relative_to(ROOT).as_posix()]

    assert ROOT / target == installed


def test_a_text_is_read_in_passes_of_few_rows() -> None:
    for batch, length in ((1, 150), (4, 33), (5, 13), (80, 2)):
        tokens, seen = mx.zeros((batch, length), mx.int32), []
        for part in read(lambda part, cache: part, tokens, [], lambda: None):
            seen.append(part.size)
        assert sum(seen) == tokens.size
        assert max(seen) <= max(batch, ROWS)
        assert len(seen) == passes(tokens)


EXAMPLE = ROOT / "examples" / "tiny_llama"
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
