"""The guard: kernels with planted faults never serve; stock MLX does, and says so."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import cache, emulator, guard, state
from mlx_marlin.backends import launch, planner, repack_launch, selection, source
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.backend import STAGED
from mlx_marlin.guard import known_answers, verdicts
from mlx_marlin.planning.dense_plan import dense_plan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import dispatch, repacking
from mlx_marlin.weights import tile_conversion
from support import guard_faults, oracles
from support.guard_faults import Fault

pytestmark = pytest.mark.skipif(
    emulator.unavailable() is not None, reason="the emulator does not run here"
)
DEVICE = named("Apple M3 Max", None)
N, K = 70, 256
PRODUCTS = ("gemv", "gemm_register", "gemm_staged", "reduce")
"""Kernels of products; those of experts and of layouts are below."""
SPLIT = {"strategy": "split_k", "k_parallel": 2}


@pytest.fixture
def guarded(
    backend: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Path:
    """Switches the guard on, for the emulator, with verdicts in an empty folder."""
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    backend("emulator")
    return tmp_path / "verdicts"


def new_process() -> None:
    """Forgets all that a process remembers, as if another one began."""
    state.reset()


def chosen(kernel: str) -> Callable[[Problem, Any], Plan]:
    """Returns what chooses a plan that launches a kernel, in the scheduler's place."""
    overrides: dict[str, Any] = {
        "gemv": {"kernel": "gemv"},
        "gemm_register": {"kernel": "gemm_register"},
        "gemm_staged": {"kernel": "gemm_staged", "buffers": STAGED[0][0]},
        "reduce": {"kernel": "gemm_register", **SPLIT},
    }

    def choose(problem: Problem, _: Any) -> Plan:
        return planner.make(problem, device=DEVICE, **overrides[kernel])

    return choose


def operands(m: int = 3) -> tuple[mx.array, tuple[mx.array, ...]]:
    w = mx.quantize(mx.random.normal((N, K), key=mx.random.key(1)).astype(mx.float16))
    x = mx.random.normal((m, K), key=mx.random.key(2)).astype(mx.float16)
    return x, w


def is_right(y: mx.array, x: mx.array, w: tuple[mx.array, ...]) -> bool:
    expected = oracles.product(x, *w, group_size=64)
    return oracles.error(y, expected) < oracles.TOLERANCES["float16"]


def collected(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Returns a result and the warnings of getting it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = run()
    return result, [str(each.message) for each in found]


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_a_right_kernel_serves_after_its_check(
    kernel: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "choose", chosen(kernel))
    x, w = operands()
    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert messages == []
    assert mlx_marlin.why_not(x, *w) is None
    assert is_right(y, x, w)
    (verdict,) = guard.verdicts_so_far()
    assert (verdict.state, verdict.fault) == ("passed", "")
    assert kernel in verdict.kernels


@pytest.mark.parametrize("kind", guard_faults.KINDS)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_a_kernel_with_a_fault_never_serves(
    kernel: str, kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "choose", chosen(kernel))
    fault = Fault(kernel, kind).plant(monkeypatch)
    x, w = operands()
    expected = mx.quantized_matmul(x, *w)

    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))

    assert mx.array_equal(y, expected)
    assert fault.built
    assert len(messages) == 1
    assert f"marlin_{kernel}" in messages[0]
    assert "mlx-marlin doctor" in messages[0]
    reason = mlx_marlin.why_not(x, *w)
    assert reason is not None
    assert "failed its check on this machine" in reason

    new_process()
    built, called = fault.built, fault.called
    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
    assert mx.array_equal(y, expected)
    assert mlx_marlin.why_not(x, *w) == reason
    assert (fault.built, fault.called) == (built, called)
    assert len(messages) == 1


