"""The text, inputs and template arguments of CUDA kernels."""

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends import planner, source
from mlx_marlin.backends.cuda import launches as cuda_arguments
from mlx_marlin.backends.cuda import source as cuda_source
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import problem_of
from support.cuda_cases import GATED, NORMED_HEADS, ROTATED_N, ROTATION
from support.cuda_launches import FUSED, RING, SPLIT, WHOLE, plan_of
from support.cuda_strategies import H200

PACKED = WHOLE | {"layout": "marlin"}
STAGED = RING | {"kernel": "mma_staged"}
NORM = {"m": 8, "norm": 1e-5}
PAIRS = PACKED | {"n": ROTATED_N, "simdgroups_n": 4}
OF_HEADS = ("positions", "freqs")


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


def split_header(text: Source) -> tuple[str, str]:
    """Returns what a header defines, and the file that it includes."""
    folder = re.escape(source.shader_folder().as_posix())
    form = rf'((?:#define .*\n)?)// [0-9a-f]{{16}}\n#include "{folder}/(.*)"\n'
    found = re.fullmatch(form, text.header)
    assert found
    return found[1], found[2]


@pytest.mark.parametrize(
    ("fields", "threads", "file"),
    [
        (WHOLE, 3 * 2 * 32, "product"),
        (RING, (4 * 2 + 4) * 32, "staged"),
        (STAGED, (3 * 2 + 4) * 32, "staged"),
    ],
    ids=str,
)
def test_a_header_names_a_file_and_says_how_large_a_block_is(
    fields: dict[str, Any], threads: int, file: str
) -> None:
    text = cuda_source.of_product(plan_of(**fields))
    fused = cuda_source.of_product(plan_of(**fields, epilogue=FUSED))

    include = f"cuda/{file}_decls.cuh"
    assert split_header(text) == (f"#define THREADS {threads}\n", include)
    assert fused.header == text.header


def test_the_header_of_a_kernel_without_a_block_of_its_own_defines_nothing() -> None:
    plan = plan_of(**SPLIT)
    for file, text in (
        ("reduce", cuda_source.of_reduce(plan)),
        ("dequantize", cuda_source.of_dequantize(plan.problem)),
    ):
        assert split_header(text) == ("", f"cuda/{file}_decls.cuh")


@pytest.mark.parametrize(
    ("fields", "name", "inputs"),
    [
        (PACKED, "mma", ()),
        (PACKED | {"epilogue": FUSED}, "mma_fused", ("bias", "residual")),
        (RING, "wgmma", ()),
        (RING | {"epilogue": FUSED}, "wgmma_fused", ("bias", "residual")),
        (STAGED, "mma_staged", ()),
        (PAIRS | {"epilogue": GATED}, "mma_gated", ()),
        (PAIRS | NORM | {"epilogue": GATED}, "mma_gated_normed", ("norm",)),
        (PAIRS | {"epilogue": Epilogue(rotation=ROTATION)}, "mma_rotated", OF_HEADS),
        (
            PAIRS | {"epilogue": Epilogue(rotation=NORMED_HEADS)},
            "mma_rotated_norms",
            (*OF_HEADS, "q_norm", "k_norm"),
        ),
    ],
    ids=str,
)
def test_a_kernel_is_named_by_its_text_and_reads_no_array_more(
    fields: dict[str, Any], name: str, inputs: tuple[str, ...]
) -> None:
    text = cuda_source.of_product(plan_of(**fields))

    assert text.name == f"marlin_{name}"
    assert text.input_names == ("x", "w", "scales", *inputs, "numbers")


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


@pytest.mark.parametrize("names", [*powerset(source.EPILOGUE_OPERANDS)], ids=str)
def test_an_epilogues_arrays_are_inputs_where_there_are_any(
    names: tuple[str, ...],
) -> None:
    epilogue = Epilogue(
        activation="silu",
        bias="bias" in names,
        multiply="multiplier" in names,
        residual="residual" in names,
    )
    whole = plan_of(**PACKED, epilogue=epilogue)
    split = plan_of(**SPLIT, layout="marlin", epilogue=epilogue)

    finish = (*names, "numbers")
    product = ("x", "w", "scales")
    assert cuda_source.of_product(whole).input_names == (*product, *finish)
    assert cuda_source.of_product(split).input_names == (*product, "numbers")
    assert cuda_source.of_reduce(split).input_names == ("partials", *finish)


@pytest.mark.parametrize("each", [0, 2])
def test_experts_read_rows_only_where_they_are_named(each: int) -> None:
    gather = GatherProblem(
        problem=problem_of(8, 64, 128), experts=4, pairs_per_row=each
    )
    text = cuda_source.gather_source(planner.choose_gather(gather, H200))

    read = ("x", "w", "scales", "biases", "experts")
    assert text.input_names == (*read, *(() if each else ("sources",)), "numbers")


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

    with (copied / file).open("a") as changed:
        changed.write("// changed\n")

    assert not {*headers()} & {*before}


def test_what_a_kernel_need_not_do_is_a_template_argument() -> None:
    """Wrong values of others are wrong results; these may cost time alone."""
    whole = cuda_arguments.product_template(plan_of(**WHOLE))
    split = cuda_arguments.product_template(plan_of(**SPLIT, epilogue=FUSED, batch=2))

    names = ("WHOLE", "SINGLE", "BATCHED")
    assert [whole[name] for name in names] == [True, True, False]
    assert [split[name] for name in names] == [False, True, True]
    # An epilogue is the product's or the reduce's.
    finish = {"BIAS", "ACTIVATION", "MULTIPLY", "RESIDUAL", "PARTS", "T"}
    assert not finish & {*whole, *split}
    fused = cuda_arguments.product_template(plan_of(**WHOLE, epilogue=FUSED))
    assert fused.keys() - whole.keys() == finish
    assert cuda_arguments.reduce_template(plan_of(**SPLIT)).keys() & finish == {"T"}
