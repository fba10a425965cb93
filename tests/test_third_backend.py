"""A third back end, made of NumPy: what `backends.base.Backend` asks for is enough."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin import guard, state
from mlx_marlin.backends import (
    build,
    devices,
    graph,
    planner,
    registry,
    selection,
)
from mlx_marlin.backends.base import Traits
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.source import Source
from mlx_marlin.guard import verdicts
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate, Prediction
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import Tile
from support import oracles

M, N, K = 3, 70, 256


@dataclass(frozen=True)
class Host:
    """The device."""

    name: str = "NumPy"
    variant: str = "NumPy on a CPU"
    figures: str = "1 core"
    arch: str = "host"
    cores: int = 1
    backend: str = "numpy"
    unsupported: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan(Plan):
    """A plan of the only kernel."""

    backend = "numpy"
    simdgroups, threadgroup_bytes, stage_k = 1, 0, 0

    def check(self) -> None:
        self.check_work()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGatherPlan(GatherPlan):
    """A plan of the only kernel for experts' products."""

    backend = "numpy"
    pairs_per_row, rows, columns, threads, threadgroup_bytes = 0, 8, 32, 32, 0
    has_ragged_tiles, by_pair, num_threadgroups = True, False, 1

    def check(self) -> None:
        pass

    def explain(self) -> str:
        return f"{self.problem.m} pairs over {self.experts} experts"


def of_host(name: str, *inputs: str) -> Source:
    names = ("x", "w", "scales", "biases", *inputs, "shape")
    texts = {"header": "", "source": "x @ w.T"}
    return Source(name=name, input_names=names, output_names=("out",), **texts)


