"""MLX records the dispatches of a plan, on the back end that is selected."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import metal_emulator
import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import build, graph, kernels, planner, selection
from mlx_marlin.backends.metal import launches as metal_arguments
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Reduction
from mlx_marlin.products.packing import pack
from mlx_marlin.weights import layout
from support import drawn_arrays, strategies
from support.choose import Choose
from support.recorder import Recorder


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

    mx.export_function(collect, graph.product(plan), *blanks(plan.problem))
    return nodes


def blanks(problem: Problem) -> list[mx.array]:
    """Makes arguments of a product, never evaluated."""
    dtype, scale_dtype = getattr(mx, problem.dtype), getattr(mx, problem.scale_dtype)
    several = problem.result_shape[:-2]
    words: tuple[int, ...] = (problem.n, problem.k * problem.bits // 32)
    scales: tuple[int, ...] = (problem.n, problem.groups)
    if problem.layout == "marlin":
        n, k = layout.padded(problem.n, problem.k)
        words = (n // 32, k // 64, 64 * problem.bits)
        stored = 32 * problem.format.parameters
        scales = (n // 32, -(-k // problem.group_size), stored)
    result = problem.result_shape
    finish = () if problem.epilogue == PLAIN else (result[-1:], result, result)
    return [
        mx.zeros((*several, problem.m, problem.k), dtype),
        mx.zeros((*several, *words), mx.uint32),
        mx.zeros((*several, *scales), scale_dtype),
        mx.zeros((*several, *scales), scale_dtype),
        *(mx.zeros(shape, dtype) for shape in finish),
    ]


def arguments_of(node: Node) -> list[str]:
    """Returns the parameters of the Metal function that MLX wrote."""
    function = re.search(r"\[\[kernel\]\] void \w+\((.*?)\) \{", node.text, re.DOTALL)
    assert function is not None
    return [each.strip() for each in function[1].split(",\n")]


PLANS = strategies.plans(
    of=strategies.problems(
        max_k=1024,
        formats=strategies.ANY_FORMAT,
        epilogues=strategies.EPILOGUES,
        batches=st.integers(1, 3),
    )
)


@pytest.mark.usefixtures("metal")
@given(plan=PLANS)
@settings(max_examples=80)
def test_mlx_records_the_dispatches_of_a_plan(plan: Plan) -> None:
    problem = plan.problem

    calls = kernel_calls(plan)

    # MLX zeroes atomic sums inside the call that adds to them, by one dispatch more.
    assert len(calls) == plan.dispatches - (plan.reduction == "atomic")
    assert len(calls) == 1 + plan.needs_second_pass
    first, last = calls[0], calls[-1]
    result = (problem.result_shape, getattr(mx, problem.dtype))
    assert [each[1:] for each in last.outputs] == [result]
    assert first.grid == (plan.num_threadgroups * plan.threads, 1, 1)
    assert first.threadgroup == (plan.threads, 1, 1)
    sums = plan.workspace_shape if plan.reduction == "workspace" else result[0]
    dtype = mx.float32 if plan.is_split else result[1]
    assert [(prod(each[1]), each[2]) for each in first.outputs] == [(prod(sums), dtype)]
    assert plan.reduction == "atomic" or first.outputs[0][1] == sums
    if plan.needs_second_pass:
        if prod(sums) >= kernels.IN_CONSTANT:
            assert last.inputs[0] == first.outputs[0]
        threads = problem.batch * -(-problem.m // 4) * problem.n
        assert last.grid == (threads, 1, 1)
        assert prod(last.threadgroup) <= 256
    assert_only_numbers_are_constants(plan, calls)
    assert_templates_are_the_plans(plan, calls)


def assert_only_numbers_are_constants(plan: Plan, calls: Sequence[Node]) -> None:
    numbers = dict.fromkeys(("shape", "schedule"), "constant")
    finishing: dict[str, str] = {}
    if plan.problem.epilogue != PLAIN:
        finishing = dict.fromkeys(("bias", "multiplier", "residual"), "device")
        finishing["parts"] = "constant"
    spaces = dict.fromkeys(("x", "w", "scales", "biases", "out"), "device") | numbers
    assert spaces_of(calls[0]) == spaces | ({} if plan.is_split else finishing)
    if plan.needs_second_pass:
        spaces = dict.fromkeys(("partials", "out"), "device") | numbers
        assert spaces_of(calls[1]) == spaces | finishing
    for call in calls:
        text = "".join(arguments_of(call))
        assert not re.search(r"_(shape|strides|ndim)\b", text)
    # What is added to is an atomic in MLX's text.
    out = next(each for each in arguments_of(calls[0]) if " out " in each)
    assert ("atomic<float>" in out) == (plan.reduction == "atomic")


def spaces_of(node: Node) -> dict[str, str]:
    """Returns the address space of each buffer."""
    return {
        each.split("* ")[-1].split()[0]: "constant" if "constant" in each else "device"
        for each in arguments_of(node)
        if "[[buffer" in each
    }


def assert_templates_are_the_plans(plan: Plan, calls: Sequence[Node]) -> None:
    templates = [
        metal_arguments.product_template(plan),
        metal_arguments.reduce_template(plan),
    ]
    for call, template in zip(calls, templates, strict=False):
        found = re.search(r"decltype\(\w+<(.*?)>\)", call.text)
        assert found is not None
        assert found[1] == instance(template)
        declared = re.search(r"template <([^>]*)>\n\[\[kernel\]\]", call.text)
        assert declared is not None
        names = [each.split()[-1] for each in declared[1].split(", ")]
        assert names == [*template]


def instance(values: Mapping[str, build.TemplateValue]) -> str:
    """Returns how MLX spells template arguments."""
    metal = {"float16": "float16_t", "bfloat16": "bfloat16_t", "float32": "float"}
    return ", ".join(
        metal[value] if isinstance(value, str) else str(int(value))
        for value in values.values()
    )


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("reduction", ["workspace", "atomic"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (7, 1)])
def test_few_partial_sums_are_no_constants(
    m: int, n: int, reduction: Reduction
) -> None:
    problem = Problem(m=m, n=n, k=256)
    plan = planner.make(problem, strategy="split_k", k_parallel=2, reduction=reduction)

    _, finish = kernel_calls(plan)

    assert spaces_of(finish)["partials"] == "device"


@pytest.fixture
def recorder(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Serves by Metal, where a recorder takes the place of MLX's factory."""
    backend("metal")
    recorder = Recorder()
    monkeypatch.setattr(mx.fast, "metal_kernel", recorder)
    return recorder


