"""What MLX gets of a CUDA kernel, and who serves a call on the CUDA back end."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import arguments, devices, launch, planner, selection, source
from mlx_marlin.backends.cuda import arguments as cuda_arguments
from mlx_marlin.backends.cuda import device as cuda_device
from mlx_marlin.backends.cuda import handover
from mlx_marlin.backends.cuda import source as cuda_source
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.source import declarations
from mlx_marlin.backends.metal import arguments as metal_arguments
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.backends.metal.source import compaction
from mlx_marlin.cli import demo_report
from mlx_marlin.integrations.mlx_lm.layer_conversion import default_layout
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import dispatch, repacking
from mlx_marlin.products.packing import pack
from support.arguments import activations, weight

Choose = Callable[[str | None], None]
H200 = CudaDevice.named("NVIDIA H200")
N, K = 96, 512
FUSED = Epilogue(bias=True, activation="silu", residual=True)


class Recorder:
    """Stands for `mx.fast.cuda_kernel`."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.called: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> Callable[..., list[mx.array]]:
        self.built.append(options)

        def kernel(**call: Any) -> list[mx.array]:
            self.called.append(call)
            outputs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(*each) for each in outputs]

        return kernel


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Lets all texts be found in a copy of the shaders, which may be changed."""
    folder = tmp_path / "shaders"
    shutil.copytree(source.shader_folder(), folder)
    monkeypatch.setattr(source, "shader_folder", lambda: folder)
    forget_texts()
    yield folder
    forget_texts()


def forget_texts() -> None:
    cuda_source._included.cache_clear()


@pytest.fixture
def recorder(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Makes a machine with CUDA, whose kernels are recorded and compute zeros."""
    recorder = Recorder()
    backend(None)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.fast, "cuda_kernel", recorder)
    monkeypatch.setattr(devices, "current", lambda: H200)
    # Once, and not again without derivatives.
    monkeypatch.setattr(dispatch, "traced", lambda run, _: mx.compile(run))
    assert selection.backend() == "cuda"
    return recorder


def plan_of(**options: Any) -> Plan:
    """Returns a plan of "mma" of a small product with any options."""
    fields = {"m": 9, "n": N, "k": K}
    problem = Problem(
        **fields | {name: options.pop(name) for name in list(options) if name in NAMES}
    )
    return planner.make(problem, device=H200, **{"kernel": "mma"} | options)


