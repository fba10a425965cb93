"""Calls of the emulator's kernels mean what they mean to MLX."""

import gc
import importlib
import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import metal_emulator
from metal_emulator import CompileError, EmulatorError, metal_kernel
from metal_emulator.memory import POOL_REGIONS
from support.marks import needs_emulator
from support.metal_sources import FLOATS, HALVES, Size, each_thread, run, to_numpy
from support.profiles import drawn

pytestmark = needs_emulator


def call(
    kernel: Any, inputs: Sequence[Any] | None = None, **changes: Any
) -> list[mx.array]:
    arguments = {
        "inputs": [FLOATS] if inputs is None else inputs,
        "output_shapes": [(32,)],
        "output_dtypes": [mx.float32],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
    }
    return kernel(**(arguments | changes))


DTYPES = [
    mx.bool_,
    *(mx.int8, mx.int16, mx.int32, mx.int64),
    *(mx.uint8, mx.uint16, mx.uint32, mx.uint64),
    *(mx.float16, mx.bfloat16, mx.float32),
]


def test_every_dtype_goes_in_and_out() -> None:
    inputs = [(mx.arange(32) % 2).astype(each) for each in DTYPES]
    inputs.append(mx.arange(32).astype(mx.complex64) * mx.array(1 + 2j))
    names = [str(each.dtype).removeprefix("mlx.core.") for each in inputs]
    kernel = metal_kernel(
        name="copies",
        input_names=[f"{name}_in" for name in names],
        output_names=[f"{name}_out" for name in names],
        source="uint i = thread_position_in_grid.x;\n"
        + "\n".join(f"{name}_out[i] = {name}_in[i];" for name in names),
    )

    outputs = call(
        kernel,
        inputs,
        output_shapes=[(32,)] * len(names),
        output_dtypes=[each.dtype for each in inputs],
    )

    for a, out in zip(inputs, outputs, strict=True):
        assert out.dtype == a.dtype
        assert mx.array_equal(out, a)


def test_complex_numbers_are_multiplied() -> None:
    a = mx.arange(32).astype(mx.complex64) * mx.array(1 + 2j)

    out = each_thread("a[i] * a[i]", a, dtype=mx.complex64)

    np.testing.assert_allclose(out, np.array(a) ** 2)


def test_scalars_are_references_and_few_elements_constant() -> None:
    source = """
    static_assert(is_same_v<decltype(a), const int32_t&>, "a");
    static_assert(is_same_v<decltype(b), const float&>, "b");
    static_assert(is_same_v<decltype(c), const bool&>, "c");
    out[thread_position_in_grid.x] = a + b + c + d[2] + e[9];
    """

    out = run(source, 3, 0.5, True, mx.arange(3), mx.arange(10))

    assert (out == 15.5).all()


def test_init_value_fills_what_is_not_written_in_any_shape() -> None:
    kernel = metal_kernel(
        name="some",
        input_names=[],
        output_names=["x", "y", "z"],
        source="if (thread_position_in_grid.x == 3) { x[3] = 7; y[3] = 7; z[3] = 7; }",
    )

    outputs = call(
        kernel,
        [],
        output_shapes=[(32,), (4, 8), (2, 2, 8)],
        output_dtypes=[mx.float16, mx.bfloat16, mx.int32],
        init_value=2,
    )

    for out in outputs:
        assert out.reshape(-1).tolist() == [2, 2, 2, 7] + [2] * 28


def test_what_is_not_written_is_nan() -> None:
    out = run("out[1] = 0;", shape=(4,), dtype=mx.float16)

    assert np.isnan(out).tolist() == [True, False, True, True]


@pytest.mark.parametrize("threads", [1, 31, 100, 257])
def test_empty_outputs_and_grids_are_fine(threads: int) -> None:
    assert run("", shape=(0, 3), grid=threads).shape == (0, 3)
    assert run("out[0] = 1;", shape=(2,), grid=(0, threads, 1), init_value=5)[0] == 5


View = Callable[[mx.array], mx.array]
strided = st.sampled_from(
    [
        lambda x: x[3:35],
        lambda x: x[1:65:2],
        lambda x: x[60:28:-1],
        lambda x: x[:64].reshape(8, 8).T[:4],
        lambda x: x[2:66].reshape(4, 16)[:, 5:13],
        lambda x: x[4:68].reshape(2, 4, 8)[:, ::-1, ::2],
        lambda x: mx.broadcast_to(x[5:9][:, None], (4, 8)),
        lambda x: x[7:39].reshape(1, 32, 1),
    ]
)


@pytest.mark.parametrize(
    ("expression", "copied"),
    [
        ("a[i]", True),
        ("a[elem_to_loc(int64_t(i), a_shape, a_strides, a_ndim)]", False),
    ],
)
@drawn(
    15,
    view=strided,
    dtype=st.sampled_from([mx.uint8, mx.bfloat16, mx.float32]),
)
def test_strided_inputs_are_copied_or_read_in_place(
    view: View, dtype: mx.Dtype, expression: str, copied: bool
) -> None:
    a = view(mx.arange(80).astype(dtype))
    mx.eval(a)

    out = each_thread(expression, a, dtype=dtype, ensure_row_contiguous=copied)

    np.testing.assert_array_equal(out, to_numpy(a).ravel())