def test_metals_factory_is_looked_up_when_a_kernel_is_first_built(
    recorder: Recorder,
) -> None:
    problem = Problem(m=9, n=40, k=512)
    split = planner.make(problem, strategy="split_k", k_parallel=2)
    whole = planner.make(problem, strategy="data_parallel")

    for plan in (split, whole, split):
        y = graph.product(plan)(*blanks(problem))
        assert (y.shape, y.dtype) == ((9, 40), mx.float16)

    names = [each["name"] for each in recorder.built]
    assert names == ["marlin_gemm_register", "marlin_reduce"]
    assert len(recorder.called) == 5
    assert {"header", "source", "input_names", "output_names"} < {*recorder.built[0]}
    for each in recorder.built:  # exp(-inf) is 0 in this mode only
        assert each["compile_options"] == {"math_mode": "safe"}
    state.reset()
    graph.product(whole)
    assert len(recorder.built) == 3


def test_only_atomic_sums_begin_with_zeros(recorder: Recorder) -> None:
    problem = Problem(m=9, n=40, k=512, epilogue=Epilogue(bias=True))
    reductions: tuple[Reduction, ...] = ("workspace", "atomic")
    for reduction in reductions:
        plan = planner.make(
            problem, strategy="split_k", k_parallel=2, reduction=reduction
        )
        graph.product(plan)(*blanks(problem))

    # Each product and its reduce; a kernel is built once.
    assert [each["atomic_outputs"] for each in recorder.built] == [False, False, True]
    started = [each.get("init_value") for each in recorder.called]
    assert started == [None, None, 0.0, None]


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_a_call_of_the_face_adds_the_plans_kernel_calls_and_no_other(
    backend: Choose, request: pytest.FixtureRequest, layout: str
) -> None:
    backend("stock")
    x, native = drawn_arrays.arrays(Problem(m=9, n=64, k=4096), seed=0)
    weights = native if layout == "mlx" else (pack(*native),)
    recorder = request.getfixturevalue("recorder")

    y = mlx_marlin.quantized_matmul(x.reshape(3, 3, 4096), *weights)

    assert y.shape == (3, 3, 64)
    (plan,) = graph.plans_built()
    assert plan.problem.layout == layout
    assert len(recorder.called) == plan.dispatches