def powerset(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


NAMES = set(Problem.__dataclass_fields__)
SPLIT = {"strategy": "split_k", "k_parallel": 2, "simdgroups_n": 2, "simdgroups_k": 4}
WHOLE = {"strategy": "data_parallel", "simdgroups_n": 3, "simdgroups_k": 2}


def blanks(plan: Plan, arrays: int = 4) -> list[mx.array]:
    """Makes as many arguments of a product as wanted, of the right dtypes."""
    problem = plan.problem
    dtype, scale_dtype = (
        getattr(mx, name) for name in (problem.dtype, problem.scale_dtype)
    )
    words, scales = mx.zeros((4,), mx.uint32), mx.zeros((2,), scale_dtype)
    x = mx.zeros((problem.m, problem.k), dtype)
    return [x, words, scales, scales, *[mx.zeros((3,), dtype)] * (arrays - 4)]


def included(file: str) -> str:
    """Returns the last line of a header that names a file."""
    return f'#include "{(source.shader_folder() / file).as_posix()}"\n'


def text_of(file: str) -> str:
    return (source.shader_folder() / file).read_text()


def body_of(text: source.Source, file: str) -> str:
    """Returns what stands before a body in a kernel's source."""
    body = text_of(file)
    assert text.source.endswith(body)
    return text.source[: -len(body)]


PLACES = "const int* shape = numbers + 0;\nconst int* schedule = numbers + 7;\n"


def test_a_header_names_a_file_and_says_how_large_a_block_is() -> None:
    plan = plan_of(**WHOLE, layout="marlin")
    text = cuda_source.of_product(plan)
    fused = cuda_source.of_product(plan_of(**WHOLE, layout="marlin", epilogue=FUSED))

    threads, digest, include = text.header.splitlines(keepends=True)
    assert threads == f"#define THREADS {plan.threads}\n"
    assert re.fullmatch("// [0-9a-f]{16}\n", digest)
    assert include == included("cuda/product.cuh")
    assert fused.header == text.header
    biases = "const auto* biases = scales;\n"
    plain = "const marlin::Plain epilogue{};\n"
    rows = "const auto rows = marlin::as_they_lie(x);\n"
    assert body_of(text, "cuda/mma.cu") == biases + PLACES + plain + rows
    assert body_of(fused, "cuda/mma.cu") == (
        f"{biases}const T* multiplier = nullptr;\n{PLACES}"
        f"const int* parts = numbers + 14;\n{declarations.FUSED.declaration}{rows}"
    )
    assert (text.name, fused.name) == ("marlin_mma", "marlin_mma_fused")


def test_so_does_that_of_the_reduce_and_metals_is_another() -> None:
    plan, fused = plan_of(**SPLIT), plan_of(**SPLIT, epilogue=FUSED)
    metal, text = metal_source.reduce_source(), cuda_source.of_reduce(plan)

    digest = cuda_source.of_product(plan).header.splitlines()[1]
    assert text.header == f"{digest}\n{included('cuda/sums.cuh')}"
    assert body_of(text, "cuda/reduce.cu") == PLACES + declarations.AS_IT_IS.declaration
    own = body_of(cuda_source.of_reduce(fused), "cuda/reduce.cu")
    assert own.startswith(f"const T* multiplier = nullptr;\n{PLACES}")
    assert metal.source == compaction.stripped(text_of("kernels/reduce.metal"))
    assert "#include" not in metal.header


def test_and_that_of_what_decodes() -> None:
    plan = plan_of(**WHOLE, layout="marlin")
    metal, text = metal_source.dequantize_source(), cuda_source.of_dense(plan.problem)

    assert text.header.endswith(included("cuda/decoding.cuh"))
    before = "const auto* biases = scales;\nconst int* shape = numbers + 0;\n"
    assert body_of(text, "cuda/dequantize.cu") == before
    assert text.input_names == ("w", "scales", "numbers")
    assert metal.source == compaction.stripped(text_of("kernels/dequantize.metal"))


NVFP4 = {"mode": "nvfp4", "group_size": 16, "scale_dtype": "uint8"}
READ: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"layout": "marlin"}, ()),
    ({"layout": "mlx"}, ("biases",)),
    ({"mode": "mxfp4", "group_size": 32, "scale_dtype": "uint8"}, ()),
    ({**NVFP4, "layout": "marlin", "global_scale": True}, ("biases",)),
    ({**NVFP4, "global_scale": True}, ("biases",)),
)


@pytest.mark.parametrize(("format", "biases"), READ, ids=str)
def test_biases_are_an_input_where_they_are_apart_or_a_global_scale(
    format: dict[str, Any], biases: tuple[str, ...]
) -> None:
    plan = plan_of(**WHOLE, **format)

    read = (*("w", "scales"), *biases, "numbers")
    assert cuda_source.of_product(plan).input_names == ("x", *read)
    assert cuda_source.of_dense(plan.problem).input_names == read


@pytest.mark.parametrize("names", [*powerset(declarations.FINISHING)], ids=str)
def test_an_epilogues_arrays_are_inputs_where_there_are_any(
    names: tuple[str, ...],
) -> None:
    epilogue = Epilogue(
        activation="silu",
        bias="bias" in names,
        multiply="multiplier" in names,
        residual="residual" in names,
    )
    whole = plan_of(**WHOLE, layout="marlin", epilogue=epilogue)
    split = plan_of(**SPLIT, layout="marlin", epilogue=epilogue)

    finish = (*names, "numbers")
    product = ("x", "w", "scales")
    assert cuda_source.of_product(whole).input_names == (*product, *finish)
    assert cuda_source.of_product(split).input_names == (*product, "numbers")
    assert cuda_source.of_reduce(split).input_names == ("partials", *finish)


@pytest.mark.parametrize("file", ["cuda/instructions.cuh", "lib/words.metal"])
def test_a_header_changes_with_any_file_that_it_may_include(
    copied: Path, file: str
) -> None:
    def headers() -> list[str]:
        forget_texts()
        plan = plan_of(**SPLIT)
        return [
            cuda_source.of_product(plan).header,
            cuda_source.of_reduce(plan).header,
        ]

    before = headers()
    assert headers() == before

    (copied / file).write_text(text_of(file) + "// changed\n")

    assert not {*headers()} & {*before}


