"""The shaders are found, fit MLX's kernel factory, and agree with Python on numbers."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from mlx_marlin.backends import build, source
from mlx_marlin.backends.metal import launches as metal_arguments
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.backends.metal.kernel_limits import OPERANDS
from mlx_marlin.planning.epilogue import ACTIVATIONS, PLAIN
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.work.tiles import PADDED_COLUMNS
from mlx_marlin.weights.formats import CODES, SUPER_BLOCK, TILE_K, TILE_N
from support import strategies

KERNELS = ("gemv", "gemm_register", "gemm_staged", "gemm_tensor")
ALL = [(kernel, fused) for kernel in (*KERNELS, "reduce") for fused in (False, True)]
PLANS = strategies.plans(
    of=strategies.problems(
        formats=strategies.ANY_FORMAT, epilogues=strategies.EPILOGUES
    )
)
FILES = sorted(source.shader_folder().rglob("*.metal"))


def test_the_shaders_lie_in_two_folders() -> None:
    assert {path.parent.name for path in FILES} == {"kernels", "lib"}
    kernels = {path.stem for path in FILES if path.parent.name == "kernels"}
    assert kernels == metal_source.BODIES.keys()


def text_of(kernel: str, fused: bool) -> source.Source:
    return metal_source.kernel_source(kernel + "_fused" * fused)


def is_fused(plan: Plan) -> bool:
    """Whether a plan's first kernel finishes its result."""
    return plan.problem.epilogue != PLAIN and plan.reduction == "none"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shader_is_ascii(path: Path) -> None:
    # MLX hands the text to Metal as an ASCII string.
    assert path.read_bytes().isascii()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_adds_to_its_output_has_a_name_of_its_own(kernel: str) -> None:
    text = metal_source.kernel_source(kernel, atomic=True)

    # MLX keeps kernels by name and text; the text is the same.
    assert text.name == f"marlin_{kernel}_atomic"
    assert text.atomic
    assert text.source == metal_source.kernel_source(kernel).source


@pytest.mark.parametrize(("kernel", "fused"), ALL)
def test_no_body_makes_mlx_add_shape_parameters(kernel: str, fused: bool) -> None:
    # MLX looks for these by substring, comments included.
    text = text_of(kernel, fused)
    for name in text.input_names:
        for suffix in ("_shape", "_strides", "_ndim"):
            assert name + suffix not in text.source
    # Without an attribute MLX may close the parameter list too early.
    assert re.search(r"\bthread\w*_(in|per)_\w+", text.source)


def assert_all_used(body: str, template: dict[str, build.TemplateValue]) -> None:
    for name in template:
        assert re.search(rf"\b{name}\b", body)
    used = set(re.findall(r"\b[A-Z][A-Z_]*\b", re.sub(r"//.*", "", body)))
    assert used - {*template} <= {"SCRATCH", "FLOATS"}


@given(plan=PLANS)
def test_the_bodies_use_every_template_argument(plan: Plan) -> None:
    first = text_of(plan.kernel, is_fused(plan))
    last = text_of("reduce", plan.problem.epilogue != PLAIN)

    assert_all_used(first.source, metal_arguments.product_template(plan))
    assert_all_used(last.source, metal_arguments.reduce_template(plan))
    if not plan.has_tensor_operations:
        ragged = plan.problem.n % TILE_N != 0
        template = metal_arguments.product_template(plan)
        assert template.get("RAGGED", ragged) == ragged
    weight = build.weight_template(plan.problem)
    assert_all_used(metal_source.kernel_source("dequantize").source, weight)
    assert weight.items() <= metal_arguments.product_template(plan).items()


def test_activations_have_the_numbers_of_the_shaders() -> None:
    text = (source.shader_folder() / "lib" / "epilogue.metal").read_text()
    stated = re.findall(r"constant constexpr int (\w+) = (\d+);", text)

    assert [name.lower() for name, _ in stated] == [*ACTIVATIONS[1:]]
    assert [int(number) for _, number in stated] == [1, 2, 3]
    for name, _ in stated:
        assert f"ACTIVATION == {name})" in text