def test_the_emulators_factory_takes_the_same_calls(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("emulator")
    recorder = Recorder()
    monkeypatch.setattr(metal_emulator, "metal_kernel", recorder)
    monkeypatch.setattr(mx.fast, "metal_kernel", None)
    problem = Problem(m=1, n=40, k=512)

    graph.product(planner.make(problem))(*blanks(problem))

    assert [each["name"] for each in recorder.built] == ["marlin_gemv"]


def test_weights_of_fewer_than_eight_values_are_handed_over_as_eight(
    recorder: Recorder,
) -> None:
    affine = Problem(m=1, n=1, k=32, group_size=32)
    form = {"group_size": 32, "bits": 8, "mode": "mxfp8", "scale_dtype": "uint8"}
    for problem in (affine, Problem(m=1, n=3, k=64, **form)):
        x, w, scales, biases = blanks(problem)
        graph.product(planner.make(problem))(x, w + 3, scales + 2, biases + 1)

    of_affine, of_bytes = (each["inputs"] for each in recorder.called)
    _, w, scales, biases, shape, schedule = of_affine
    assert w.tolist() == [3] * 4 + [0] * 4
    assert scales.tolist() == [2] + [0] * 7
    assert biases.tolist() == [1] + [0] * 7
    assert shape.tolist() == [1, 1, 32, 1, 1, 1, 0]
    assert schedule.tolist() == [1, 1, 1, 1, 1, 0, 1]
    _, w, scales, biases, *_ = of_bytes
    assert w.shape == (3, 16)
    assert scales.tolist() == [2] * 6 + [0] * 2
    assert biases.tolist() == [1] * 6 + [0] * 2
    assert scales.dtype == mx.uint8


def test_small_arrays_of_an_epilogue_are_handed_over_as_eight(
    recorder: Recorder,
) -> None:
    problem = Problem(m=3, n=2, k=64, epilogue=Epilogue(bias=True, residual=True))
    *operands, bias, _, residual = blanks(problem)

    graph.product(planner.make(problem))(
        *operands, bias + 1, mx.array(0.0), residual + 2
    )

    *_, bias, unused, residual, _ = recorder.called[0]["inputs"]
    assert bias.tolist() == [1] * 2 + [0] * 6
    assert unused.tolist() == [0] * 8
    assert residual.tolist() == [2] * 6 + [0] * 2


def test_plans_built_are_listed_once_in_order(backend: Choose) -> None:
    backend("metal")
    plans = [planner.make(Problem(m=m, n=40, k=512)) for m in (9, 1, 9)]

    for plan in plans:
        graph.product(plan)

    assert graph.plans_built() == plans[:2]


@pytest.mark.parametrize("name", ["metal", "cuda", "emulator", "stock"])
def test_the_environment_decides_the_back_end(backend: Choose, name: str) -> None:
    backend(name)

    assert selection.backend() == selection.forced_backend() == name


def test_a_back_end_that_is_not_ours_is_an_error_of_every_call(backend: Choose) -> None:
    backend("rocm")
    x, native = drawn_arrays.arrays(Problem(m=1, n=4, k=64), seed=0)

    for _ in range(2):
        with pytest.raises(ValueError, match="'rocm' is not one of metal, cuda, emu"):
            mlx_marlin.quantized_matmul(x, *native)


@pytest.mark.parametrize("name", ["metal", "cuda"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_back_end_without_its_device_names_the_variable_when_it_would_compute(
    backend: Choose, name: str, packed: bool
) -> None:
    if getattr(mx, name).is_available():
        pytest.skip(f"MLX has a {name} device here")
    backend("stock")
    x, native = drawn_arrays.arrays(Problem(m=2, n=64, k=128), seed=0)
    weights = (pack(*native),) if packed else native
    backend(name)

    with pytest.raises(
        ValueError,
        match=f"MLX_MARLIN_BACKEND={name!r} needs a .* device, and MLX has none here: "
        "expected emulator, stock, or no value",
    ):
        mlx_marlin.quantized_matmul(x, *weights)


@pytest.fixture
def machine(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns what makes a machine: Metal?, device, emulator's trouble, CUDA?"""

    def make(
        has_metal: bool,
        default: mx.DeviceType,
        trouble: str | None,
        has_cuda: bool = False,
    ) -> None:
        monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
        monkeypatch.setattr(mx.cuda, "is_available", lambda: has_cuda)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(default))
        monkeypatch.setattr(metal_emulator, "unavailable", lambda: trouble)
        backend(None)

    return make


@pytest.mark.parametrize(
    ("has_metal", "has_cuda", "default", "expected"),
    [
        (True, False, mx.gpu, "metal"),
        (True, False, mx.cpu, "metal"),
        (False, False, mx.cpu, "emulator"),
        (False, True, mx.cpu, "cuda"),  # another call may be the GPU's
        (False, True, mx.gpu, "cuda"),
        (False, False, mx.gpu, "stock"),
    ],
)
def test_what_the_machine_has_decides_otherwise(
    machine: Callable[..., None],
    backend: Choose,
    has_metal: bool,
    has_cuda: bool,
    default: mx.DeviceType,
    expected: str,
) -> None:
    machine(has_metal, default, None, has_cuda)

    for value in (None, ""):  # an empty value is no wish
        backend(value)
        assert selection.backend() == expected
        assert selection.forced_backend() is None


def test_without_a_compiler_stock_answers_after_one_warning(
    machine: Callable[..., None],
) -> None:
    machine(False, mx.cpu, "no clang was found")
    x, native = drawn_arrays.arrays(Problem(m=3, n=40, k=128), seed=0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (1, 2, 3, 3):
            y = mlx_marlin.quantized_matmul(x[:rows], *native)
            assert mx.array_equal(y, mx.quantized_matmul(x[:rows], *native))

    assert [each.category for each in caught] == [RuntimeWarning]
    assert "no clang was found" in str(caught[0].message)
    assert "stock MLX" in str(caught[0].message)