def test_template_arguments_are_in_order() -> None:
    plan = plan_of(**WHOLE, group_size=128, layout="marlin", bits=8)

    assert list(cuda_arguments.product_template(plan).items()) == [
        ("FRAGMENTS_M", 2),
        ("SIMDGROUPS_N", 3),
        ("SIMDGROUPS_K", 2),
        ("WHOLE", True),
        ("SINGLE", True),
        ("BATCHED", False),
        ("MODE", 0),
        ("BITS", 8),
        ("GROUP", 128),
        ("PACKED", True),
    ]


RING = {"kernel": "wgmma", "strategy": "data_parallel", "simdgroups_n": 3}
RING |= {"simdgroups_k": 2, "buffers": 4, "layout": "marlin"}


@pytest.mark.parametrize(("kernel", "tiles_n"), [("wgmma", 4), ("mma_staged", 3)])
def test_hoppers_kernels_have_another_header_and_bodies(
    kernel: str, tiles_n: int
) -> None:
    plan = plan_of(**RING | {"kernel": kernel})
    text = cuda_source.of_product(plan)
    fused = cuda_source.of_product(plan_of(**RING | {"kernel": kernel}, epilogue=FUSED))

    threads, _, include = text.header.splitlines(keepends=True)
    assert threads == f"#define THREADS {32 * (2 * tiles_n + 4)}\n"
    assert include == included("cuda/staged_product.cuh")
    assert fused.header == text.header
    assert body_of(text, f"cuda/{kernel}.cu")
    assert body_of(fused, f"cuda/{kernel}.cu")
    assert (text.name, fused.name) == (f"marlin_{kernel}", f"marlin_{kernel}_fused")
    assert text.input_names == ("x", "w", "scales", "numbers")


def test_hoppers_template_arguments_have_the_stages() -> None:
    found = [*cuda_arguments.product_template(plan_of(**RING, m=40, bits=3)).items()]

    assert found == [
        ("FRAGMENTS_M", 6),
        ("SIMDGROUPS_N", 3),
        ("SIMDGROUPS_K", 2),
        ("STAGES", 4),
        ("WHOLE", True),
        ("SINGLE", True),
        ("BATCHED", False),
        ("MODE", 0),
        ("BITS", 3),
        ("GROUP", 64),
        ("PACKED", True),
    ]


def test_hoppers_kernel_is_launched_with_its_loaders(recorder: Recorder) -> None:
    plan = plan_of(**RING)

    launch.product(plan)(*blanks(plan))

    (built,), (call,) = recorder.built, recorder.called
    assert built["shared_memory"] == plan.threadgroup_bytes == 512 + 4 * 16 * 128 * 2
    assert call["threadgroup"] == (plan.threads, 1, 1) == (384, 1, 1)
    assert call["grid"] == (plan.num_threadgroups * 384, 1, 1)


def test_an_epilogue_is_the_products_or_the_reduces() -> None:
    finish = {"T": "float16", "BIAS": True, "ACTIVATION": 1, "MULTIPLY": False}
    finish |= {"RESIDUAL": True, "PARTS": 1}
    whole = plan_of(**WHOLE, epilogue=FUSED)
    split = plan_of(**SPLIT, epilogue=FUSED, batch=2)

    template = cuda_arguments.product_template(whole)
    assert list(template.items())[-6:] == list(finish.items())
    assert "T" not in cuda_arguments.product_template(split)
    assert cuda_arguments.product_template(split)["WHOLE"] is False
    reduce = {"BATCHED": True, "SIMDGROUPS_N": 2}
    assert cuda_arguments.reduce_template(split) == reduce | finish
    plain = cuda_arguments.reduce_template(plan_of(**SPLIT))
    assert plain == {"BATCHED": False, "SIMDGROUPS_N": 2, "T": "float16"}


def test_metals_reduce_has_no_such_argument() -> None:
    plan = planner.make(Problem(m=9, n=N, k=K), strategy="split_k", k_parallel=2)

    assert "SIMDGROUPS_N" not in metal_arguments.reduce_template(plan)


