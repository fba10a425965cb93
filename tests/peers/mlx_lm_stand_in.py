"""A pytest plugin for mlx-lm's own tests: a small model in place of the one on the hub.

It writes the outcome of each test to the file that `MLX_LM_OUTCOMES` names. If
`MLX_LM_AUTO` is set, it imports `mlx_marlin.auto` first, and counts the layers of the
models that are loaded.
"""

import inspect
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import utils

HUB_MODEL = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
"""The model that mlx-lm's tests load."""
outcomes: dict[str, str] = {}
layers: Counter[str] = Counter()


def _snapshot(name: str, **_: Any) -> str:
    if name == HUB_MODEL:
        return os.environ["MLX_LM_MODEL"]
    raise OSError(f"not downloaded in these tests: {name}")


def _count_layers() -> None:
    import mlx_marlin.auto  # noqa: F401
    from mlx_marlin.lm import auto as hook

    convert = hook._convert

    def counted(result: Any, *given: Any) -> None:
        convert(result, *given)
        model = result[0] if isinstance(result, tuple) else result
        layers.update(type(each).__name__ for each in model.modules())

    hook._convert = counted


utils.snapshot_download = _snapshot
utils.create_model_card = lambda *_: None  # it is on the hub
if os.environ.get("MLX_LM_AUTO"):
    _count_layers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the tests of models that have nothing to do with quantized layers."""
    items[:] = [
        item
        for item in items
        if item.path.name != "test_models.py" or "quant" in inspect.getsource(item.obj)  # type: ignore[attr-defined]
    ]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the outcome of a test; an error of its set-up or tear-down wins."""
    if report.when == "call" or report.outcome != "passed":
        name = report.nodeid.rpartition("/")[2]
        if outcomes.get(name, "passed") == "passed":
            outcomes[name] = report.outcome


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Keeps a file that cannot be imported."""
    if report.failed:
        outcomes[report.nodeid] = f"not collected: {report.longrepr}"


def pytest_sessionfinish() -> None:
    """Writes what was kept."""
    file = Path(os.environ["MLX_LM_OUTCOMES"])
    file.write_text(json.dumps({"outcomes": outcomes, "layers": layers}))
