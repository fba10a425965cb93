"""What is installed with the package is what the tests run with."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_marlin.integrations.mlx_lm.versions import TESTED, describe

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = [
    *PROJECT["project"]["dependencies"],
    *(
        each
        for extra in PROJECT["project"]["optional-dependencies"].values()
        for each in extra
    ),
]


@pytest.mark.parametrize("distribution", TESTED)
def test_the_installed_version_is_tested(distribution: str) -> None:
    assert version(distribution) == TESTED[distribution][-1]


@pytest.mark.parametrize("distribution", TESTED)
def test_the_lower_bound_is_a_tested_version(distribution: str) -> None:
    pattern = re.compile(rf"{distribution}(?:\[\w+\])?>=([\d.]+)")
    bounds = [found[1] for each in REQUIREMENTS if (found := pattern.fullmatch(each))]

    assert bounds
    assert {*bounds} == {TESTED[distribution][-1]}


def test_the_readme_names_the_tested_versions() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    mlx, mlx_lm = TESTED["mlx"], TESTED["mlx-lm"]

    assert (
        f"Tested with MLX {' and '.join(mlx)} and mlx-lm {' and '.join(mlx_lm)}."
        in readme
    )


def test_a_description_names_the_installed_and_the_tested_versions() -> None:
    installed = version("mlx-lm")

    assert describe("mlx-lm") == (
        f"mlx-lm {installed} is installed, tested: {' and '.join(TESTED['mlx-lm'])}"
    )