def test_a_product_is_one_launch_of_whole_blocks(recorder: Recorder) -> None:
    plan = plan_of(**WHOLE, layout="marlin")

    y = launch.product(plan)(*blanks(plan))

    assert (y.shape, y.dtype) == ((9, N), mx.float16)
    (built,), (call,) = recorder.built, recorder.called
    assert built["shared_memory"] == plan.threadgroup_bytes == 3 * 2 * 16 * 36 * 4
    assert built["input_names"] == ["x", "w", "scales", "numbers"]
    assert built["output_names"] == ["out"]
    assert "atomic_outputs" not in built
    threads = 32 * 3 * 2
    assert call["grid"] == (plan.num_threadgroups * threads, 1, 1)
    assert call["threadgroup"] == (threads, 1, 1)
    assert call["output_shapes"] == [(9, N)]
    assert "init_value" not in call
    assert call["template"] == [*cuda_arguments.product_template(plan).items()]
    # Small arrays go as they are: CUDA has no other address space for them.
    _, w, scales, numbers = call["inputs"]
    assert (w.shape, scales.shape) == ((4,), (2,))
    assert numbers.tolist() == [
        *arguments.shape(plan),
        *arguments.schedule(plan),
    ]


@pytest.mark.parametrize("way", [WHOLE, SPLIT], ids=str)
def test_each_part_is_an_array_of_its_own(
    recorder: Recorder, way: dict[str, Any]
) -> None:
    parts = 40, 6, N - 46
    plan = plan_of(**way, epilogue=Epilogue(parts=parts))

    results = launch.product(plan)(*blanks(plan))

    assert isinstance(results, tuple)
    assert [each.shape for each in results] == [(9, columns) for columns in parts]
    built, call = recorder.built[-1], recorder.called[-1]
    assert built["output_names"] == ["out0", "out1", "out2"]
    declared = "marlin::Apart<T, PARTS> out = {{out0, out1, out2}, parts, shape[0]};"
    assert f"const {declared}\n" in built["source"]
    assert call["output_dtypes"] == [mx.float16] * 3


def test_layers_that_share_x_are_a_kernels_outputs(recorder: Recorder) -> None:
    x, packed = (
        activations(2, 3, K, dtype=mx.float16),
        pack(*weight(N, K, dtype=mx.float16)),
    )

    results = mlx_marlin.linears(x, packed, parts=(32, N - 32))

    assert [each.shape for each in results] == [(2, 3, 32), (2, 3, N - 32)]
    assert recorder.called[-1]["output_shapes"] == [each.shape for each in results]


def test_the_numbers_of_parts_follow(recorder: Recorder) -> None:
    plan = plan_of(**WHOLE, epilogue=Epilogue(parts=(40, N - 40)))

    launch.product(plan)(*blanks(plan))

    assert (
        len(arguments.shape(plan))
        == len(arguments.schedule(plan))
        == cuda_source.SECTION
    )
    *_, numbers = recorder.called[0]["inputs"]
    assert numbers[2 * cuda_source.SECTION :].tolist() == [0, 40, N]


def test_a_split_product_is_summed_by_a_second_launch(recorder: Recorder) -> None:
    plan = plan_of(**SPLIT, epilogue=FUSED)

    y = launch.product(plan)(*blanks(plan, arrays=7))

    assert (y.shape, y.dtype) == ((9, N), mx.float16)
    product, reduce = recorder.called
    assert product["output_shapes"] == [(2, 9, N)]
    assert product["output_dtypes"] == [mx.float32]
    assert len(product["inputs"]) == 5
    partials, *finish, _ = reduce["inputs"]
    assert partials.shape == (2, 9, N)
    assert [each.shape for each in finish] == [(3,)] * 2  # no multiplier
    assert reduce["grid"] == (3 * N, 1, 1)
    assert ("SIMDGROUPS_N", 2) in reduce["template"]
    assert [each["shared_memory"] for each in recorder.built] == [
        plan.threadgroup_bytes,
        0,
    ]


