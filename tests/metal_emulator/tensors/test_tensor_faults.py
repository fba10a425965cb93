"""What the emulator reports about tensor operations."""

import mlx.core as mx
import pytest

import metal_emulator
from support.marks import needs_emulator
from support.matmul2d import LOADS, OPERATION, RUN, STORES, Matmul

pytestmark = needs_emulator

SMALL = Matmul(16, 32, 16)
LANE = "uint lane = thread_position_in_threadgroup.x;\n"


def run(body: str, matmul: Matmul = SMALL, lanes: int = 32) -> mx.array:
    arrays = (
        mx.ones(matmul.stored(name), dtype=mx.float16)
        for name in ("left", "right", "destination")
    )
    a, b, c = arrays
    return matmul.run(a, b, c.astype(mx.float32), LANE + OPERATION + body, lanes)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("operand", "role", "capacity"),
    [
        ("left", "left operand", 8),
        ("right", "right operand", 16),
        ("destination", "destination", 16),
    ],
)
def test_index_beyond_the_capacity(
    operand: str, role: str, capacity: int, traced: bool
) -> None:
    message = (
        rf"kernel tensors: matmul2d\(16,32,16\): a lane holds {capacity} elements of "
        rf"the {role}, the kernel uses element {capacity}\n"
        rf".*simdgroup 0 lane 0\n  at source line \d+: {operand}\[{capacity}\] = 1;"
    )
    with (
        metal_emulator.emulated(trace=traced),
        pytest.raises(metal_emulator.EmulatorError, match=message),
    ):
        run(f"{LOADS}\n{operand}[{capacity}] = 1;\n{RUN}{STORES}")


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("operand", "role"),
    [
        ("left", "left operand"),
        ("right", "right operand"),
        ("destination", "destination"),
    ],
)
def test_element_that_was_never_set(operand: str, role: str, traced: bool) -> None:
    loads = LOADS.replace(f"  {operand}[i] =", f"  if (i != 5) {operand}[i] =")
    message = (
        rf"matmul2d\(16,32,16\) reads the {role}, of which the kernel has never set "
        r"element 5\n.*\n  at source line \d+: operation.run"
    )
    with (
        metal_emulator.emulated(trace=traced),
        pytest.raises(metal_emulator.EmulatorError, match=message),
    ):
        run(loads + RUN + STORES)


def test_nan_of_the_data_is_no_fault() -> None:
    y = run(f"{LOADS}\nleft[0] = half(NAN);\n{RUN}{STORES}")
    assert mx.isnan(y).any().item()


def test_missing_lane() -> None:
    message = r"matmul2d\(16,32,16\) with missing lanes in simdgroup 0"
    with pytest.raises(metal_emulator.EmulatorError, match=message):
        run(f"{LOADS}\nif (lane < 31) {RUN}\n{STORES}")


def test_incomplete_simdgroup() -> None:
    message = r"matmul2d\(16,32,16\) in an incomplete simdgroup"
    with pytest.raises(metal_emulator.EmulatorError, match=message):
        run(LOADS + RUN + STORES, lanes=31)


VIEW = """
metal::tensor<device half, metal::dextents<int32_t, 2>, metal::tensor_inline> view(
    (device half*)b, metal::dextents<int32_t, 2>(32, 16));
"""


@pytest.mark.parametrize(
    "call",
    [
        RUN,
        "operation.run(left, view, destination);",
        "right.load(view);",
        "right.store(view);",
    ],
)
@pytest.mark.parametrize("before", ["", "left[0] = 2;\n"])
def test_lanes_in_different_operations(call: str, before: str) -> None:
    branches = f"if (lane < 16) {{ {before}{call}\n}} else {{\n{call}\n}}\n"
    with pytest.raises(metal_emulator.EmulatorError, match="in different operations"):
        run(LOADS + VIEW + branches + STORES)


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
    with pytest.raises(metal_emulator.CompileError, match=message):
        run(LOADS + RUN + STORES, Matmul(*shape))


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
    with (
        metal_emulator.emulated(trace=True),
        pytest.raises(
            metal_emulator.EmulatorError, match="race between threads on byte"
        ),
    ):
        run(body)
