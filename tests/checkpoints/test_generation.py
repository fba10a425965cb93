"""The demo's model, stored in each format, writes what its weights say in float64."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from mlx_lm.models.cache import make_prompt_cache

from mlx_marlin.backends import graph
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.lm.checkpoints.loading import load_model
from support import float64_llama
from support import foreign_checkpoints as foreign
from support.gguf_models import write_llama
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels")

DEMO = Path(__file__).parents[2] / "examples/tiny_llama/model"
CONFIG = json.loads((DEMO / "config.json").read_text())
PROMPT = np.array([5, 300, 12, 77, 410, 9])
COUNT = 6
TIE = 0.05
"""Two logits that differ by less may change places: those of float16 are off by some
hundredths."""


def plain_weights() -> dict[str, np.ndarray]:
    loaded = mx.load(str(DEMO / "model.safetensors"))
    return {name: np.array(array, np.float64) for name, array in loaded.items()}


def gptq(version: int) -> Callable[..., dict]:
    return partial(foreign.gptq_arrays, version=version)


def rounded(
    w: np.ndarray, bits: int = 4, *, symmetric: bool = False, act_order: bool = False
) -> foreign.IntegerWeight:
    """Rounds a weight to nearest, in groups of 64, perhaps of columns in any order."""
    n, k = w.shape
    columns = np.arange(k, dtype=np.int32) // 64
    if act_order:
        columns = np.random.default_rng(0).permutation(columns)
    order = np.argsort(columns, kind="stable")
    groups = w[:, order].reshape(n, -1, 64)
    most, zero = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = np.abs(groups).max(-1) / (zero - 1)
        zeros = np.full(scales.shape, zero)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / most
        zeros = np.clip(np.rint(-low / scales), 1, most).astype(int)
    scales = scales.astype(np.float16)
    wide = scales.astype(np.float64)[..., None]
    codes = np.clip(np.rint(groups / wide) + zeros[..., None], 0, most).astype(int)
    back = np.empty((n, k), int)
    back[:, order] = codes.reshape(n, k)
    return foreign.IntegerWeight(back, scales, zeros, bits, columns)


FORMATS = {
    "gptq version 1": (gptq(1), foreign.gptq_config(4, 1), {}),
    "gptq 8 bits": (gptq(2), foreign.gptq_config(8, 2), {"bits": 8, "symmetric": True}),
    "gptq act-order": (gptq(2), foreign.gptq_config(4, 2), {"act_order": True}),
    "awq": (foreign.awq_arrays, foreign.awq_config(), {}),
    "compressed-tensors": (
        partial(foreign.compressed_arrays, symmetric=False),
        foreign.compressed_config(5),
        {"bits": 5},
    ),
}


def written(path: Path, name: str) -> dict[str, np.ndarray]:
    """Writes the demo's model in a format; returns its weights, dequantized."""
    arrays, settings, options = FORMATS[name]
    stored, exact = {}, {}
    for parameter, w in plain_weights().items():
        if "_proj" in parameter:
            weight = rounded(w, **options)
            stored |= arrays(parameter.removesuffix(".weight"), weight)
            exact[parameter] = weight.values
        else:
            stored[parameter], exact[parameter] = w.astype(np.float16), w
    foreign.Folder(settings | CONFIG, stored).write(path)
    return exact


GGUF_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Those whose blocks of 32 fit 320 columns, of those that the package can write."""


def written_gguf(path: Path, type_name: str) -> dict[str, np.ndarray]:
    """Writes the demo's model with the `gguf` package; returns its weights."""
    weights = {}
    for name, w in plain_weights().items():
        numbers = w.astype(np.float32)
        if "_proj" in name:
            blocks = quants.quantize(numbers, GGMLQuantizationType[type_name])
            weights[name] = type_name, blocks
        else:
            weights[name] = "F32", numbers
    return write_llama(path, CONFIG, weights)


def write(folder: Path, name: str) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes the demo's model; returns where it is, and its weights."""
    if name in GGUF_TYPES:
        return folder / "model.gguf", written_gguf(folder / "model.gguf", name)
    return folder, written(folder, name)


def generated(model: Any, count: int = COUNT) -> list[int]:
    cache = make_prompt_cache(model)
    tokens, given = [], mx.array(PROMPT)[None]
    for _ in range(count):
        best = int(model(given, cache=cache)[0, -1].argmax().item())
        tokens.append(best)
        given = mx.array([[best]])
    return tokens


def check_tokens(tokens: list[int], exact: dict[str, np.ndarray]) -> None:
    """Each token is the best in float64 after those before it, up to ties."""
    sequence = np.array([*PROMPT, *tokens])
    logits = float64_llama.logits(CONFIG, exact, sequence)[len(PROMPT) - 1 : -1]
    best = logits.max(-1)
    behind = best - logits[np.arange(len(tokens)), tokens]
    ties = [(i, float(lead)) for i, lead in enumerate(behind) if lead > 0]
    assert all(lead < TIE for _, lead in ties), ties
    assert len(ties) <= 1, ties


@sampled(2)
@pytest.mark.parametrize("name", [*FORMATS, *GGUF_TYPES])
def test_a_model_writes_what_its_weights_say(tmp_path: Path, name: str) -> None:
    path, exact = write(tmp_path, name)
    check_tokens(generated(load_model(open_source(path))), exact)


@sampled(3, 10)
@pytest.mark.parametrize("served", ["stock", "on_cpu"])
@pytest.mark.parametrize("name", [*FORMATS, *GGUF_TYPES])
def test_other_back_ends_write_it_too(
    tmp_path: Path, request: pytest.FixtureRequest, served: str, name: str
) -> None:
    request.getfixturevalue(served)
    path, exact = write(tmp_path, name)
    check_tokens(generated(load_model(open_source(path)), 3), exact)
    # Layers in a format of MLX's are MLX's own until they are optimized.
    is_of_mlx = name in ("Q4_1", "Q5_1")
    assert bool(graph.plans_built()) is (served != "stock" and not is_of_mlx)


def test_another_weight_writes_something_else(tmp_path: Path) -> None:
    exact = written(tmp_path, "awq")
    tokens = generated(load_model(open_source(tmp_path)))
    exact["model.layers.2.mlp.down_proj.weight"] *= -1
    with pytest.raises(AssertionError):
        check_tokens(tokens, exact)
