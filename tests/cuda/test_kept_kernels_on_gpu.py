"""Kept kernels on a GPU: MLX takes them, and results have the bits of its own."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_marlin import cache, state
from mlx_marlin.backends import devices, graph, planner
from mlx_marlin.backends.cuda.compiling import kernel_text, toolchain
from mlx_marlin.backends.launch import Launch, Operand, Output
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.problem import problem_of

pytestmark = [
    pytest.mark.skipif(
        not mx.cuda.is_available(), reason="MLX has no CUDA device here"
    ),
    pytest.mark.cuda,
]

SOURCE = Source(
    name="kept",
    input_names=("x",),
    output_names=("out",),
    header="",
    source="out[threadIdx.x] = T(2) * x[threadIdx.x];",
)


def launched(source: Source) -> mx.array:
    kernel = mx.fast.cuda_kernel(
        name=source.name,
        input_names=list(source.input_names),
        output_names=list(source.output_names),
        header=source.header,
        source=source.source,
    )
    (result,) = kernel(
        inputs=[mx.arange(32).astype(mx.float16)],
        template=[("T", mx.float16)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float16],
    )
    return result


@pytest.mark.parametrize("keep", [True, False])
def test_mlx_takes_the_kernel_from_its_folder(keep: bool) -> None:
    """The kept machine code multiplies by three, so that it can be told from MLX's."""
    source = replace(SOURCE, header=f"// {keep}\n")
    launch = Launch(
        source=source,
        template=(("T", "float16"),),
        inputs=(Operand(name="x", dtype="float16"),),
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        outputs=(Output("out", "float16", (1,)),),
    )
    text = kernel_text.text(launch)
    chain = toolchain.here()
    assert chain is not None
    name = kernel_text.kernel_name(launch, text)
    folder = kernel_text.folder(chain.mlx)
    if keep:
        other = chain.compile(
            text.replace("T(2)", "T(3)"), kernel_text.qualified(launch)
        )
        kernel_text.place(folder, name, launch, other)

    try:
        result = launched(source)
        mx.eval(result)
    finally:
        for suffix in (".ptx", ".txt"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)

    assert result.tolist() == [(3 if keep else 2) * i for i in range(32)]


@pytest.mark.parametrize("m", [1, 16, 64])
def test_products_have_the_bits_of_mlxs_machine_code(
    m: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "root", lambda: tmp_path / "mlx_marlin")
    n, k = 512, 2048
    problem = problem_of(m=m, n=n, k=k, group_size=128, layout="marlin")
    x = mx.random.normal((m, k)).astype(mx.float16)
    words = mx.random.randint(0, 2**31 - 1, (n // 32, k // 64, 256)).astype(mx.uint32)
    scales = mx.random.normal((n // 32, k // 128, 64)).astype(mx.float16)
    results = []
    here = toolchain.here
    for chain in (lambda: None, here, here):  # MLX's, compiled and kept, found again
        monkeypatch.setattr(toolchain, "here", chain)
        state.reset()
        plan = planner.make(problem, device=devices.current())
        product = graph.product(plan, listed=False)
        results.append(product(x, words, scales, scales))
        mx.eval(results[-1])
    monkeypatch.undo()
    state.reset()

    assert [*(tmp_path / "mlx_marlin" / "kernels").iterdir()]
    for result in results[1:]:
        assert mx.array_equal(result, results[0], equal_nan=True)
