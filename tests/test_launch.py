"""MLX records the dispatches that a plan states; one seam picks who runs them."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import pytest
import strategies
from hypothesis import given, settings

import mlx_marlin
from mlx_marlin import emulator, launch, layout, scheduler, serving, source
from mlx_marlin.packing import pack
from mlx_marlin.plan import Plan
from mlx_marlin.problem import Problem

Choose = Callable[[str | None], None]


@dataclass(frozen=True, slots=True)
class Node:
    """A kernel call in a graph that MLX recorded."""

    name: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    inputs: list[tuple[str, tuple[int, ...], mx.Dtype]]
    outputs: list[tuple[str, tuple[int, ...], mx.Dtype]]


def kernel_calls(plan: Plan) -> list[Node]:
    """Returns the kernel calls of a plan's graph; MLX records without running it."""
    nodes: list[Node] = []

    def collect(record: dict[str, Any]) -> None:
        if record.get("name") == "CustomKernel":
            name, text, *sizes = record["arguments"][:8]
            nodes.append(
                Node(
                    name,
                    text,
                    tuple(sizes[:3]),
                    tuple(sizes[3:]),
                    record["inputs"],
                    record["outputs"],
                )
            )

    mx.export_function(collect, launch.product(plan), *blanks(plan.problem))
    return nodes


