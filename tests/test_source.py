"""The shaders are found, fit MLX's kernel factory, and agree with Python on numbers."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from strategies import plans

from mlx_marlin import layout, source
from mlx_marlin.plan import PADDED_COLUMNS, TILE_K, TILE_N, Plan

KERNELS = ("gemv", "gemm_register")
FILES = sorted(source.shader_folder().rglob("*.metal"))


def test_the_shaders_lie_in_two_folders() -> None:
    folders = {path.parent.name for path in FILES}

    assert folders == {"kernels", "lib"}
    kernels = {path.stem for path in FILES if path.parent.name == "kernels"}
    assert kernels == {*KERNELS, "reduce"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shader_is_ascii(path: Path) -> None:
    # MLX hands the text to Metal as an ASCII string.
    assert path.read_bytes().isascii()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_its_body_with_the_libraries_before_it(kernel: str) -> None:
    text = source.product_source(kernel)

    folder = source.shader_folder()
    assert text.name == f"marlin_{kernel}"
    assert text.source == (folder / "kernels" / f"{kernel}.metal").read_text()
    positions = [
        text.header.index((folder / "lib" / f"{name}.metal").read_text())
        for name in ("work", "lane", "epilogue", kernel)
    ]
    assert positions == sorted(positions)
    assert text.input_names == ("x", "w", "scales", "biases", "params")
    assert source.product_source(kernel) is text


@pytest.mark.parametrize("kernel", [*KERNELS, "reduce"])
def test_no_body_makes_mlx_add_shape_parameters(kernel: str) -> None:
    # MLX looks for these by substring, comments included.
    text = (
        source.reduce_source() if kernel == "reduce" else source.product_source(kernel)
    )
    for name in text.input_names:
        for suffix in ("_shape", "_strides", "_ndim"):
            assert name + suffix not in text.source
    # Without an attribute MLX may close the parameter list too early.
    assert re.search(r"\bthread\w*_(in|per)_\w+", text.source)


@given(plan=plans())
def test_the_body_uses_every_template_argument(plan: Plan) -> None:
    body = source.product_source(plan.kernel).source

    for name in source.product_template(plan):
        assert re.search(rf"\b{name}\b", body)
    used = set(re.findall(r"\b[A-Z][A-Z_]+\b", re.sub(r"//.*", "", body)))
    assert used - {*source.product_template(plan)} == {"SCRATCH_ROW"}


@given(plan=plans())
def test_the_template_says_what_the_plan_says(plan: Plan) -> None:
    template = source.product_template(plan)

    assert template["SIMDGROUPS_K"] == plan.simdgroups_k
    assert template["GROUP"] == plan.problem.group_size
    assert template["PACKED"] == (plan.problem.layout == "marlin")
    if plan.kernel == "gemv":
        assert template["ROWS"] == plan.problem.m
    else:
        assert template["SUBTRACT"] == plan.subtract
        assert template["WIDEN"] == (plan.problem.dtype != "float16")
        rows = 8 * int(template["FRAGMENTS_M"]) * int(template["SIMDGROUPS_M"])
        assert rows == plan.tile.m
    assert source.reduce_template(plan) == {"T": plan.problem.dtype}


@given(plan=plans())
def test_params_are_few_enough_to_be_constants_and_in_the_shaders_order(
    plan: Plan,
) -> None:
    values = source.params(plan)
    read = (source.shader_folder() / "lib" / "work.metal").read_text()
    fields = dict(re.findall(r"work\.(\w+) = params\[(\d)\]", read))

    assert len(values) == len(fields) < 8
    by_name = {name: values[int(place)] for name, place in fields.items()}
    assert by_name == {
        "m": plan.problem.m,
        "n": plan.problem.n,
        "k": plan.problem.k,
        "k_parallel": plan.k_parallel,
        "ceil_partition": plan.partition == "ceil",
    }


def test_numbers_on_both_sides_of_the_border_are_the_same() -> None:
    text = source.product_source("gemv").header
    stated = re.findall(r"constant constexpr \w+ (\w+) = ([^;]+);", text)
    numbers: dict[str, float] = {}
    for name, value in stated:
        numbers[name] = eval(value.removesuffix("f"), {}, dict(numbers))

    assert numbers == {
        "TILE_N": TILE_N,
        "TILE_K": TILE_K,
        "TILE_WORDS": layout.TILE_WORDS,
        "SCRATCH_ROW": PADDED_COLUMNS,
        "CODE_OFFSET": 64,
    }
    assert (layout.TILE_N, layout.TILE_K) == (TILE_N, TILE_K)


@given(plan=plans())
def test_the_scratch_of_a_body_is_what_the_plan_counts(plan: Plan) -> None:
    body = source.product_source(plan.kernel).source
    size = re.search(r"threadgroup float scratch\[(.*)\];", body)
    assert size is not None

    values = dict(source.product_template(plan))
    floats = eval(size[1], {}, values | {"SCRATCH_ROW": PADDED_COLUMNS})

    assert 4 * floats == plan.threadgroup_bytes


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(source, "__file__", str(tmp_path / "package" / "source.py"))
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
