"""Who serves the calls of products, and the graphs that they make."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.products import dispatch
from support.choose import Choose


@pytest.fixture(params=["kernels", "stock"])
def served(request: pytest.FixtureRequest, backend: Choose) -> str:
    """Serves every call by the kernels, then by stock MLX."""
    if request.param == "stock":
        backend("stock")
    else:
        request.getfixturevalue("kernels")
    return str(request.param)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Returns what lists the operations in a function's graph."""
    # MLX cannot export a function with derivatives of its own.
    monkeypatch.setattr(dispatch, "differentiable", lambda ours, *_: ours)

    def record(function: Callable[..., Any], *arrays: mx.array) -> list[str]:
        nodes: list[dict[str, Any]] = []
        mx.export_function(nodes.append, function, *arrays)
        return [node["name"] for node in nodes if node["type"] == "primitive"]

    return record
