"""mlx-lm's own tests of quantized layers pass with `mlx_marlin.auto` as without."""

import json
import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from peers import downloads
from support import hub_model

pytestmark = pytest.mark.peer

QUANTIZED = (
    *("awq", "chat", "finetune", "generate", "gptq", "models", "prompt_cache"),
    *("server", "tuner_trainer", "tuner_utils", "utils"),
)
"""Tests of quantized layers, or of a model that is loaded; of `models` only those that
quantize something."""
OTHERS = {
    "datsets": "tokenizers of the hub",
    "deepseek_v41": "no quantized layers, no model is loaded",
    "evaluate": "no quantized layers, no model is loaded",
    "gated_delta": "kernels of mlx-lm, which need Metal",
    "gguf": "a writer of GGUF files",
    "kernels": "kernels of mlx-lm, which need Metal",
    "losses": "kernels of mlx-lm, which need Metal",
    "muse_spark": "no quantized layers, no model is loaded",
    "muse_spark_inputs": "no quantized layers, no model is loaded",
    "sample_utils": "no model",
    "tokenizers": "tokenizers of the hub",
    "tool_parsing": "no model",
}
"""The other files of mlx-lm's tests, with the reason why they are not run."""
_GENERATE = "test_generate.py::TestGenerate::test_stream_generate_input_embeddings"
FAIL_WITHOUT_THE_HUB = {
    _GENERATE: "expects the answer of the model on the hub",
    f"{_GENERATE}_prefill": "expects the answer of the model on the hub",
    "test_server.py::TestServer::test_handle_models": "lists the cache of the hub",
}
"""Tests that fail here without `mlx_marlin.auto` too, with the reason."""
FAIL_WITHOUT_METAL = {
    "test_models.py::TestModels::test_switch_linear_global_scale": (
        "MLX has global scales of experts on a GPU only"
    )
}
"""The same on a machine without Metal."""
OPTIONS = ["", "layout=marlin,join=true,trace=true"]


@pytest.fixture(scope="module")
def tests_of_mlx_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tests in the source distribution of the installed version."""
    folder = tmp_path_factory.mktemp("source")
    wanted, options = f"mlx-lm=={version('mlx-lm')}", ("--no-binary", ":all:")
    archive = downloads.archive(wanted, options, folder, "*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    (tests,) = folder.glob("*/tests")
    return tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_model.write(tmp_path_factory.mktemp("hub") / "model")


def run(tests: Path, model: Path, folder: Path, **environment: str) -> dict[str, Any]:
    """Runs the tests in a process of their own, and returns what the plugin kept."""
    kept = folder / "outcomes.json"
    # Importing it would change mlx-lm in this process.
    plugin = Path(__file__).with_name("mlx_lm_stand_in.py")
    paths = [str(plugin.parent), os.environ.get("PYTHONPATH", "")]
    files = [f"test_{name}.py" for name in QUANTIZED]
    # `-c` keeps pytest from the settings of this project.
    options = ("-q", "-c", os.devnull, "-p", plugin.stem, "-p", "no:cacheprovider")
    done = subprocess.run(
        (sys.executable, "-m", "pytest", *options, "--rootdir", str(tests), *files),
        cwd=tests,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(folder / "no-cache"),
            "MLX_LM_MODEL": str(model),
            "MLX_LM_OUTCOMES": str(kept),
        }
        | environment,
        capture_output=True,
        text=True,
    )
    assert kept.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


@pytest.fixture(scope="module")
def without(
    tests_of_mlx_lm: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The outcomes of mlx-lm alone."""
    found = run(tests_of_mlx_lm, model, tmp_path_factory.mktemp("without"))
    assert not found["layers"]
    outcomes: dict[str, str] = found["outcomes"]
    return outcomes


def test_every_file_is_run_or_listed_with_the_reason(tests_of_mlx_lm: Path) -> None:
    names = {file.stem.removeprefix("test_") for file in tests_of_mlx_lm.glob("test_*")}

    assert {*QUANTIZED} | OTHERS.keys() == names


def test_mlx_lm_alone_fails_only_what_is_listed(without: dict[str, str]) -> None:
    failed = {name for name, outcome in without.items() if outcome != "passed"}

    needs_metal = {} if mx.metal.is_available() else FAIL_WITHOUT_METAL
    assert failed == {*FAIL_WITHOUT_THE_HUB, *needs_metal}
    assert len(without) > 150


@pytest.mark.parametrize("options", OPTIONS)
def test_the_outcomes_are_the_same_with_auto(
    tests_of_mlx_lm: Path,
    model: Path,
    without: dict[str, str],
    options: str,
    tmp_path: Path,
) -> None:
    backend = "stock" if metal_emulator.unavailable() else "emulator"
    settings = {"MLX_MARLIN_BACKEND": backend, "MLX_MARLIN_OPTIONS": options}

    found = run(tests_of_mlx_lm, model, tmp_path, MLX_LM_AUTO="1", **settings)

    assert found["outcomes"] == without
    layers = found["layers"]
    assert layers["MarlinLinear"] + layers.get("MarlinPart", 0) > 100, layers
    assert ("MarlinPart" in layers) == ("join" in options)
    assert any("Traced" in name for name in layers) == ("trace" in options)