class NumPy:
    """Implements `Backend`; what never launches here is left out."""

    name = "numpy"
    traits = Traits(
        device_noun="a CPU",
        default_device=Host(),
        kernels=("dot",),
        plan_type=HostPlan,
        launches=frozenset({HostPlan, HostGatherPlan}),
        keeps_experts_bits=True,
    )

    def __init__(self) -> None:
        self.factor = 1.0
        self.launched: list[Sequence[int]] = []

    def probes(self, plan: HostPlan) -> tuple[()]:
        return ()

    def alternative(self, plan: HostPlan, device: Host) -> None:
        return None

    def unsupported(
        self, problem: Any, device: Host, transpose: bool = True
    ) -> str | None:
        problem = getattr(problem, "problem", problem)
        plain = problem.layout == "mlx" and problem.epilogue == PLAIN and transpose
        known = plain and (problem.mode, problem.bits) == ("affine", 4)
        return None if known else "NumPy takes plain products of affine 4-bit weights"

    def candidates(
        self, problem: Problem, device: Host, overrides: Any
    ) -> Iterator[Candidate]:
        for m in (8, 16):
            tiles = -(-problem.m // m) * -(-problem.n // 32)
            prediction = self.predict(m, device)
            work = data_parallel(tiles, -(-problem.k // 64))
            fields = {"problem": problem, "kernel": "dot", "fragments_m": m // 8}
            plan = HostPlan(**fields, tile=Tile(m=m, k=64), work=work)
            yield Candidate((prediction.seconds,), prediction, plan)

    def predict(self, plan: Any, device: Host) -> Prediction:
        memory = 1e-6 * (plan if isinstance(plan, int) else plan.tile.m)
        loads = {"memory": memory, "issue": 0.0, "loads": 0.0, "dispatch": 0.0}
        return Prediction(**loads, busy=1.0, fill=1.0)

    def choose_gather(self, gather: GatherProblem, device: Host) -> HostGatherPlan:
        return HostGatherPlan(gather=gather, fragments_m=1, simdgroups_k=1)

    def handover(self, problem: Any, device: Host, plan: Any = None) -> str | None:
        many = isinstance(problem, Problem) and problem.m > 64
        return "NumPy is slow with many rows" if many else None

    def system_build(self) -> str:
        return np.__version__

    def launches(self, plan: Any) -> tuple[Launch, ...]:
        template = {"GROUP": plan.problem.group_size}
        if isinstance(plan, HostGatherPlan):
            text = of_host("host_gather", "experts", "sources")
            return (build.gather(plan, text, template),)
        shape = (plan.problem.m, plan.problem.n, plan.problem.k)
        text, integers = of_host("host_dot"), {"shape": shape}
        return (build.product(plan, text, template, integers),)

    def kernel(self, launch: Launch) -> Callable[..., Any]:
        """Returns the kernel: NumPy's product with the decoded weight, or with many."""

        def call(
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
            **_: Any,
        ) -> list[mx.array]:
            x, *weight, shape = inputs
            weight, indices = weight[:3], [np.array(each) for each in weight[3:]]
            self.launched.append(np.array(shape).tolist())
            decoded = partial(oracles.decoded, group_size=dict(template)["GROUP"])
            if indices:  # the expert and the row of each pair
                w = np.stack([decoded(*each) for each in zip(*weight, strict=True)])
                rows = oracles.exact(x).reshape(-1, w.shape[-1])[indices[1]]
                y = self.factor * np.einsum("pk,pnk->pn", rows, w[indices[0]])
            else:
                y = self.factor * oracles.exact(x) @ decoded(*weight).T
            return [mx.array(y).reshape(output_shapes[0]).astype(output_dtypes[0])]

        return call


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[NumPy]:
    """Adds the back end and makes it the one in use, with the guard switched on."""
    state.reset()
    added: Any = NumPy()
    monkeypatch.setitem(registry.MODULES, "numpy", __name__)
    monkeypatch.setitem(registry._loaded, "numpy", added)
    monkeypatch.setattr(selection, "backend", lambda: "numpy")
    monkeypatch.setattr(devices, "current", lambda *_: Host())
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    state.reset()
    yield added
    monkeypatch.undo()
    state.reset()


def operands(bits: int = 4) -> tuple[mx.array, ...]:
    w = mx.random.normal((N, K), key=mx.random.key(1))
    x = mx.random.normal((M, K), key=mx.random.key(2))
    return x, *mx.quantize(w, bits=bits)


def test_the_search_finds_the_best_plan(numpy: NumPy) -> None:
    problem = Problem(m=M, n=N, k=K, dtype="float32")
    choice = planner.compare(problem, device=Host())
    assert [each.plan.tile.m for each in choice.candidates] == [8, 16]
    assert planner.choose(problem, Host()) == choice.plan
    assert "served by our kernels" in choice.explain()


def test_products_are_checked_and_launched(numpy: NumPy) -> None:
    x, w, scales, biases = operands()
    assert mlx_marlin.why_not(x, w, scales, biases) is None
    checked = len(numpy.launched)
    assert checked > 0  # by the guard
    y = mlx_marlin.quantized_matmul(x, w, scales, biases)
    assert numpy.launched[checked:] == [[M, N, K]]
    assert type(graph.plans_built()[-1]) is HostPlan
    expected = oracles.exact(x) @ oracles.decoded(w, scales, biases, group_size=64).T
    assert oracles.error(y, expected) < 1e-5


def gathered(bits: int = 4) -> tuple[mx.array, mx.array]:
    """Returns products of rows with experts, by `gather_qmm` and as they should be."""
    w = mx.random.normal((4, N, K), key=mx.random.key(3))
    x = mx.random.normal((M, 1, 1, K), key=mx.random.key(4))
    chosen = mx.array([[0, 3], [3, 1], [0, 0]], mx.uint32)
    stored, options = mx.quantize(w, bits=bits), {"bits": bits, "rhs_indices": chosen}
    expected = mx.gather_qmm(x, *stored, **options)
    return mlx_marlin.gather_qmm(x, *stored, **options), expected


def test_experts_are_checked_and_launched(numpy: NumPy) -> None:
    y, expected = gathered()
    checked = len(numpy.launched) - 1
    assert checked > 0  # by the guard
    assert numpy.launched[checked:] == [[2 * M, N, K, 0]]
    assert mx.allclose(y, expected, atol=1e-3)
    gathered(bits=8)
    assert len(numpy.launched) == checked + 1  # stock MLX served


def test_wrong_kernels_are_not_used(numpy: NumPy) -> None:
    numpy.factor = 1.01
    with pytest.warns(RuntimeWarning, match="the kernel host_gather failed its check"):
        assert mx.array_equal(*gathered())
    with pytest.warns(RuntimeWarning, match="the kernel host_dot failed its check"):
        assert mlx_marlin.why_not(*operands()) is not None
    y = mlx_marlin.quantized_matmul(*operands())
    assert mx.array_equal(y, mx.quantized_matmul(*operands()))


def test_what_it_lacks_is_told(numpy: NumPy) -> None:
    told = mlx_marlin.why_not(*operands(bits=8), bits=8)
    assert told == "NumPy takes plain products of affine 4-bit weights"
    many = planner.compare(Problem(m=65, n=N, k=K), device=Host())
    assert many.reason == "NumPy is slow with many rows"