def test_only_copies_have_other_strides() -> None:
    a = mx.arange(80)[1:65:2]
    mx.eval(a)

    for copied, stride in ((True, 1), (False, 2)):
        out = each_thread("a_strides[0]", a, ensure_row_contiguous=copied)
        assert (out == stride).all()


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("dtype", [mx.uint8, mx.float16, mx.float32], ids=str)
def test_views_start_at_their_own_address_modulo_16(
    dtype: mx.Dtype, offset: int
) -> None:
    a = mx.arange(80).astype(dtype)[offset : offset + 40]
    mx.eval(a)

    out = each_thread("reinterpret_cast<ulong>(a) % 16", a)

    assert (out == offset * dtype.size % 16).all()


ATTRIBUTES = {
    "threads_per_grid.x + grid_size.y + threads_per_grid.z": [[22, 22], [22, 22]],
    "threadgroups_per_grid.x * 10 + threadgroups_per_grid.y": [[32, 32], [32, 32]],
    "threads_per_threadgroup.x": [[5, 3], [5, 3]],
    "threads_per_threadgroup.y": [[4, 4], [3, 3]],
    "dispatch_threads_per_threadgroup.x": [[5, 5], [5, 5]],
    "simdgroups_per_threadgroup": [[2, 1], [1, 1]],
    "dispatch_simdgroups_per_threadgroup": [[2, 2], [2, 2]],
    "threads_per_simdgroup + thread_execution_width": [[64, 64], [64, 64]],
    "grid_origin.x": [[0, 0], [0, 0]],
}


def test_attributes_know_the_ragged_edge() -> None:
    position = "thread_position_in_grid.y * 100 + thread_position_in_grid.x"
    lines = [
        f"out[(({2 * nth} + p.z) * 7 + p.y) * 13 + p.x] = {attribute};"
        for nth, attribute in enumerate((*ATTRIBUTES, position))
    ]
    source = "\n".join(["uint3 p = thread_position_in_grid;", *lines])

    out = run(source, shape=(10, 2, 7, 13), grid=(13, 7, 2), threadgroup=(5, 4, 2))

    y, x = np.mgrid[:7, :13]
    np.testing.assert_array_equal(out[-1], [y * 100 + x] * 2)
    found = out[:-1, 0, ::6, ::12].tolist()
    assert dict(zip(ATTRIBUTES, found, strict=True)) == ATTRIBUTES


def test_indices_in_the_threadgroup_run_x_first() -> None:
    source = """
    uint3 p = thread_position_in_grid, q = thread_position_in_threadgroup;
    uint3 size = threads_per_threadgroup, nominal = dispatch_threads_per_threadgroup;
    uint index = q.x + size.x * (q.y + size.y * q.z);
    bool fine = index == thread_index_in_threadgroup
        && index % 32 == thread_index_in_simdgroup
        && index / 32 == simdgroup_index_in_threadgroup
        && index % 4 == thread_index_in_quadgroup
        && index / 4 == quadgroup_index_in_threadgroup
        && all(p == q + threadgroup_position_in_grid * nominal);
    out[(p.z * 5 + p.y) * 9 + p.x] = fine;
    """

    out = run(source, shape=(3, 5, 9), grid=(9, 5, 3), threadgroup=(4, 3, 2))

    assert (out == 1).all()


@given(
    grid=st.tuples(*[st.integers(1, 40)] * 2, st.integers(1, 4)),
    threadgroup=st.tuples(*[st.integers(1, 10)] * 3),
)
def test_every_thread_of_the_grid_runs_once(grid: Size, threadgroup: Size) -> None:
    source = """
    uint3 p = thread_position_in_grid, size = threads_per_grid;
    atomic_fetch_add_explicit(&out[(p.z * size.y + p.y) * size.x + p.x], 1,
                              memory_order_relaxed);
    """

    out = run(
        source,
        shape=grid[::-1],
        dtype=mx.int32,
        grid=grid,
        threadgroup=threadgroup,
        atomic_outputs=True,
        init_value=0,
    )

    assert (out == 1).all()


def test_a_threadgroup_is_not_larger_than_the_grid() -> None:
    out = each_thread("threads_per_threadgroup.x", grid=10, shape=(10,))

    assert (out == 10).all()


def test_a_thousand_threads_share_a_barrier() -> None:
    source = """
    threadgroup uint hand[1024];
    uint i = thread_index_in_threadgroup;
    hand[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = hand[1023 - i];
    """

    out = run(source, grid=1024, threadgroup=1024, shape=(1024,))

    np.testing.assert_array_equal(out, np.arange(1024)[::-1])


