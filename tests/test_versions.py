"""What is installed with the package is what the tests run with."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_marlin.versions import TESTED, describe, installed

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
def test_the_lower_bound_is_installed_and_tested(distribution: str) -> None:
    pattern = re.compile(rf"{distribution}(?:\[\w+\])?>=([\d.]+)")
    bounds = {found[1] for each in REQUIREMENTS if (found := pattern.fullmatch(each))}

    assert bounds == {TESTED[distribution][-1]} == {version(distribution)}


@pytest.mark.parametrize("page", ["README.md", "docs/installation.md"])
def test_pages_name_the_tested_versions_and_the_minimum(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    mlx, (*others, mlx_lm) = TESTED["mlx"][-1], TESTED["mlx-lm"]

    assert (
        f"Tested with MLX {mlx} and mlx-lm {mlx_lm}, which are the minimum; `optimize` "
        f"also with mlx-lm {' and '.join(others)}, which the extra `lm` does not"
    ) in text


def test_a_description_names_the_installed_and_the_tested_versions() -> None:
    known = version("mlx-lm")

    assert describe("mlx-lm") == (
        f"mlx-lm {known} is installed, tested: {' and '.join(TESTED['mlx-lm'])}"
    )


def test_a_missing_package_has_no_version() -> None:
    assert installed("no-such-package") is None
    assert describe("no-such-package") == (
        "no-such-package of unknown version is installed, tested: none"
    )


def test_one_function_reads_the_versions_of_packages() -> None:
    package = ROOT / "mlx_marlin"
    readers = [
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if "importlib" in (text := file.read_text(encoding="utf-8"))
        and "metadata" in text
    ]
    assert readers == ["versions.py"]