def test_kernels_are_told_apart_by_their_text(recorder: Recorder) -> None:
    def built(**options: Any) -> tuple[str, str, str]:
        recorder.built.clear()
        plan = plan_of(**options)
        launch.product(plan)(*blanks(plan))
        first = recorder.built[0]
        return first["name"], first["header"], first["source"]

    text = cuda_source.of_product(plan_of(**WHOLE))
    assert built(**WHOLE) == ("marlin_mma", text.header, text.source)
    assert built(**SPLIT)[1] == cuda_source.of_product(plan_of(**SPLIT)).header


def test_another_block_is_another_kernel_and_the_same_is_built_once(
    recorder: Recorder,
) -> None:
    plans = [plan_of(**WHOLE | {"simdgroups_k": warps_k}) for warps_k in (2, 5, 2)]

    for plan in plans:
        launch.product(plan)(*blanks(plan))

    shared = [each["shared_memory"] for each in recorder.built]
    assert shared == [plan.threadgroup_bytes for plan in plans[:2]]


def test_without_cuda_a_kernel_is_an_error_when_it_runs(
    backend: Choose,
) -> None:
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    backend("cuda")
    plan = plan_of(**WHOLE)
    multiply = launch.product(plan)

    with pytest.raises(
        ValueError,
        match=r"marlin_mma cannot run.*='cuda' needs a CUDA device.*expected",
    ):
        multiply(*blanks(plan))


def test_our_kernels_serve_few_rows_in_both_layouts(recorder: Recorder) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)

    for given in (native, (pack(*native),)):
        assert mlx_marlin.why_not(x, *given) is None
        y = mlx_marlin.quantized_matmul(x, *given)
        assert (y.shape, y.dtype) == ((3, N), mx.float16)

    plans = launch.plans_built()
    assert [plan.problem.layout for plan in plans] == ["mlx", "marlin"]
    assert {plan.kernel for plan in plans} == {"mma"}
    assert len(recorder.called) == sum(plan.dispatches for plan in plans)


def test_a_batch_of_weights_is_served(recorder: Recorder) -> None:
    x = activations(2, 3, K, dtype=mx.float16)
    native = weight(N, K, dtype=mx.float16, batch=2)

    y = mlx_marlin.quantized_matmul(x, *native)

    assert y.shape == (2, 3, N)
    assert launch.plans_built()[0].problem.batch == 2
    assert ("BATCHED", True) in recorder.called[0]["template"]


MANY_ROWS = {"mlx": handover.FEW_ROWS + 1, "marlin": handover.MOST_ROWS + 1}
STOCK: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any], str]] = {
    "float32": (
        lambda: (activations(3, K), *weight(N, K)),
        {},
        "multiply float16 and bfloat16, and dtype is float32",
    ),
    "transpose=False": (
        lambda: (
            activations(2, 3, N, dtype=mx.float16),
            pack(*weight(N, K, dtype=mx.float16, batch=2)),
        ),
        {"transpose": False},
        "our CUDA kernels multiply a batch by transposed weights only",
    ),
    "many rows": (
        lambda: (
            activations(MANY_ROWS["mlx"], K, dtype=mx.float16),
            *weight(N, K, dtype=mx.float16),
        ),
        {},
        f"{MANY_ROWS['mlx']} rows on NVIDIA H200",
    ),
    "many rows, packed, in a batch": (
        lambda: (
            activations(2, MANY_ROWS["marlin"], K, dtype=mx.float16),
            pack(*weight(N, K, dtype=mx.float16, batch=2)),
        ),
        {},
        f"{MANY_ROWS['marlin']} rows on NVIDIA H200",
    ),
}


@pytest.mark.parametrize("kind", STOCK)
def test_stock_serves_the_rest_and_says_why(recorder: Recorder, kind: str) -> None:
    make, options, words = STOCK[kind]
    arguments = make()

    assert words in str(mlx_marlin.why_not(*arguments, **options))
    y = mlx_marlin.quantized_matmul(*arguments, **options)

    assert recorder.built == []
    assert mx.isfinite(y).all()
    assert mx.abs(y).max() > 0  # not the recorder's zeros


def test_groups_of_16_integers_are_stocks(recorder: Recorder) -> None:
    w = mx.random.normal((N, K)).astype(mx.float16)
    packed = mlx_marlin.quantize(w, group_size=16)
    x = activations(3, K, dtype=mx.float16)

    assert "groups of 16 integers" in str(mlx_marlin.why_not(x, packed))
    assert mx.abs(mlx_marlin.quantized_matmul(x, packed)).max() > 0
    assert recorder.built == []