def copy_kernel(**more: Any) -> metal_emulator.MetalKernel:
    source = "out[thread_position_in_grid.x] = a[thread_position_in_grid.x];"
    return metal_kernel(
        name="copy", input_names=["a"], output_names=["out"], source=source, **more
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": []}, r"Expected `inputs` to have size 1 but got size 0"),
        ({"output_shapes": []}, r"Expected `output_shapes` to have size 1"),
        ({"template": [("T", "half")]}, r"Invalid template argument"),
        ({"stream": mx.cpu}, r"Only supports the GPU"),
        (
            {"grid": (2048, 1, 1), "threadgroup": (1025, 1, 1)},
            r"Thread group size \(1025\) is greater than  the maximum allowed",
        ),
        ({"grid": (-1, 1, 1)}, r"grid=\(-1, 1, 1\) must not be negative"),
        ({"threadgroup": (32, 0, 1)}, r"threadgroup=\(32, 0, 1\) must be positive"),
    ],
)
def test_wrong_calls_raise_as_in_mlx(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(copy_kernel(), **changes)


def test_wrong_kernels_raise_as_in_mlx() -> None:
    with pytest.raises(ValueError, match="at least one output"):
        metal_kernel(name="none", input_names=["a"], output_names=[], source="")
    with pytest.raises(ValueError, match="Unknown compile option `speed`"):
        copy_kernel(compile_options={"speed": 1})


def test_templates_do_not_confuse_true_with_one() -> None:
    kernel = metal_kernel(
        name="flag",
        input_names=["a"],
        output_names=["out"],
        source="out[thread_position_in_grid.x] = sizeof(F);",
    )
    (as_bool,) = call(kernel, template=[("F", True)])
    (as_int,) = call(kernel, template=[("F", 1)])

    assert (as_bool[0].item(), as_int[0].item()) == (1, 4)


@pytest.mark.parametrize(
    "transform",
    [mx.compile, mx.vmap, lambda f: lambda x: mx.export_function(print, f, x)],
)
def test_tracing_raises_an_error_that_names_the_remedy(
    transform: Callable[..., Any],
) -> None:
    kernel = copy_kernel()

    with pytest.raises(EmulatorError, match=r"kernel copy: .*mx\.disable_compile\(\)"):
        transform(lambda x: call(kernel, inputs=[x + 1])[0])(FLOATS)


def test_a_kernel_of_mlx_that_was_created_before_is_told_from_other_errors() -> None:
    def raised(message: str) -> list[str]:
        with pytest.raises(RuntimeError) as caught, metal_emulator.emulated():
            raise RuntimeError(message)
        return getattr(caught.value, "__notes__", [])

    (note,) = raised("[metal_kernel] No Metal back-end.")  # what MLX raises
    assert "created before emulated()" in note
    assert raised("another") == []


def test_gradients_pass_through_a_custom_function() -> None:
    kernel = copy_kernel()

    @mx.custom_function
    def copy(x: mx.array) -> mx.array:
        return call(kernel, inputs=[x])[0]

    @copy.vjp
    def copy_vjp(_: object, cotangent: mx.array, __: object) -> mx.array:
        return 3 * cotangent

    gradient = mx.grad(lambda x: copy(x).sum())(FLOATS[:32])

    assert mx.array_equal(gradient, mx.full((32,), 3.0))


def test_verbose_prints_the_generated_text(capsys: pytest.CaptureFixture[str]) -> None:
    call(copy_kernel(), verbose=True)

    assert "[[kernel]] void custom_kernel_copy_float_float(" in capsys.readouterr().out


def test_the_signature_that_mlx_closes_too_early_is_named() -> None:
    kernel = metal_kernel(
        name="early",
        input_names=["a"],
        output_names=["x", "y"],
        source="x[0] = a_shape[0]; y[0] = 1;",
    )

    with pytest.raises(CompileError, match="mention an attribute in the source"):
        call(kernel, output_shapes=[(1,), (1,)], output_dtypes=[mx.float32, mx.float32])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_thousand_launches_do_not_leak() -> None:
    kernel = copy_kernel()
    sizes = [HALVES[: 32 + size].astype(mx.float32) for size in range(7)]

    def resident_bytes() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * mmap.PAGESIZE

    for launch in range(200):
        call(kernel, inputs=[sizes[launch % 7]])
    before = resident_bytes()
    for launch in range(2000):
        call(kernel, inputs=[sizes[launch % 7]])

    assert resident_bytes() - before < 4 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_for_many_sizes_is_given_back() -> None:
    kernel = copy_kernel()

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    for pages in range(600):
        call(kernel, inputs=[mx.zeros((32 + mmap.PAGESIZE // 4 * pages,))])

    assert mappings() - before < 6 * POOL_REGIONS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_the_last_calls_of_a_kernel_stay_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded() -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[-1] for line in maps if line.endswith(".so")})

    module = importlib.import_module("metal_emulator.program")
    monkeypatch.setattr(module, "PROGRAMS", 2)
    kernel = metal_kernel(
        name="templated", input_names=[], output_names=["out"], source="out[0] = N;"
    )
    size = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    outputs = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    gc.collect()
    before = loaded()

    for n in [*range(4), 3, 0]:
        (out,) = kernel(inputs=[], template=[("N", n)], **size, **outputs)
        assert out.item() == n

    gc.collect()
    assert loaded() - before == 2
