"""The static check of tensor operations, and of what old systems lack."""

import mlx.core as mx
import pytest

import metal_emulator
from support.marks import needs_emulator
from support.matmul2d import HEADER, LOADS, OPERATION, RUN, STORES, Matmul

pytestmark = needs_emulator

FENCE = "mem_flags::mem_device, memory_order_release, thread_scope_device"
BODY = OPERATION + LOADS + RUN + STORES


def check(
    body: str = BODY, matmul: Matmul | None = None, macos: str | None = None
) -> None:
    matmul = matmul or Matmul(16, 32, 16)
    metal_emulator.check(
        "tensors",
        ["a", "b", "c"],
        ["y"],
        body,
        HEADER,
        macos=macos,
        calls=[
            {
                "inputs": [
                    mx.zeros(matmul.stored("left"), dtype=dtype),
                    mx.zeros(matmul.stored("right"), dtype=dtype),
                    mx.zeros((matmul.m, matmul.n)),
                ],
                "output_shapes": [(matmul.m, matmul.n)],
                "output_dtypes": [mx.float32],
                "template": matmul.template(dtype),
                "grid": (32, 1, 1),
                "threadgroup": (32, 1, 1),
            }
            for dtype in (mx.float16, mx.bfloat16, mx.float32)
        ],
    )


def test_operations_pass() -> None:
    check(macos="26.2")
    check(macos="26.2.1")
    check(matmul=Matmul(32, 32, 32, True, True))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("execution_simdgroup>", "execution_simdgroups<4>>", "execution_simdgroup"),
        (RUN, "operation.run(right, left, destination);", "no matching member"),
        (RUN, "operation.run(left, right, left);", "no matching member"),
        ("b[at[1]", "&b[at[1]", "assigning to|incompatible"),
        *(
            (f"metal::remove_addrspace_t<{operand}>", operand, "with an address space")
            for operand in ("decltype(left)", "decltype(right)")
        ),
    ],
)
def test_wrong_use_is_refused(before: str, after: str, message: str) -> None:
    assert before in BODY
    with pytest.raises(metal_emulator.CompileError, match=message):
        check(BODY.replace(before, after))


@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 32, 16)])
def test_shape_that_no_simdgroup_multiplies(shape: tuple[int, int, int]) -> None:
    with pytest.raises(metal_emulator.CompileError, match="m, n and k are 16 or 32"):
        check(matmul=Matmul(*shape))


@pytest.mark.parametrize(
    ("macos", "message"),
    [
        ("26.1", "'get_left_input_cooperative_tensor' needs Metal 4.0 and macOS 26.2"),
        ("26", "macOS 26.0 compiles Metal 4.0"),
        ("15.5", "'mpp' needs Metal 4.0 and macOS 26.0; macOS 15.5 compiles Metal 3.2"),
    ],
)
def test_old_system_is_named(macos: str, message: str) -> None:
    with pytest.raises(metal_emulator.CompileError) as caught:
        check(macos=macos)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "macos", "passes"),
    [
        (f"atomic_thread_fence({FENCE});", "15", True),
        (f"atomic_thread_fence({FENCE});", "14.7", False),
        ("bfloat b = bfloat(1.0f);", "14", True),
    ],
)
def test_older_language(text: str, macos: str, passes: bool) -> None:
    kernel = f"kernel void f() {{ {text} }}"
    if passes:
        metal_emulator.check_text(kernel, macos=macos)
    else:
        with pytest.raises(
            metal_emulator.CompileError, match=r"needs Metal 3\.2 and macOS"
        ):
            metal_emulator.check_text(kernel, macos=macos)


def test_system_that_is_no_version() -> None:
    for macos in ("Tahoe", "", "26.", "26.2.1.0"):
        with pytest.raises(ValueError, match=f"macos='{macos}', expected a version"):
            check(macos=macos)