def test_an_old_device_is_stocks(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = replace(cuda_device.DEFAULT, name="an old device", arch="sm_75")
    monkeypatch.setattr(devices, "current", lambda: old)
    packed = pack(*weight(N, K, dtype=mx.float16))
    x = activations(3, K, dtype=mx.float16)

    needed = "need compute capability 8.0, an old device has less"
    assert needed in str(mlx_marlin.why_not(x, packed))
    assert mx.abs(mlx_marlin.quantized_matmul(x, packed)).max() > 0
    assert recorder.built == []
    linear = nn.Linear(K, N)
    assert default_layout(nn.QuantizedLinear.from_linear(linear)) == "mlx"


def test_a_call_on_the_cpu_is_stocks(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))

    assert mlx_marlin.why_not(x, *native) == "the call runs on the CPU"
    # Nor is a model packed then, which stock MLX would unpack at each call.
    assert default_layout(nn.QuantizedLinear.from_linear(nn.Linear(K, N))) == "mlx"


def test_what_a_layer_remembers_ends_with_what_decided_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = mlx_marlin.optimize(Model()).linear
    x = activations(3, K, dtype=mx.float16)

    def is_ours() -> bool:
        y = layer(x)
        assert mx.array_equal(y, layer(x))
        return not mx.abs(y).max()  # the recorder's zeros

    assert is_ours()
    del layer["bias"]
    assert is_ours()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
        assert not is_ours()
    assert is_ours()
    layer.set_dtype(mx.bfloat16)
    assert not is_ours()  # promoted to float32
    layer.set_dtype(mx.float16)
    assert is_ours()
    layer.invariant = True
    layer(x)
    assert launch.plans_built()[-1].problem.invariant
    monkeypatch.setenv(selection.ENVIRONMENT, "stock")
    layer.invariant = False
    assert is_ours()
    state.reset()
    assert not is_ours()


def test_who_forces_the_back_end_sees_it_run_for_any_rows(
    recorder: Recorder, backend: Choose
) -> None:
    backend("cuda")
    for layout, m in MANY_ROWS.items():
        native = weight(N, K, dtype=mx.float16)
        x = activations(m, K, dtype=mx.float16)
        recorder.called.clear()

        mlx_marlin.quantized_matmul(x, *native if layout == "mlx" else [pack(*native)])

        assert "FRAGMENTS_M" in dict(recorder.called[0]["template"])


@pytest.mark.parametrize(
    ("m", "columns", "transpose"), [(MANY_ROWS["marlin"], N, True), (3, K, False)]
)
def test_a_packed_weight_is_decoded_once(
    recorder: Recorder, m: int, columns: int, transpose: bool
) -> None:
    x = activations(m, K if transpose else N, dtype=mx.float16)
    packed = pack(*weight(N, K, dtype=mx.float16))

    assert mlx_marlin.why_not(x, packed, transpose=transpose) is None
    y = mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    assert y.shape == (m, columns)
    (built,), (call,) = recorder.built, recorder.called
    assert (built["name"], built["shared_memory"]) == ("marlin_dequantize", 0)
    assert call["output_shapes"] == ((N, K),)
    assert call["output_dtypes"] == (mx.float16,)


def test_invariance_is_refused_where_stock_would_serve(recorder: Recorder) -> None:
    x, native = activations(3, K), weight(N, K)

    with pytest.raises(ValueError, match="invariant=True cannot be kept"):
        mlx_marlin.linear(x, *native, invariant=True)

    half = activations(3, K, dtype=mx.float16), *weight(N, K, dtype=mx.float16)
    mlx_marlin.linear(*half, invariant=True)
    assert launch.plans_built()[-1].problem.invariant


def test_gradients_are_mlxs_or_from_a_decoded_weight(recorder: Recorder) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)

    def loss(product: Callable[..., mx.array], *w: Any) -> Callable[..., mx.array]:
        return lambda x: product(x, *w).sum()

    expected = mx.grad(loss(mx.quantized_matmul, *native))(x)
    gradient = mx.grad(loss(mlx_marlin.quantized_matmul, *native))(x)
    assert mx.allclose(gradient, expected, rtol=1e-2, atol=1e-2)
    assert {each["name"] for each in recorder.built} == {"marlin_mma"}

    mx.eval(mx.grad(loss(mlx_marlin.quantized_matmul, pack(*native)))(x))
    assert recorder.built[-1]["name"] == "marlin_dequantize"