def blanks(problem: Problem) -> list[mx.array]:
    """Makes arguments of a product, never evaluated."""
    dtype, scale_dtype = getattr(mx, problem.dtype), getattr(mx, problem.scale_dtype)
    words: tuple[int, ...] = (problem.n, problem.k // 8)
    scales: tuple[int, ...] = (problem.n, problem.groups)
    if problem.layout == "marlin":
        n, k = layout.padded(problem.n, problem.k)
        words = (n // 32, k // 64, 256)
        scales = (n // 32, -(-k // problem.group_size), 64)
    return [
        mx.zeros((problem.m, problem.k), dtype),
        mx.zeros(words, mx.uint32),
        mx.zeros(scales, scale_dtype),
        mx.zeros(scales, scale_dtype),
    ]


def arguments_of(node: Node) -> list[str]:
    """Returns the parameters of the Metal function that MLX wrote."""
    function = re.search(r"\[\[kernel\]\] void \w+\((.*?)\) \{", node.text, re.DOTALL)
    assert function is not None
    return [each.strip() for each in function[1].split(",\n")]


@pytest.fixture(scope="module")
def _metal() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(launch.ENVIRONMENT, "metal")
        serving.forget()
        yield
    serving.forget()


PLANS = strategies.plans(of=strategies.problems(max_k=1024))


@pytest.mark.usefixtures("_metal")
@given(plan=PLANS)
@settings(max_examples=60)
def test_a_plan_is_one_kernel_call_and_two_if_it_splits(plan: Plan) -> None:
    problem = plan.problem

    calls = kernel_calls(plan)

    assert len(calls) == plan.dispatches == (2 if plan.k_parallel > 1 else 1)
    first, last = calls[0], calls[-1]
    result = ((problem.m, problem.n), getattr(mx, problem.dtype))
    assert [each[1:] for each in last.outputs] == [result]
    assert first.grid == (plan.num_threadgroups * plan.threads, 1, 1)
    assert first.threadgroup == (plan.threads, 1, 1)
    if plan.is_split:
        workspace = ((plan.k_parallel, problem.m, problem.n), mx.float32)
        assert [each[1:] for each in first.outputs] == [workspace]
        assert last.inputs[0] == first.outputs[0]
        assert last.grid == (problem.m * problem.n, 1, 1)
        assert prod(last.threadgroup) <= 256


@pytest.mark.usefixtures("_metal")
@given(plan=PLANS)
@settings(max_examples=60)
def test_only_params_arrive_as_constants(plan: Plan) -> None:
    first = kernel_calls(plan)[0]

    spaces = {
        each.split("* ")[-1].split()[0]: "constant" if "constant" in each else "device"
        for each in arguments_of(first)
        if "[[buffer" in each
    }

    assert spaces == {
        "x": "device",
        "w": "device",
        "scales": "device",
        "biases": "device",
        "params": "constant",
        "out": "device",
    }
    assert not re.search(r"_(shape|strides|ndim)\b", "".join(arguments_of(first)))


@pytest.mark.usefixtures("_metal")
@given(plan=PLANS)
@settings(max_examples=60)
def test_the_template_arguments_are_the_plans(plan: Plan) -> None:
    calls = kernel_calls(plan)

    values = [int(value) for value in source.product_template(plan).values()]
    instance = re.search(r"decltype\(\w+<(.*?)>\)", calls[0].text)
    assert instance is not None
    assert instance[1] == ", ".join(map(str, values))
    declared = re.search(r"template <([^>]*)>\n\[\[kernel\]\]", calls[0].text)
    assert declared is not None
    names = [each.split()[-1] for each in declared[1].split(", ")]
    assert names == [*source.product_template(plan)]
    if plan.is_split:
        metal = {"float16": "float16_t", "bfloat16": "bfloat16_t", "float32": "float"}
        assert f"<{metal[plan.problem.dtype]}>)" in calls[1].text


class Recorder:
    """Stands for `mx.fast.metal_kernel`."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> Callable[..., list[mx.array]]:
        self.built.append(options)

        def kernel(**call: Any) -> list[mx.array]:
            self.called.append(call)
            return [mx.zeros(call["output_shapes"][0], call["output_dtypes"][0])]

        return kernel


def test_metals_factory_is_looked_up_when_a_kernel_is_first_built(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("metal")
    recorder = Recorder()
    monkeypatch.setattr(mx.fast, "metal_kernel", recorder)
    problem = Problem(m=9, n=40, k=512)
    split = scheduler.make(problem, k_parallel=2)
    whole = scheduler.make(problem, k_parallel=1)

    for plan in (split, whole, split):
        y = launch.product(plan)(*blanks(problem))
        assert (y.shape, y.dtype) == ((9, 40), mx.float16)

    names = [each["name"] for each in recorder.built]
    assert names == ["marlin_gemm_register", "marlin_reduce"]
    assert len(recorder.called) == 5
    assert {"header", "source", "input_names", "output_names"} < {*recorder.built[0]}
    serving.forget()
    launch.product(whole)
    assert len(recorder.built) == 3


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_a_call_of_the_face_adds_the_plans_kernel_calls_and_no_other(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    backend("metal")
    recorder = Recorder()
    monkeypatch.setattr(mx.fast, "metal_kernel", recorder)
    x, native = strategies.arrays(Problem(m=9, n=64, k=4096), seed=0)
    weights = native if layout == "mlx" else (pack(*native),)

    y = mlx_marlin.quantized_matmul(x.reshape(3, 3, 4096), *weights)

    assert y.shape == (3, 3, 64)
    (plan,) = launch.plans_built()
    assert plan.problem.layout == layout
    assert len(recorder.called) == plan.dispatches


def test_the_emulators_factory_takes_the_same_calls(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("emulator")
    recorder = Recorder()
    monkeypatch.setattr(emulator, "metal_kernel", recorder)
    monkeypatch.setattr(mx.fast, "metal_kernel", None)
    problem = Problem(m=1, n=40, k=512)

    launch.product(scheduler.make(problem))(*blanks(problem))

    assert [each["name"] for each in recorder.built] == ["marlin_gemv"]


def test_weights_of_fewer_than_eight_values_are_handed_over_as_eight(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("metal")
    recorder = Recorder()
    monkeypatch.setattr(mx.fast, "metal_kernel", recorder)
    problem = Problem(m=1, n=1, k=32, group_size=32)
    x, w, scales, biases = blanks(problem)

    launch.product(scheduler.make(problem))(x, w + 3, scales + 2, biases + 1)

    _, w, scales, biases, params = recorder.called[0]["inputs"]
    assert w.tolist() == [3] * 4 + [0] * 4
    assert scales.tolist() == [2] + [0] * 7
    assert biases.tolist() == [1] + [0] * 7
    assert params.tolist() == [1, 1, 32, 1, 0]


def test_plans_built_are_listed_once_in_order(backend: Choose) -> None:
    backend("metal")
    plans = [scheduler.make(Problem(m=m, n=40, k=512), k_parallel=1) for m in (9, 1, 9)]

    for plan in plans:
        launch.product(plan)

    assert launch.plans_built() == plans[:2]


@pytest.mark.parametrize("name", ["metal", "emulator", "stock"])
def test_the_environment_decides_the_back_end(backend: Choose, name: str) -> None:
    backend(name)

    assert launch.backend() == launch.forced_backend() == name


def test_a_back_end_that_is_not_ours_is_an_error_of_every_call(backend: Choose) -> None:
    backend("cuda")
    x, native = strategies.arrays(Problem(m=1, n=4, k=64), seed=0)

    for _ in range(2):
        with pytest.raises(ValueError, match="'cuda' is not one of metal, emulator"):
            mlx_marlin.quantized_matmul(x, *native)


@pytest.fixture
def machine(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool, mx.DeviceType, str | None], None]:
    """Returns what makes a machine: Metal?, default device, emulator's trouble."""

    def make(has_metal: bool, default: mx.DeviceType, trouble: str | None) -> None:
        monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(default))
        monkeypatch.setattr(emulator, "unavailable", lambda: trouble)
        backend(None)

    return make


@pytest.mark.parametrize(
    ("has_metal", "default", "expected"),
    [
        (True, mx.gpu, "metal"),
        (True, mx.cpu, "metal"),
        (False, mx.cpu, "emulator"),
        (False, mx.gpu, "stock"),  # CUDA
    ],
)
def test_what_the_machine_has_decides_otherwise(
    machine: Callable[..., None],
    has_metal: bool,
    default: mx.DeviceType,
    expected: str,
) -> None:
    machine(has_metal, default, None)

    assert launch.backend() == expected
    assert launch.forced_backend() is None


def test_an_empty_environment_variable_is_no_wish(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(False, mx.cpu, None)
    monkeypatch.setenv(launch.ENVIRONMENT, "")

    assert launch.backend() == "emulator"


def test_without_a_compiler_stock_answers_after_one_warning(
    machine: Callable[..., None],
) -> None:
    machine(False, mx.cpu, "no clang was found")
    x, native = strategies.arrays(Problem(m=3, n=40, k=128), seed=0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (1, 2, 3, 3):
            y = mlx_marlin.quantized_matmul(x[:rows], *native)
            assert mx.array_equal(y, mx.quantized_matmul(x[:rows], *native))

    assert [each.category for each in caught] == [RuntimeWarning]
    assert "no clang was found" in str(caught[0].message)
    assert "stock MLX" in str(caught[0].message)