def numbers_of(text: str) -> dict[str, float]:
    """Returns the numbers that a text states outside of functions, in its order."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"constant constexpr \w+ (\w+) ?= ?([^;]+);", text):
        found[name] = eval(value.removesuffix("f"), {}, dict(found))
    return found


IN_SHADERS = (
    *("OFFSET_CODES", "EXACT_CODES", "LEAST_OFFSET", "BFLOAT_CODES", "HALF_BY_FLOAT"),
    *("HALF_WEIGHTS", "FLOAT_WEIGHTS"),
)
"""The forms of codes, in the order of `OPERANDS`, and what a format alone decides."""


def test_forms_of_codes_have_the_names_of_the_shaders() -> None:
    for form, name in zip(OPERANDS, IN_SHADERS, strict=False):
        assert form.upper() in name


def test_codes_have_the_numbers_of_the_shaders() -> None:
    text = (source.shader_folder() / "lib" / "decode.metal").read_text()

    codes = {name.upper(): i for i, name in enumerate(CODES)}
    others = {
        "GLOBAL_FLOATING": build.GLOBAL_FLOATING,
        "SUPER_BLOCK": SUPER_BLOCK,
    }
    assert numbers_of(text) == codes | others | {
        name: i for i, name in enumerate(IN_SHADERS)
    }


def read_by_the_shaders(array: str) -> list[str]:
    """Returns the fields that `read_work` fills from an array, in its order."""
    text = (source.shader_folder() / "lib" / "work.metal").read_text()
    read = re.search(rf"(\w+) = \*\(const constant (\w+)\*\){array};", text)
    assert read is not None
    name, kind = read.groups()
    declared = re.search(rf"struct {kind} {{\n((?:  int \w+;\n)+)}};", text)
    assert declared is not None
    fields = re.findall(r"int (\w+);", declared[1])
    assert re.findall(rf"work\.(\w+) = {name}\.(\w+)", text) == [
        (field, field) for field in fields
    ]
    return fields


@given(plan=PLANS)
def test_numbers_are_few_enough_to_be_constants_and_in_the_shaders_order(
    plan: Plan,
) -> None:
    shape, schedule = build.shape(plan), build.schedule(plan)

    assert len(shape) < 8
    assert len(schedule) < 8
    problem, work = plan.problem, plan.work
    assert dict(zip(read_by_the_shaders("shape"), shape, strict=True)) == {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "tile_m": plan.tile.m,
        "m_tiles": plan.m_tiles,
        "k_tiles": plan.k_tiles,
        "group_tiles": (work.tiles - work.whole) // work.groups,
    }
    assert dict(zip(read_by_the_shaders("schedule"), schedule, strict=True)) == {
        "whole": work.whole,
        "ranges": work.ranges,
        "slices": work.slices,
        "minimum": work.minimum,
        "groups": work.groups,
        "ceil_partition": work.partition == "ceil",
        "batch": problem.batch,
    }
    assert max(*shape, *schedule) < 2**31


@given(plan=PLANS)
def test_atomic_sums_are_finished_as_whole_tiles(plan: Plan) -> None:
    whole, *rest = build.epilogue_schedule(plan)

    assert rest == [*build.schedule(plan)[1:]]
    if plan.reduction == "workspace":
        assert whole == plan.work.whole
    else:
        assert whole == plan.work.tiles


def test_numbers_on_both_sides_of_the_border_are_the_same() -> None:
    numbers = numbers_of(metal_source.kernel_source("gemv").header)

    others = {name.upper() for name in (*ACTIVATIONS, *CODES, "global_floating")}
    others |= {*IN_SHADERS}
    assert {name: value for name, value in numbers.items() if name not in others} == {
        "TILE_N": TILE_N,
        "TILE_K": TILE_K,
        "SCRATCH_ROW": PADDED_COLUMNS,
        "SUPER_BLOCK": SUPER_BLOCK,
    }


@given(plan=PLANS.filter(lambda plan: plan.kernel != "gemm_staged"))
def test_the_scratch_of_a_body_is_what_the_plan_counts(plan: Plan) -> None:
    body = text_of(plan.kernel, is_fused(plan)).source
    size = re.search(r"threadgroup float scratch\[(.*)\];", body)
    assert size is not None

    known: dict[str, Any] = {"SCRATCH_ROW": PADDED_COLUMNS, "TILE_N": TILE_N}
    known |= {"ROUND_ROWS": 8, **metal_arguments.product_template(plan)}
    known |= tiling_of(body, known)
    floats = eval(re.sub(r"\w+::", "", size[1]), {}, known)

    assert 4 * floats == plan.threadgroup_bytes


def tiling_of(body: str, known: dict[str, Any]) -> dict[str, int]:
    """Returns the constants of a body's `Tiling`."""
    text = (source.shader_folder() / "lib" / "tiling.metal").read_text()
    given = re.search(r"marlin::Tiling<(.*?)>", body, re.DOTALL)
    assert given is not None
    values = [
        eval(each.strip(), {}, known)
        for each in re.sub(r"\w+::", "", given[1]).split(",")
    ]
    found = dict(
        zip(re.findall(r"^    \w+ (\w+_)", text, re.MULTILINE), values, strict=True)
    )
    for name, value in re.findall(r"STATIC \w+ (\w+) = ([^;]+);", text):
        found[name] = eval(value, {}, known | found)
    return found


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "backends" / "source.py"
    monkeypatch.setattr(source, "__file__", str(file))
    monkeypatch.setattr(source, "shader_folder", source.shader_folder.__wrapped__)


@pytest.mark.usefixtures("_elsewhere")
def test_an_installed_package_has_its_own_shaders(tmp_path: Path) -> None:
    for folder in ("shaders/kernels", "package/shaders/kernels"):
        (tmp_path / folder).mkdir(parents=True)
        assert source.shader_folder() == (tmp_path / folder).parent


@pytest.mark.usefixtures("_elsewhere")
def test_missing_shaders_are_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "shaders").mkdir()  # of somebody else: no kernels in it

    with pytest.raises(FileNotFoundError) as error:
        source.shader_folder()

    for folder in ("shaders", "package/shaders"):
        assert str(tmp_path / folder) in str(error.value)
