"""Tokens per second and the first token of models, measured and predicted."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm import generation, measured_models
from mlx_marlin.lm.generation import Decoded, Prompts
from mlx_marlin.lm.race.model_products import single_products
from mlx_marlin.measure.rows import OURS, STOCK_MODEL
from support.choose import Choose
from support.models import Layers, tiny_llama

M3_MAX = Device.named("M3 Max")


def test_both_arms_share_arrays_and_only_ours_is_converted(backend: Choose) -> None:
    backend("emulator")

    arms = generation.models(tiny_llama, "mlx")

    assert [*arms] == [STOCK_MODEL, OURS]
    stock, ours = (dict(tree_flatten(model.parameters())) for model in arms.values())
    assert all(ours[name] is array for name, array in stock.items())
    is_ours = [
        any(isinstance(layer, MarlinLinear) for _, layer in model.named_modules())
        for model in arms.values()
    ]
    assert is_ours == [False, True]


@pytest.mark.usefixtures("stock")
def test_arms_take_turns_and_their_medians_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arms = {STOCK_MODEL: tiny_llama(), OURS: tiny_llama()}
    names = {id(model): name for name, model in arms.items()}
    seen: list[tuple[str, int, int]] = []
    steps = {STOCK_MODEL: 0.02, OURS: 0.01}

    def decode(model: nn.Module, prompts: Prompts, new: int) -> Decoded:
        name = names[id(model)]
        seen.append((name, len(prompts), new))
        return Decoded(
            tokens=[[1] * len(prompts)] * new,
            prompt_seconds=len(seen),
            step_seconds=steps[name],
        )

    monkeypatch.setattr(generation, "decode", decode)

    rows = [*generation.measure("tiny", arms, (1, 4), prompt=5, new=8)]

    assert [(row.streams, row.arm) for row in rows] == [
        (streams, arm) for streams in (1, 4) for arm in arms
    ]
    per_streams = len(arms) * (1 + generation.ROUNDS)
    assert len(seen) == 2 * per_streams
    # The first run of each arm does not count; each round has both arms.
    assert {call[2] for call in seen[:2]} == {generation.WARM}
    for begin in range(2, per_streams, 2):
        assert {call[0] for call in seen[begin : begin + 2]} == {*arms}
    assert [row.generation_rate for row in rows] == [50, 100, 200, 400]
    assert all(row.step.samples == generation.ROUNDS for row in rows)
    assert all(row.step.source == "measured" for row in rows)
    assert rows[0].prompt.seconds in range(3, per_streams + 1)


def test_decoding_gives_the_tokens_asked_for() -> None:
    prompts = generation.random_prompts(3, 5, 100)

    decoded = generation.decode(tiny_llama(), prompts, 6)

    assert [len(step) for step in decoded.tokens] == [3] * 6
    assert prompts == generation.random_prompts(3, 5, 100)
    assert {len(prompt) for prompt in prompts} == {5}
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)
    assert decoded.rate == pytest.approx(3 / decoded.step_seconds)


def test_a_prediction_is_the_sum_of_all_layers() -> None:
    counts, _ = single_products(tiny_llama(tied=False), ["mlx"])
    assert sum(counts.values()) == 7 * 2 + 1  # of two blocks, and the head

    rows = [*generation.predict("tiny", counts, M3_MAX, (2,), prompt=16)]

    (ours,) = rows
    assert ours.arm == OURS
    for rows_of_pass, timing in ((2, ours.step), (32, ours.prompt)):
        problems = [replace(problem, m=rows_of_pass) for problem in counts.elements()]
        plans = [planner.choose(problem, M3_MAX) for problem in problems]
        seconds = sum(planner.predict(plan, M3_MAX).seconds for plan in plans)
        assert timing.seconds == pytest.approx(seconds)
        assert timing.method == "cost model"


@pytest.mark.usefixtures("stock")
def test_the_first_prompt_of_a_process_is_cold_and_the_next_one_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter([3.0, 1.0])
    honest = generation.decode

    def decode(*given: Any) -> Decoded:
        return replace(honest(*given), prompt_seconds=next(seconds))

    monkeypatch.setattr(generation, "decode", decode)

    times = generation.cold_and_warm(tiny_llama, False, None, prompt=5)

    assert times == (3.0, 1.0)


def told_llama() -> nn.Module:
    """Loads a model, and writes to a file what this process does with it."""

    def tell(what: str) -> None:
        with Path(os.environ["TOLD"]).open("a") as file:
            file.write(f"{os.getpid()} {what}\n")

    def decode(*given: Any) -> Decoded:
        tell("decodes")
        return honest(*given)

    tell("loads")
    honest, generation.decode = generation.decode, decode
    return tiny_llama()


@pytest.mark.slow
def test_each_arm_has_a_process_of_its_own_for_the_first_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_MARLIN_BACKEND", "stock")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))

    rows = [*generation.first_tokens("tiny", told_llama, None, prompt=5)]

    assert [row.arm for row in rows] == [STOCK_MODEL, OURS]
    assert all(row.cold.seconds > 0 and row.warm.seconds > 0 for row in rows)
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert [what for _, what in told] == 2 * ["loads", "decodes", "decodes"]
    first, second = (dict.fromkeys(pid for pid, _ in told[i : i + 3]) for i in (0, 3))
    assert len(first) == len(second) == 1
    assert len({*first, *second, str(os.getpid())}) == 3


def test_a_local_model_is_named_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-4B-4bit"
    folder.mkdir()

    assert measured_models.name_of_model(str(folder)) == "Qwen3-4B-4bit"
    assert measured_models.name_of_model("some/model-4bit") == "some/model-4bit"


def test_a_model_without_an_embedding_has_no_vocabulary() -> None:
    with pytest.raises(ValueError, match="no embedding"):
        generation.vocabulary(Layers(nn.Linear(8, 8)))
