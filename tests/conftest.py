"""Which back end answers in a test, and a stand-in for the kernels."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from mlx_marlin import guard, state, tables, warn_once
from mlx_marlin.backends import devices, graph, measured_results, selection
from mlx_marlin.backends.metal.device import ARCHITECTURE_ENVIRONMENT
from mlx_marlin.guard import checks
from mlx_marlin.lm.tracing import attention
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products.packing import unpack
from mlx_marlin.weights.packed_weight import PackedWeight
from support import cuda_on_cpu, oracles, profiles
from support.choose import Choose

Shape = tuple[int, ...]

profiles.register()

# What somebody has measured here must not decide what a test sees.
os.environ[measured_results.ENVIRONMENT] = "0"
# Nor must the width of the terminal that the tests are run in, nor that of 80 which
# readline writes for the workers of pytest-xdist.
os.environ["COLUMNS"] = str(tables.PIPED)
# Tests of kernels want a fault to raise; those of the guard switch it on.
os.environ[guard.ENVIRONMENT] = "0"
checks.raises_mistakes = True


LONG = ("tests/workflow", "tests/benchmarking", "tests/integrations", "tests/cli")
"""Where files take minutes: at the end, a process would be alone with one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out what the profile does not run, and puts long tests first."""
    left_out = profiles.left_out(items)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """Exempts the 20,000 collected tests from garbage collections, which take 0.4 s."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _warnings_anew() -> None:
    """Gives in each test the warnings that a process gives once."""
    warn_once.forget()


@pytest.fixture(scope="session", autouse=True)
def _stated(record_testsuite_property: Callable[[str, object], None]) -> None:
    """Writes the back end into the report, for those who need Metal to have run."""
    found = selection.missing() or selection.choice()[0]
    record_testsuite_property("backend", found)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Choose]:
    """Returns what sets the back end: "metal", "emulator", "stock", None to choose."""

    def choose(name: str | None) -> None:
        if name is None:
            monkeypatch.delenv(selection.ENVIRONMENT, raising=False)
        else:
            monkeypatch.setenv(selection.ENVIRONMENT, name)
        state.reset()

    state.reset()
    yield choose
    state.reset()


@pytest.fixture
def swap_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Path, Path], None]:
    """Returns what puts a link in a folder's place at the nth check of an owner."""

    def begin(check: int, place: Path, other: Path) -> None:
        calls, user = count(1), os.geteuid()

        def asked() -> int:
            if next(calls) == check:
                with suppress(FileNotFoundError):
                    place.rename(place.with_name("moved"))
                    place.symlink_to(other)
            return user

        monkeypatch.setattr(os, "geteuid", asked)

    return begin


@pytest.fixture
def stock(backend: Choose) -> None:
    """Serves every call by stock MLX."""
    backend("stock")


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has MLX evaluate functions of `mx.compile` operation by operation.

    On a CPU it would compile each by g++, which takes half a second.
    """
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")  # for processes that a test starts
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def chip() -> Iterator[Callable[..., None]]:
    """Returns what sets the chip that plans are made for, and its architecture."""
    with pytest.MonkeyPatch.context() as patch:

        def choose(name: str, architecture: str = "") -> None:
            patch.setenv(devices.ENVIRONMENT, name)
            patch.setenv(ARCHITECTURE_ENVIRONMENT, architecture)
            devices.current.cache_clear()

        yield choose
    devices.current.cache_clear()


@pytest.fixture
def kernels(backend: Choose) -> None:
    """Serves every call that is ours by the kernels, on whatever runs them here."""
    backend(None)
    here = selection.backend()
    if here == "stock":
        pytest.skip("nothing here runs Metal kernels")
    backend(here)  # forced: none is handed over for speed


@pytest.fixture
def on_cpu(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves every call by the CUDA kernels, which run on the emulator."""
    if metal_emulator.unavailable() is not None:
        pytest.skip("the emulator does not run here")
    cuda_on_cpu.serve(monkeypatch)
    backend("cuda")


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Shape, Shape]]:
    """Lists the shapes of q and of all keys where heads attend together."""
    found: list[tuple[Shape, Shape]] = []
    own = attention._grouped

    def listed(queries: mx.array, keys: mx.array, *others: Any) -> mx.array:
        found.append((queries.shape, keys.shape))
        return own(queries, keys, *others)

    monkeypatch.setattr(attention, "_grouped", listed)
    return found


@pytest.fixture
def ran(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Puts NumPy in the kernels' place and lists the plans that it runs.

    It is eager, as the emulator is: MLX sees no connection from its arguments to its
    result, so only what the package defines can carry a gradient.
    """
    plans: list[Plan] = []

    def product(plan: Plan) -> graph.Product:
        def run(
            x: mx.array,
            w: mx.array,
            scales: mx.array,
            biases: mx.array,
            *finish: mx.array,
        ) -> mx.array:
            _check(plan, x, w, scales, biases)
            plans.append(plan)
            problem = plan.problem
            native = (w, scales, biases)
            if problem.layout == "marlin":
                native = unpack(
                    PackedWeight(
                        words=w,
                        scales=scales,
                        n=problem.n,
                        k=problem.k,
                        group_size=problem.group_size,
                    )
                )
            rows = x.reshape(-1, problem.k) if problem.batch == 1 else x
            y = oracles.product(rows, *native, group_size=problem.group_size)
            if problem.epilogue != PLAIN:  # the layers' own; no others come here
                assert problem.epilogue == Epilogue(bias=True)
                y = y + oracles.exact(finish[0])
            y = y.reshape(*x.shape[:-1], problem.n)
            return mx.array(y.astype("float32")).astype(x.dtype)

        return run

    backend("emulator")
    monkeypatch.setattr(graph, "product", product)
    return plans


@pytest.fixture(params=["stock", "ran"])
def served_by(request: pytest.FixtureRequest) -> str:
    """Serves every call by stock MLX, then by the kernels' stand-in."""
    request.getfixturevalue(request.param)
    return str(request.param)


def _check(
    plan: Plan, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array
) -> None:
    """Checks that arguments are what `graph.product` asks for."""
    problem = plan.problem
    several = (problem.batch,) if problem.batch > 1 else ()
    if several:
        assert x.shape == (*several, problem.m, problem.k)
    assert x.size == problem.batch * problem.m * problem.k
    assert x.shape[-1] == problem.k
    assert x.dtype == getattr(mx, problem.dtype)
    assert w.dtype == mx.uint32
    assert scales.dtype == biases.dtype == getattr(mx, problem.scale_dtype)
    if problem.layout == "mlx":
        assert w.shape == (*several, problem.n, problem.k // 8)
        assert scales.shape == (*several, problem.n, problem.groups)
        assert biases.shape == scales.shape
