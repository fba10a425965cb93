"""Tensor operations: what they compute, and their faults."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

import metal_emulator
from metal_emulator.modes import TENSOR_LAYOUTS
from support.marks import needs_emulator
from support.matmul2d import HEADER, LOADS, OPERATION, RUN, STORES, Matmul
from support.profiles import sampled

pytestmark = needs_emulator

Numbers = npt.NDArray[np.float32]

SHAPES = [(16, 32, 16), (16, 16, 32), (32, 16, 16), (32, 32, 16), (16, 32, 32)]
SHAPES += [(32, 32, 32)]


def m5_index(operand: str, shape: Matmul, lane: int, element: int) -> tuple[int, int]:
    """Column and row of an element on an M5, written from the published table."""
    fragment, inside = divmod(element, 8)
    row = (lane >> 2 & 4 | lane >> 1 & 3) + 8 * (inside >> 2)
    column = 4 * (lane >> 2 & 2 | lane & 1) + (inside & 3)
    if operand == "left":
        outer, inner = divmod(fragment, shape.k // 16)
        first, second = (inner, outer) if shape.transpose_left else (outer, inner)
    elif operand == "right":  # k outside, also if it is transposed
        outer, inner = divmod(fragment, shape.n // 16)
        first, second = (inner, outer) if shape.transpose_right else (outer, inner)
    else:
        first, second = divmod(fragment, shape.n // 16)
    return 16 * second + column, 16 * first + row


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@sampled(6)
def test_elements_lie_where_an_m5_holds_them(
    shape: tuple[int, int, int], transposed: bool
) -> None:
    matmul = Matmul(*shape, transposed, transposed)
    operands = ("left", "right", "destination")
    most = 32
    loops = (
        f"""
        for (ushort i = 0; i < {operand}.get_capacity(); ++i) {{
          auto at = {operand}.get_multidimensional_index(i);
          y[2 * (({32 * nth} + lane) * {most} + i)] = at[0];
          y[2 * (({32 * nth} + lane) * {most} + i) + 1] = at[1];
        }}
        """
        for nth, operand in enumerate(operands)
    )
    (found,) = metal_emulator.metal_kernel(
        name="indices",
        input_names=[],
        output_names=["y"],
        header=HEADER,
        source=f"{OPERATION}\nuint lane = thread_position_in_grid.x;\n{''.join(loops)}",
    )(
        inputs=[],
        output_shapes=[(3, 32, most, 2)],
        output_dtypes=[mx.int32],
        template=matmul.template(mx.float16),
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        init_value=-1,
    )
    for nth, operand in enumerate(operands):
        capacity = math.prod(matmul.stored(operand)) // 32
        assert found[nth].tolist() == [
            [[*m5_index(operand, matmul, lane, i)] for i in range(capacity)]
            + [[-1, -1]] * (most - capacity)
            for lane in range(32)
        ]


def in_order(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """c + a @ b in float32, k ascending, one rounding for each addition."""
    total = c.copy()
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    return total


def drawn(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def float32(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("transpose_right", [False, True])
@pytest.mark.parametrize("transpose_left", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@sampled(8)
def test_product_adds_k_in_order(
    shape: tuple[int, int, int],
    transpose_left: bool,
    transpose_right: bool,
    dtype: mx.Dtype,
    layout: str,
) -> None:
    matmul = Matmul(*shape, transpose_left, transpose_right)
    a = drawn(1, *matmul.stored("left")).astype(dtype)
    b = drawn(2, *matmul.stored("right")).astype(dtype)
    c = drawn(3, matmul.m, matmul.n)
    with metal_emulator.emulated(tensor_layout=layout):
        y = matmul.run(a, b, c)
    left = float32(a).T if transpose_left else float32(a)
    right = float32(b).T if transpose_right else float32(b)
    np.testing.assert_array_equal(np.array(y), in_order(left, right, np.array(c)))


def test_trace_mode_counts_operations_and_changes_nothing() -> None:
    matmul = Matmul(16, 32, 32, False, True)
    a, b = drawn(1, 16, 32).astype(mx.float16), drawn(2, 32, 32).astype(mx.float16)
    c = drawn(3, 16, 32)
    results: list[mx.array] = []
    (counters,) = metal_emulator.trace(lambda: results.append(matmul.run(a, b, c)))
    assert counters.count("tensor") == 1
    assert "matmul2d(16,32,32)" in counters.table()
    assert mx.array_equal(results[0], matmul.run(a, b, c))


def test_multiply_ignores_the_destination() -> None:
    matmul = Matmul(16, 32, 16, mode="multiply")
    a, b = drawn(1, 16, 16).astype(mx.float16), drawn(2, 16, 32).astype(mx.float16)
    y = matmul.run(a, b, mx.full((16, 32), float("nan")))
    expected = in_order(float32(a), float32(b), np.zeros((16, 32), np.float32))
    np.testing.assert_array_equal(np.array(y), expected)


@pytest.mark.parametrize(
    ("dtype", "relaxed", "given", "expected"),
    [
        (mx.float32, False, 1 + 2.0**-11 + 2.0**-12, 1 + 2.0**-11 + 2.0**-12),
        (mx.float32, True, 1 + 2.0**-11 + 2.0**-12, 1 + 2.0**-10),
        (mx.float16, True, 1 + 2.0**-10, 1 + 2.0**-10),
    ],
)
def test_relaxed_precision_keeps_ten_bits(
    dtype: mx.Dtype, relaxed: bool, given: float, expected: float
) -> None:
    a, b = mx.full((16, 16), given, dtype), mx.eye(16, 32).astype(dtype)
    y = Matmul(16, 32, 16, relaxed=relaxed).run(a, b, mx.zeros((16, 32)))
    assert (y[:, :16] == expected).all().item()


def test_elements_filled_by_the_m5_table_fail_in_another_layout() -> None:
    source = f"""
    {OPERATION}
    uint lane = thread_position_in_grid.x;
    ushort row = (lane >> 2 & 4) | (lane >> 1 & 3);
    ushort column = ((lane >> 2 & 2) | (lane & 1)) * 4;
    for (ushort i = 0; i < 8; ++i) {{
      ushort at = row + i / 4 * 8, next = column + i % 4;
      left[i] = a[at * 16 + next];
      for (ushort n = 0; n < 32; n += 16) {{
        right[i + n / 2] = b[at * 32 + n + next];
        destination[i + n / 2] = 0;
      }}
    }}
    operation.run(left, right, destination);
    for (ushort i = 0; i < 16; ++i)
      y[(row + i % 8 / 4 * 8) * 32 + i / 8 * 16 + column + i % 4] = destination[i];
    """
    a, b = drawn(1, 16, 16).astype(mx.float16), drawn(2, 16, 32).astype(mx.float16)
    expected = float32(a) @ float32(b)
    errors = {}
    for layout in TENSOR_LAYOUTS:
        with metal_emulator.emulated(tensor_layout=layout):
            y = Matmul(16, 32, 16).run(a, b, mx.zeros((16, 32)), source)
        errors[layout] = np.abs(np.array(y) - expected).max()
    assert errors["m5"] < 1e-4
    assert min(errors["g16"], errors["scrambled"]) > 1


def test_unknown_layout_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"tensor_layout='m9' is not one of"),
        metal_emulator.emulated(tensor_layout="m9"),
    ):
        pass


SMALL = Matmul(16, 32, 16)
LANE = "uint lane = thread_position_in_threadgroup.x;\n"


CAPACITIES = {"left": 8, "right": 16, "destination": 16}
ROLES = {"left": "left operand", "right": "right operand", "destination": "destination"}
modes = pytest.mark.parametrize("traced", [False, True])
operands = pytest.mark.parametrize("operand", CAPACITIES)


def run(body: str, matmul: Matmul = SMALL, lanes: int = 32, case: int = 1) -> mx.array:
    """Runs a body on ones and, as c, the number of one of its cases."""
    a, b, c = (
        mx.full(matmul.stored(name), value, mx.float16)
        for name, value in (("left", 1), ("right", 1), ("destination", case))
    )
    return matmul.run(a, b, c.astype(mx.float32), LANE + OPERATION + body, lanes)


def refused(
    message: str, body: str, traced: bool = False, **options: Any
) -> pytest.ExceptionInfo[metal_emulator.EmulatorError]:
    with (
        metal_emulator.emulated(trace=traced),
        pytest.raises(metal_emulator.EmulatorError, match=message) as caught,
    ):
        run(body, **options)
    return caught


def faulty() -> str:
    """Returns a product with the faults of the next two tests, chosen by c."""
    loads, beyond = LOADS, ""
    for nth, (operand, capacity) in enumerate(CAPACITIES.items()):
        loads = loads.replace(
            f"  {operand}[i] =", f"  if (i != 5 || c[0] != {nth}) {operand}[i] ="
        )
        beyond += f"if (c[0] == {3 + nth}) {operand}[{capacity}] = 1;\n"
    return loads + beyond + RUN + STORES


@modes
@operands
def test_index_beyond_the_capacity(operand: str, traced: bool) -> None:
    capacity = CAPACITIES[operand]
    message = (
        rf"kernel tensors: matmul2d\(16,32,16\): a lane holds {capacity} elements of "
        rf"the {ROLES[operand]}, the kernel uses element {capacity}\n"
        rf".*simdgroup 0 lane 0\n  at source line \d+: .*{operand}\[{capacity}\] = 1;"
    )
    refused(message, faulty(), traced, case=3 + [*CAPACITIES].index(operand))


@modes
@operands
def test_element_that_was_never_set(operand: str, traced: bool) -> None:
    message = (
        rf"matmul2d\(16,32,16\) reads the {ROLES[operand]}, of which the kernel has "
        r"never set element 5\n.*\n  at source line \d+: operation.run"
    )
    refused(message, faulty(), traced, case=[*CAPACITIES].index(operand))


def test_nan_of_the_data_is_no_fault() -> None:
    y = run(f"{LOADS}\nleft[0] = half(NAN);\n{RUN}{STORES}")
    assert mx.isnan(y).any().item()


def test_missing_lane() -> None:
    message = r"matmul2d\(16,32,16\) with missing lanes in simdgroup 0"
    refused(message, f"{LOADS}\nif (lane < 31) {RUN}\n{STORES}")


def test_incomplete_simdgroup() -> None:
    message = r"matmul2d\(16,32,16\) in an incomplete simdgroup"
    refused(message, LOADS + RUN + STORES, lanes=31)


VIEW = """
metal::tensor<device half, metal::dextents<int32_t, 2>, metal::tensor_inline> view(
    (device half*)b, metal::dextents<int32_t, 2>(32, 16));
