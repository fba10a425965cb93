"""Threads that convert the same model leave it whole, and its arrays to everybody."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin.lm import optimize
from mlx_marlin.lm.module_tree import Changes
from support.choose import Choose
from support.models import arrays, assert_converted, assert_same_model, tiny_llama

THREADS = 4
OPTIONS: list[dict[str, Any]] = [
    {"layout": "marlin"},
    {"layout": "marlin", "join": True, "compute": "float16"},
    {"layout": "mlx", "join": True, "trace": True},
]


@pytest.fixture(autouse=True)
def _often(backend: Choose) -> Iterator[None]:
    """Lets threads take turns often."""
    backend("stock")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(change: Callable[[nn.Module], Any], model: nn.Module) -> list[str]:
    """Lets several threads change a model at once, and returns their errors."""
    errors = []
    together = threading.Barrier(THREADS)

    def run() -> None:
        together.wait()
        try:
            change(model)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("options", OPTIONS)
def test_several_threads_optimize_and_restore_a_model(options: dict[str, Any]) -> None:
    model, expected = tiny_llama(), tiny_llama()
    for each in (model, expected) if "compute" in options else ():
        each.set_dtype(mx.bfloat16)
        mx.eval(arrays(each))

    assert in_threads(partial(mlx_marlin.optimize, **options), model) == []

    mx.eval(arrays(model))
    assert_converted(model, options)
    assert in_threads(mlx_marlin.restore, model) == []
    mx.eval(arrays(model))
    assert_same_model(model, expected)


@pytest.mark.parametrize("first", [{"layout": "marlin"}, {"join": True}])
def test_what_a_thread_undoes_can_be_evaluated_in_another(
    first: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("planted")

    model = mlx_marlin.optimize(tiny_llama(), **first)
    monkeypatch.setattr(optimize, "drop_float16_record", fail)

    errors = in_threads(mlx_marlin.restore, model)

    assert errors == ["ValueError: planted"] * THREADS
    mx.eval(arrays(model))
    assert_converted(model, first)


def test_a_change_that_cannot_be_undone_leaves_no_other() -> None:
    undone = []
    changes = Changes()
    changes.record(partial(undone.append, 1))
    changes.record(partial(int, "nothing"))
    changes.record(partial(undone.append, 3))

    with pytest.raises(ValueError, match="nothing"):
        changes.undo()

    assert undone == [3, 1]