@pytest.mark.parametrize("kind", guard_faults.KINDS)
def test_experts_kernel_with_a_fault_never_serves(
    kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("gather", kind).plant(monkeypatch)
    w = mx.quantize(mx.random.normal((3, N, K), key=mx.random.key(1)))
    x = mx.random.normal((4, 1, K), key=mx.random.key(2))
    experts = mx.array([2, 0, 2, 2])
    expected = mx.gather_qmm(x, *w, rhs_indices=experts)

    def run() -> mx.array:
        return mlx_marlin.gather_qmm(x, *w, rhs_indices=experts)

    y, messages = collected(run)
    assert mx.array_equal(y, expected)
    assert len(messages) == 1
    new_process()
    called = fault.called
    y, messages = collected(run)
    assert mx.array_equal(y, expected)
    assert (fault.called, len(messages)) == (called, 1)


@pytest.mark.parametrize("kind", guard_faults.KINDS)
def test_a_decoding_kernel_with_a_fault_never_serves(
    kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("dequantize", kind).plant(monkeypatch)
    x, w = operands()
    packed = mlx_marlin.pack(*w)
    rows = x[:, :N]
    expected = mx.quantized_matmul(rows, *w, transpose=False)

    y, messages = collected(
        lambda: mlx_marlin.quantized_matmul(rows, packed, transpose=False)
    )
    assert mx.array_equal(y, expected)
    assert len(messages) == 1
    reason = mlx_marlin.why_not(rows, packed, transpose=False)
    assert reason is not None
    assert "marlin_dequantize" in reason


@pytest.mark.parametrize("kind", guard_faults.OF_CODES)
@pytest.mark.parametrize("to", ["marlin", "mlx"])
def test_a_repack_kernel_with_a_fault_moves_nothing(
    to: str, kind: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repacking, "_on_gpu", lambda: True)
    name = "pack" if to == "marlin" else "unpack"
    Fault(name, kind).plant(monkeypatch)
    _, w = operands()

    packed, messages = collected(lambda: mlx_marlin.pack(*w))
    back, more = collected(lambda: mlx_marlin.unpack(packed))

    assert len(messages + more) == 1
    for one, other in zip(back, w, strict=True):
        assert mx.array_equal(one, other)
    form = {"bits": 4, "group_size": 64}
    assert mx.array_equal(
        packed.words, tile_conversion.tiles_of_rows(w[0], N, K, **form)
    )


def test_pack_reads_back_what_it_wrote(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that the small known answer does not show loses no weight either."""
    monkeypatch.setattr(repacking, "_on_gpu", lambda: True)
    right = repack_launch.repack
    large: list[int] = []

    def repack(to: str, *, n: int, **form: Any) -> Callable[[mx.array], mx.array]:
        move = right(to, n=n, **form)
        if n != N or to != "marlin":
            return move
        large.append(n)
        return lambda w: move(w) ^ 1

    monkeypatch.setattr(repacking, "repack", repack)
    _, w = operands()
    packed, messages = collected(lambda: mlx_marlin.pack(*w))

    assert large == [N]
    assert len(messages) == 1
    assert "wrong codes" in messages[0]
    assert mx.array_equal(mlx_marlin.unpack(packed)[0], w[0])
    # And it is known for the next weight, of any process.
    new_process()
    _, messages = collected(lambda: mlx_marlin.pack(*w))
    assert (large, len(messages)) == ([N], 1)


def test_pack_raises_where_codes_cannot_be_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = tile_conversion.tiles_of_rows
    monkeypatch.setattr(
        tile_conversion,
        "tiles_of_rows",
        lambda *given, **form: right(*given, **form) ^ 1,
    )
    _, w = operands()
    with pytest.raises(RuntimeError, match="256→70 of 4 bits in groups of 64"):
        mlx_marlin.pack(*w)


def test_invariant_products_raise_instead(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("gemm_register", "wrong factor").plant(monkeypatch)
    x, w = operands()
    with (
        pytest.warns(RuntimeWarning, match="marlin_gemm_register failed"),
        pytest.raises(ValueError, match=r"invariant=True.*failed its check"),
    ):
        mlx_marlin.linear(x, *w, invariant=True)
    with pytest.raises(ValueError, match=r"invariant=True.*failed its check"):
        mlx_marlin.linear(x, *w, invariant=True)


def test_experts_that_must_not_vary_raise_instead(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("gather", "zeros").plant(monkeypatch)
    w = mx.quantize(mx.random.normal((3, N, K)))
    experts = mx.array([2, 0])
    x = mx.random.normal((2, 1, K))
    with (
        pytest.warns(RuntimeWarning, match="marlin_gather failed"),
        pytest.raises(ValueError, match=r"invariant=True.*failed its check"),
    ):
        mlx_marlin.gather_qmm(x, *w, rhs_indices=experts, invariant=True)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        ("affine", 3, 16),
        ("affine", 5, "channel"),
        ("symmetric", 4, 256),
        ("zero_point", 6, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    ],
)
def test_packed_weights_are_unpacked_without_our_kernels(
    mode: str,
    bits: int,
    group_size: Any,
    guarded: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kernel in ("gemv", "gemm_register", "unpack", "dequantize"):
        Fault("", "factory raises").plant(monkeypatch)  # every kernel of ours
        assert kernel
    monkeypatch.setattr(repacking, "_on_gpu", lambda: True)
    w = mx.random.normal((N, K), key=mx.random.key(1))
    form = {"bits": bits, "group_size": group_size, "mode": mode}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mode == "zero_point":
            codes, scales, _ = mx.quantize(w, 32, bits)
            zeros = mx.full(scales.shape, 3.0)
            packed = mlx_marlin.pack(codes, scales, zeros, **form)
        else:
            packed = mlx_marlin.quantize(w, **form)
        x = mx.random.normal((3, K), key=mx.random.key(2))
        y = mlx_marlin.quantized_matmul(x, packed)
        back = mlx_marlin.quantized_matmul(y, packed, transpose=False)
    problem = Problem(
        m=3,
        n=N,
        k=K,
        bits=bits,
        group_size=packed.group_size,
        mode=mode,
        dtype="float32",
        scale_dtype=str(packed.dtype).removeprefix("mlx.core."),
        layout="marlin",
    )
    plain = launch_free_weight(problem, packed)
    assert mx.allclose(y, x @ plain.T, rtol=1e-4, atol=1e-4)
    assert mx.allclose(back, y @ plain, rtol=1e-4, atol=1e-3)


def launch_free_weight(problem: Problem, packed: Any) -> mx.array:
    """Returns the weight that a packed one stands for, by `guard.operands`."""
    from mlx_marlin.guard import operands as own
    from mlx_marlin.weights.bit_streams import codes_of_words

    form = {"bits": problem.bits, "group_size": problem.group_size}
    words = tile_conversion.rows_of_tiles(packed.words, problem.n, problem.k, **form)
    parameters = problem.format.parameters
    stored = tile_conversion.deinterleave(
        packed.scales, problem.n, problem.groups, parameters
    )
    third = stored[1] if parameters == 2 else stored[0]
    numbers = own._numbers(problem, codes_of_words(words, problem.bits))
    exact, _ = own._decode(problem, numbers, stored[0], third)
    return exact.astype(mx.float32)


def test_a_trace_checks_with_constants_and_holds_no_check(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("gemv", "wrong factor").plant(monkeypatch)
    x, w = operands(m=1)

    def product(x: mx.array) -> mx.array:
        return mlx_marlin.quantized_matmul(x, *w)

    expected = mx.quantized_matmul(x, *w)
    with pytest.warns(RuntimeWarning, match="marlin_gemv failed"):
        compiled = mx.compile(product)(x)
    assert mx.array_equal(compiled, expected)
    assert fault.called == 1
    gradient = mx.grad(lambda x: product(x).sum())(x)
    assert mx.array_equal(
        gradient, mx.quantized_matmul(mx.ones((1, N), mx.float16), *w, transpose=False)
    )
    assert fault.called == 1


def test_without_a_device_nothing_is_checked_or_exported(
    backend: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.metal.is_available():
        pytest.skip("there is a Metal device here")
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    backend("metal")
    ran: list[Any] = []
    monkeypatch.setattr(known_answers, "fault_of", ran.append)
    # MLX cannot export a function with derivatives of its own.
    monkeypatch.setattr(dispatch, "differentiable", lambda ours, *_: ours)
    x, w = operands()
    mx.eval(x, w)
    names: list[str] = []

    def note(node: dict[str, Any]) -> None:
        if node["type"] == "primitive":
            names.append(node["name"])

    mx.export_function(note, lambda x: mlx_marlin.quantized_matmul(x, *w), x)
    assert ran == []
    assert names == ["CustomKernel"]


def test_zero_switches_the_guard_off(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "0")
    Fault("gemv", "wrong factor").plant(monkeypatch)
    x, w = operands(m=1)
    y = mlx_marlin.quantized_matmul(x, *w)
    assert not is_right(y, x, w)
    assert not guarded.exists()


def test_on_the_emulator_a_broken_kernel_raises_by_default(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(guard.ENVIRONMENT)
    Fault("gemv", "body does not compile").plant(monkeypatch)
    x, w = operands(m=1)
    with pytest.raises(emulator.CompileError):
        mlx_marlin.quantized_matmul(x, *w)


def test_other_values_of_the_switch_are_refused(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "yes")
    x, w = operands(m=1)
    with pytest.raises(ValueError, match="MLX_MARLIN_GUARD='yes', expected 0, 1"):
        mlx_marlin.quantized_matmul(x, *w)


DYING = """
import os, sys
from pathlib import Path
import mlx.core as mx
import mlx_marlin
from mlx_marlin.backends import kernels
from mlx_marlin.guard import verdicts

verdicts.folder = lambda: Path(sys.argv[1])
kernels._factory = lambda: lambda **_: lambda **_: os._exit(7)
w = mx.quantize(mx.ones((70, 256)))
mlx_marlin.quantized_matmul(mx.ones((1, 256)), *w)
"""


def test_a_process_that_dies_in_the_check_counts_as_failed(guarded: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DYING, str(guarded)], check=False)
    assert died.returncode == 7
    x = mx.ones((1, K))
    w = mx.quantize(mx.ones((N, K)))
    y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
    assert mx.array_equal(y, mx.quantized_matmul(x, *w))
    assert len(messages) == 1
    assert verdicts.DIED in messages[0]


def test_an_interrupted_check_is_made_again(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(m=1)
    with monkeypatch.context() as patch:

        def interrupted(_: Any) -> str:
            raise KeyboardInterrupt

        patch.setattr(known_answers, "fault_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mlx_marlin.quantized_matmul(x, *w)
    assert guard.verdicts_so_far() == []
    assert mlx_marlin.why_not(x, *w) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[malloc] Unable to allocate 4096 bytes."),
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"),
        RuntimeError(
            "Failed to compile kernel: a.cu.\ncatastrophic error: cannot open source "
            'file "cuda_fp16.h"'
        ),
        OSError(28, "No space left on device"),
        ImportError("libnvrtc.so.12: cannot open shared object file"),
    ],
    ids=lambda error: str(error)[:24] or "MemoryError",
)
def test_a_check_that_cannot_be_made_is_made_again_by_the_next_process(
    error: Exception, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(m=1)
    tried: list[Any] = []
    with monkeypatch.context() as patch:

        def fails(plan: Any) -> str:
            tried.append(plan)
            raise error

        patch.setattr(known_answers, "fault_of", fails)
        for _ in range(2):
            y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
            assert mx.array_equal(y, mx.quantized_matmul(x, *w))
            (verdict,) = guard.verdicts_so_far()
            assert verdict.state == "undecided"
            assert len(messages) == 1
            assert "could not be checked" in messages[0]
            assert "The next process checks it again" in messages[0]
            # This process neither tries nor warns again.
            _, more = collected(lambda: mlx_marlin.quantized_matmul(x[0], *w))
            assert more == []
            new_process()
            assert guard.verdicts_so_far() == []
    assert len(tried) == 2
    assert mlx_marlin.why_not(x, *w) is None
    assert [each.state for each in guard.verdicts_so_far()] == ["passed"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": "passed"}', "\x00", "null", "[" * 100000]
)
def test_a_damaged_verdict_is_made_anew(text: str, guarded: Path) -> None:
    x, w = operands(m=1)
    mlx_marlin.quantized_matmul(x, *w)
    (file,) = guarded.glob("*/*.json")
    file.write_text(text)
    new_process()
    assert mlx_marlin.why_not(x, *w) is None
    (verdict,) = guard.verdicts_so_far()
    assert verdict.state == "passed"


def test_where_nothing_can_be_written_each_process_checks(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.write_text("a file in the folder's place")
    fault = Fault("gemv", "zeros").plant(monkeypatch)
    x, w = operands(m=1)
    for nth in (1, 2):
        y, messages = collected(lambda: mlx_marlin.quantized_matmul(x, *w))
        assert mx.array_equal(y, mx.quantized_matmul(x, *w))
        assert (fault.called, len(messages)) == (nth, 1)
        new_process()


def test_another_kernel_text_has_no_verdict_yet(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner.make(problem_of(1, N, K), device=DEVICE, kernel="gemv")
    own = guard.variants_of(plan)
    changed = [
        guard.KernelVariant(
            source=type(each.source)(
                **{
                    name: getattr(each.source, name)
                    for name in each.source.__slots__
                    if name != "source"
                },
                source=each.source.source + " ",
            ),
            template=each.template,
            dtypes=each.dtypes,
        )
        for each in own
    ]
    assert guard.digest(own) != guard.digest(tuple(changed))
    assert guard.digest(own) == guard.digest(guard.variants_of(plan))


def test_verdicts_of_other_versions_are_left_out(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(m=1)
    with monkeypatch.context() as patch:
        patch.setattr(source, "digest_of_shaders", lambda: "another version")
        patch.setattr(known_answers, "fault_of", lambda _: "planted")
        with pytest.warns(RuntimeWarning, match="planted"):
            mlx_marlin.quantized_matmul(x, *w)
        assert [each.fault for each in guard.verdicts_so_far()] == ["planted"]
    new_process()
    assert guard.verdicts_so_far() == []

    # A kernel that is the same in both versions is not checked again.
    with pytest.warns(RuntimeWarning, match="planted"):
        mlx_marlin.quantized_matmul(x, *w)
    new_process()
    assert [each.fault for each in guard.verdicts_so_far()] == ["planted"]


def test_the_digest_of_shaders_changes_with_each_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(source.shader_folder(), tmp_path / "shaders")
    monkeypatch.setattr(source, "shader_folder", lambda: tmp_path / "shaders")
    digest = source.digest_of_shaders.__wrapped__
    assert digest() == source.digest_of_shaders()
    for file in ("lib/work.metal", "kernels/gemv.metal", "cuda/prelude.cuh"):
        before = digest()
        changed = tmp_path / "shaders" / file
        changed.write_text(changed.read_text() + " ")
        assert digest() != before


def test_a_plan_of_tuning_is_checked_too(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault("dequantize", "zeros").plant(monkeypatch)
    plan = dense_plan(problem_of(300, N, K, layout="marlin"))
    with pytest.warns(RuntimeWarning, match="marlin_dequantize failed"):
        assert guard.why_not(plan) is not None
    assert launch.plans_built() == []


def test_condemned_kernels_stay_condemned(guarded: Path) -> None:
    x, w = operands(m=1)
    plan = planner.choose(problem_of(1, N, K), DEVICE)
    assert mlx_marlin.why_not(x, *w) is None
    with pytest.warns(RuntimeWarning, match="found by tuning"):
        guard.condemn(plan, "found by tuning")
    new_process()
    with pytest.warns(RuntimeWarning, match="found by tuning"):
        assert mlx_marlin.why_not(x, *w) is not None


def test_backends_that_need_no_check_have_none(
    backend: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    backend("stock")
    assert not guard.is_on()
    assert selection.backend() == "stock"


@pytest.mark.skipif(not mx.metal.is_available(), reason="no Metal device here")
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_on_a_mac_the_usual_kernels_pass(
    m: int, guarded: Path, backend: Callable[[str | None], None]
) -> None:
    backend("metal")
    for dtype in ("float16", "bfloat16"):
        for layout in ("mlx", "marlin"):
            problem = problem_of(m, 4096, 4096, dtype=dtype, layout=layout)
            assert guard.why_not(planner.choose(problem, DEVICE)) is None


def test_a_umask_of_groups_loses_no_verdict(
    guarded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "root", lambda: tmp_path / "new" / "mlx_marlin")
    monkeypatch.setattr(verdicts, "folder", lambda: cache.root() / "verdicts")
    before = os.umask(0o002)
    try:
        x, w = operands(m=1)
        mlx_marlin.quantized_matmul(x, *w)
        (verdict,) = guard.verdicts_so_far()
        plan = planner.choose(problem_of(1, N, K), DEVICE)
        with pytest.warns(RuntimeWarning, match="wrong by hand"):
            guard.condemn(plan, "wrong by hand")
    finally:
        os.umask(before)
    assert verdict.state == "passed"
    assert [each.state for each in guard.verdicts_so_far()] == ["failed"]


def test_without_locks_verdicts_are_kept_all_the_same(
    guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(verdicts.fcntl, "flock", flock)
    x, w = operands(m=1)
    mlx_marlin.quantized_matmul(x, *w)
    assert [each.state for each in guard.verdicts_so_far()] == ["passed"]


def test_an_undecided_check_leaves_the_file_that_others_lock(tmp_path: Path) -> None:
    file = tmp_path / "place" / "key.json"
    verdict = partial(
        verdicts.Verdict, kernels="k", fault="", example="e", date="d", shaders="s"
    )
    undecided = verdict(state="undecided")
    found = verdicts.checked(file, verdict(state="started"), lambda: undecided)
    assert found == undecided
    assert file.exists()
    assert verdicts.read(file) is None
    passed = verdict(state="passed")
    assert verdicts.checked(file, verdict(state="started"), lambda: passed) == passed
    assert verdicts.read(file) == passed