"""


CALLS = (
    RUN,
    "operation.run(left, view, destination);",
    "right.load(view);",
    "right.store(view);",
)
BRANCHES = [
    f"if (lane < 16) {{ {before}{call}\n}} else {{\n{call}\n}}\n"
    for call in CALLS
    for before in ("", "left[0] = 2;\n")
]


@sampled(3, 8)
@pytest.mark.parametrize("case", range(len(BRANCHES)))
def test_lanes_in_different_operations(case: int) -> None:
    chosen = (f"if (c[0] == {nth}) {{ {each} }}\n" for nth, each in enumerate(BRANCHES))
    body = f"{LOADS}{VIEW}{''.join(chosen)}{STORES}"
    refused("in different operations", body, case=case)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((8, 32, 16), "multiples of 16"),
        ((16, 16, 16), "one of them 32"),
        ((64, 32, 16), "m, n and k are 16 or 32"),
    ],
)
def test_shape_that_no_simdgroup_multiplies(
    shape: tuple[int, int, int], message: str
) -> None:
    caught = refused(message, LOADS + RUN + STORES, matmul=Matmul(*shape))
    assert caught.type is metal_emulator.CompileError


def test_several_simdgroups_are_refused() -> None:
    body = (OPERATION + LOADS + RUN + STORES).replace(
        "execution_simdgroup>", "execution_simdgroups<4>>"
    )
    x = mx.ones((16, 32))
    with pytest.raises(metal_emulator.CompileError, match="metal::execution_simdgroup"):
        SMALL.run(x, x, x, body)


def test_operation_is_no_barrier() -> None:
    body = f"""
    threadgroup half row[32];
    row[lane] = a[lane];
    {LOADS}
    {RUN}
    destination[0] += row[lane ^ 1];
    {STORES}
    """
    refused("race between threads on byte", body, traced=True)
