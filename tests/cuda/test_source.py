"""The text, inputs and template arguments of CUDA kernels."""

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends import planner, source
from mlx_marlin.backends.cuda import arguments as cuda_arguments
from mlx_marlin.backends.cuda import declarations
from mlx_marlin.backends.cuda import source as cuda_source
from mlx_marlin.backends.metal import arguments as metal_arguments
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.problem import Problem
from support.cuda_launches import FUSED, RING, SPLIT, WHOLE, K, N, plan_of


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
    source.digest_of_shaders.cache_clear()
    cuda_source._included.cache_clear()


def powerset(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


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
    assert include == included("cuda/product_decls.cuh")
    assert fused.header == text.header
    biases = "const auto* biases = scales;\n"
    plain = "const marlin::Plain epilogue{};\n"
    rows = "const auto rows = marlin::plain_rows(x);\n"
    assert body_of(text, "cuda/mma.cu") == biases + PLACES + plain + rows
    assert body_of(fused, "cuda/mma.cu") == (
        f"{biases}const T* multiplier = nullptr;\n{PLACES}"
        f"const int* parts = numbers + 14;\n{declarations.FUSED.declaration}{rows}"
    )
    assert (text.name, fused.name) == ("marlin_mma", "marlin_mma_fused")


def test_so_does_that_of_the_reduce_and_metals_is_another() -> None:
    plan, fused = plan_of(**SPLIT), plan_of(**SPLIT, epilogue=FUSED)
    metal, text = metal_source.kernel_source("reduce"), cuda_source.of_reduce(plan)

    digest = cuda_source.of_product(plan).header.splitlines()[1]
    assert text.header == f"{digest}\n{included('cuda/reduce_decls.cuh')}"
    assert body_of(text, "cuda/reduce.cu") == PLACES + declarations.AS_IT_IS.declaration
    own = body_of(cuda_source.of_reduce(fused), "cuda/reduce.cu")
    assert own.startswith(f"const T* multiplier = nullptr;\n{PLACES}")
    assert metal.source == metal_source.stripped(text_of("kernels/reduce.metal"))
    assert "#include" not in metal.header


def test_and_that_of_what_decodes() -> None:
    plan = plan_of(**WHOLE, layout="marlin")
    metal, text = (
        metal_source.kernel_source("dequantize"),
        cuda_source.of_dequantize(plan.problem),
    )

    assert text.header.endswith(included("cuda/dequantize_decls.cuh"))
    before = "const auto* biases = scales;\nconst int* shape = numbers + 0;\n"
    assert body_of(text, "cuda/dequantize.cu") == before
    assert text.input_names == ("w", "scales", "numbers")
    assert metal.source == metal_source.stripped(text_of("kernels/dequantize.metal"))


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
    assert cuda_source.of_dequantize(plan.problem).input_names == read


@pytest.mark.parametrize("names", [*powerset(declarations.EPILOGUE_OPERANDS)], ids=str)
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
        return [cuda_source.of_product(plan).header, cuda_source.of_reduce(plan).header]

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


@pytest.mark.parametrize(("kernel", "tiles_n"), [("wgmma", 4), ("mma_staged", 3)])
def test_hoppers_kernels_have_another_header_and_bodies(
    kernel: str, tiles_n: int
) -> None:
    plan = plan_of(**RING | {"kernel": kernel})
    text = cuda_source.of_product(plan)
    fused = cuda_source.of_product(plan_of(**RING | {"kernel": kernel}, epilogue=FUSED))

    threads, _, include = text.header.splitlines(keepends=True)
    assert threads == f"#define THREADS {32 * (2 * tiles_n + 4)}\n"
    assert include == included("cuda/staged_decls.cuh")
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


def test_an_epilogue_is_the_products_or_the_reduces() -> None:
    finish = {"T": "float16", "BIAS": True, "ACTIVATION": 1, "MULTIPLY": False}
    finish |= {"RESIDUAL": True, "PARTS": 1}
    whole = plan_of(**WHOLE, epilogue=FUSED)
    split = plan_of(**SPLIT, epilogue=FUSED, batch=2)

    template = cuda_arguments.product_template(whole)
    assert list(template.items())[-6:] == list(finish.items())
    assert "T" not in cuda_arguments.product_template(split)
    assert cuda_arguments.product_template(split)["WHOLE"] is False
    reduce = {"ROWS": 4, "BATCHED": True, "SIMDGROUPS_N": 2}
    assert cuda_arguments.reduce_template(split) == reduce | finish
    plain = cuda_arguments.reduce_template(plan_of(**SPLIT))
    assert plain == {"ROWS": 4, "BATCHED": False, "SIMDGROUPS_N": 2, "T": "float16"}


def test_metals_reduce_has_no_such_argument() -> None:
    plan = planner.make(Problem(m=9, n=N, k=K), strategy="split_k", k_parallel=2)

    assert "SIMDGROUPS_N" not in metal_arguments.reduce_template(plan)