def test_experts_have_a_kernel_but_in_float32(recorder: Recorder) -> None:
    chosen = mx.array([3, 1])
    w = weight(N, K, dtype=mx.float32, batch=4)
    x = activations(2, 1, K, dtype=mx.float32)

    y = mlx_marlin.gather_qmm(x, *w, rhs_indices=chosen)
    packed = mlx_marlin.gather_qmm(x, pack(*w), rhs_indices=chosen)

    expected = mx.gather_qmm(x, *w, rhs_indices=chosen)
    assert mx.array_equal(y, expected)
    assert mx.allclose(packed, expected, rtol=1e-2, atol=1e-2)
    assert recorder.built == []
    w = weight(N, K, dtype=mx.float16, batch=4)
    for stored in (w, (pack(*w),)):
        mlx_marlin.gather_qmm(x.astype(mx.float16), *stored, rhs_indices=chosen)
    assert [each["name"] for each in recorder.built] == ["marlin_gather"] * 2


def test_packing_needs_no_kernel(recorder: Recorder) -> None:
    w = weight(N, K, dtype=mx.float16)[0]

    tiles = repacking.to_tiles(w, N, K, bits=4, group_size=64)
    rows = repacking.to_rows(tiles, N, K, bits=4, group_size=64)

    assert mx.array_equal(rows, w)
    assert recorder.built == []


class Model(nn.Module):
    """A model with a layer of each kind that `optimize` looks at."""

    def __init__(self, dtype: mx.Dtype = mx.float16) -> None:
        super().__init__()
        self.linear = nn.QuantizedLinear(K, N)
        self.embedding = nn.QuantizedEmbedding(N, K)
        self.experts = SwitchLinear(K, N, 4, bias=False).to_quantized()
        self.set_dtype(dtype)


def test_optimize_packs_what_cuda_serves(recorder: Recorder) -> None:
    model = mlx_marlin.optimize(Model())

    assert type(model.linear) is MarlinLinear
    assert model.linear.layout == "marlin"
    assert type(model.experts) is MarlinSwitchLinear
    assert model.experts.layout == "marlin"
    again = mlx_marlin.optimize(model)
    assert again.linear.layout == again.experts.layout == "marlin"
    mlx_marlin.restore(model)
    assert type(model.linear) is nn.QuantizedLinear
    assert type(model.experts) is QuantizedSwitchLinear


def test_optimize_keeps_float32_in_mlxs_layout_and_any_layout_asked_for(
    recorder: Recorder,
) -> None:
    wide = mlx_marlin.optimize(Model(mx.float32))
    assert wide.linear.layout == "mlx"
    assert type(wide.experts) is QuantizedSwitchLinear
    assert mlx_marlin.optimize(Model(), layout="mlx").linear.layout == "mlx"
    asked = mlx_marlin.optimize(Model(mx.float32), layout="marlin")
    assert asked.linear.layout == "marlin"


def test_optimize_refuses_invariance_of_experts(recorder: Recorder) -> None:
    model = Model()
    with pytest.raises(ValueError, match="1 quantized layers have no invariant kernel"):
        mlx_marlin.optimize(model, invariant=True)
    mlx_marlin.optimize(model)
    with pytest.raises(ValueError, match="such as MarlinSwitchLinear"):
        mlx_marlin.optimize(model, invariant=True)
    assert not model.experts.invariant


def test_the_demo_complains_if_nothing_ran(recorder: Recorder) -> None:
    x, native = activations(3, K, dtype=mx.float16), weight(N, K, dtype=mx.float16)

    assert "none of our kernels ran" in demo_report.errors(8.0, 8.0)[0]
    mlx_marlin.quantized_matmul(x, *native)
    assert demo_report.errors(8.0, 8.0) == []


def test_elsewhere_the_default_is_mlxs_layout(backend: Choose) -> None:
    backend("emulator")

    assert default_layout(Model().linear) == "mlx"
    assert mlx_marlin.optimize(Model()).linear.layout == "mlx"
