"""What the emulator reports about tensor operations."""

from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from support.marks import needs_emulator
from support.matmul2d import LOADS, OPERATION, RUN, STORES, Matmul
from support.profiles import sampled

pytestmark = needs_emulator

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
