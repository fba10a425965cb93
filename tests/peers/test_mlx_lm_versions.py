"""`optimize` with the versions of mlx-lm that `versions.TESTED` lists."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_marlin.versions import TESTED

pytestmark = pytest.mark.peer

SCRIPT = Path(__file__).with_name("mlx_lm_generation.py")
OTHERS = [each for each in TESTED["mlx-lm"] if each != version("mlx-lm")]


@pytest.fixture(scope="module", params=OTHERS)
def other_version(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Another version of mlx-lm, and a folder that has it."""
    folder = tmp_path_factory.mktemp("mlx_lm")
    wanted = f"mlx-lm=={request.param}"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
    done = subprocess.run(
        (*pip, "--target", str(folder), wanted), capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {wanted}: {done.stderr.strip()[-300:]}")
    return request.param, folder


def test_another_version_is_listed() -> None:
    assert OTHERS


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_a_model_of_another_version_is_optimized_and_restored(
    other_version: tuple[str, Path], family: str
) -> None:
    number, folder = other_version
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MLX_MARLIN_BACKEND": "stock",
    }
    script = (sys.executable, "-W", "error:mlx_marlin", str(SCRIPT), family, number)
    done = subprocess.run(script, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{number}: traced, same tokens, restored"
