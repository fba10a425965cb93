"""The table that decides where nobody has measured: it is the model's, in few lines.

`data/recorded_servers.json` has who served 600 problems, and 140 of experts, when the
model itself decided: with the rows before, the rows asked for, and the rows after.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import recorded_plans
from benchmarks.stock import __main__ as writer
from benchmarks.stock import decision, experts
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import backend
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.backends.metal.experts import gather_seconds
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import AnyProblem, GatherProblem
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import serving
from mlx_marlin.products.serving import Refusal
from support.profiles import sampled

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests" / "data" / "recorded_servers.json").read_text())
DOCUMENT = ROOT / "docs" / "stock_model.md"
TABLE = json.loads(backend.FILE.read_text("ascii"))
M3_MAX = Device.named("M3 Max")
PAIRS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
OF_EXPERTS = (
    *((8, 14336, 4096), (32, 2880, 2880), (64, 1024, 2048), (128, 768, 2048)),
    *((128, 2048, 768), (256, 2048, 7168), (512, 512, 2048)),
)
"""Numbers of experts, and n and k of their products."""
FORMATS = (("affine", 4), ("affine", 3), ("affine", 8), ("mxfp4", 4), ("nvfp4", 4))


def answer_of(problem: AnyProblem, device: Any) -> serving.Answer:
    place = serving.Place(device=device, is_here=False)
    return serving.serve_problem(problem, place)


def server(problem: AnyProblem, device: Any) -> str:
    answer = answer_of(problem, device)
    if isinstance(answer, Refusal):
        return "s" if answer.cause == "speed" else "-"
    return "d" if isinstance(answer, DequantizePlan) else "o"


def drawn_experts(device: str) -> list[tuple[str, GatherProblem]]:
    """Returns the recorded products of experts, each with its text."""
    draw = random.Random("experts of " + device)
    found: dict[tuple[Any, ...], None] = {}
    while len(found) < 20:
        drawn = draw.choice(PAIRS), draw.choice(OF_EXPERTS), draw.choice(FORMATS)
        dtype = draw.choice(("float16", "bfloat16", "float32"))
        found[*drawn, dtype, draw.random() < 0.5] = None
    gathers = []
    for pairs, (count, n, k), (mode, bits), dtype, is_sorted in found:
        problem = problem_of(pairs, n, k, mode=mode, bits=bits, dtype=dtype)
        gather = GatherProblem(problem=problem, experts=count, is_sorted=is_sorted)
        order = "sorted" if is_sorted else "unsorted"
        text = f"{pairs} {order} over {count} of {n}x{k} {mode} {bits} {dtype}"
        gathers.append((text, gather))
    return gathers


@lru_cache(maxsize=1)
def differences() -> dict[str, str]:
    """Returns the recorded problems that the table gives to others than the model did.

    Each comes with who served it and the rows beside, and who serves it now.
    """
    found = {}
    for device, of_device in RECORDED["products"].items():
        pairs = recorded_plans.drawn(device)
        for pair, was in zip(pairs, of_device.split(), strict=True):
            if (now := server(pair.problem, named(device))) not in was:
                found[f"{device}: {pair}"] = f"{was[1]}{now}"
    for device, of_device in RECORDED["experts"].items():
        gathers = drawn_experts(device)
        for (text, gather), was in zip(gathers, of_device.split(), strict=True):
            if (now := server(gather, named(device))) not in was:
                found[f"{device}: {text}"] = f"{was[1]}{now}"
    return found


def listed() -> dict[str, str]:
    """Returns the differences that the document lists."""
    line = re.compile(r"\| `(.*)` \| (\w)\w* \| (\w)\w* \|")
    found = map(line.match, DOCUMENT.read_text("utf-8").splitlines())
    return {each[1]: each[2] + each[3] for each in found if each}


def test_decisions_are_the_models_within_a_step_of_rows_but_for_those_listed() -> None:
    assert sum(len(each.split()) for each in RECORDED["products"].values()) == 600
    assert differences() == listed()


def test_what_was_recorded_is_what_the_model_says() -> None:
    """The model that writes the table decides as that did which it was moved from."""
    for device in ("Apple M1", "Apple M4 Pro", "Apple M5"):
        chip = Device.named(device)
        of_device = RECORDED["products"][device].split()
        for pair, was in zip(recorded_plans.drawn(device), of_device, strict=True):
            if pair.layout == "mlx":
                assert decision.server(pair.problem, chip)[0] == was[1], pair
        recorded = RECORDED["experts"][device].split()
        for (text, gather), was in zip(drawn_experts(device), recorded, strict=True):
            assert experts.by_our_kernel(gather, chip) == (was[1] == "o"), text


@sampled(3, 6)
@pytest.mark.parametrize("chip", TABLE["chips"])
def test_the_file_has_what_the_command_writes(chip: str) -> None:
    draw = random.Random(chip)
    dtype = draw.choice([*TABLE["chips"][chip]])
    mode, bits = draw.choice([*TABLE["chips"][chip][dtype]]).split()

    line = writer.of_products(Device.named(chip), dtype, mode, int(bits))

    assert TABLE["chips"][chip][dtype][f"{mode} {bits}"] == line


def test_the_file_has_every_chip_dtype_and_format_in_the_commands_form() -> None:
    chips = TABLE["chips"]

    assert backend.FILE.read_text("ascii") == writer.text(chips, chips.values())
    assert TABLE["columns"] == [*writer.SHAPES]
    (of_first, *_) = (first := next(iter(chips.values()))).values()
    for name, dtype, mode in product(chips, first, of_first):
        assert {"ours", "experts"} <= chips[name][dtype][mode].keys()


def test_sorted_experts_may_never_be_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found = writer.of_experts(Device.named("M1 Pro"), "bfloat16", "affine", 1)
    assert found == [12, 8]
    monkeypatch.setattr(writer, "_most", lambda gathers, *_: not gathers[0].is_sorted)
    assert writer.of_experts(M3_MAX, "float16", "affine", 4) == [1 / 16, 0]


@pytest.mark.parametrize("mode", ["affine 1", "affine 4", "mxfp4 4"])
def test_no_experts_are_ours_that_are_predicted_to_be_slower(mode: str) -> None:
    scheme, bits = mode.split()
    for chip, dtype in product(TABLE["chips"], ("float16", "bfloat16", "float32")):
        pairs, device = TABLE["chips"][chip][dtype][mode]["experts"], Device.named(chip)
        for each, (of, n, k), order in product(pairs, writer.EXPERTS, (False, True)):
            m = max(1, round(each * of))
            problem = problem_of(m, n, k, mode=scheme, bits=int(bits), dtype=dtype)
            gather = GatherProblem(problem=problem, experts=of, is_sorted=order)
            if backend.reason_of_experts(gather, device) is None:
                ours = gather_seconds(gather, device)
                assert ours <= experts.stock_seconds(gather, device), (chip, gather)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yields a line of a table with an M3 Max alone, which the test changes."""
    found = {"ours": ["", "5-8 33-"], "decoded": ["", "65-"], "experts": [0.5, 4]}
    chips = {"Apple M3 Max": {"float16": {"affine 4": found}}}
    table = {"columns": [512, 1024], "chips": chips}
    monkeypatch.setattr(backend, "_table", lambda: table)
    backend.line_of.cache_clear()
    yield found
    backend.line_of.cache_clear()


@pytest.mark.usefixtures("line")
@pytest.mark.parametrize(
    ("m", "n", "served"),
    [
        *((4, 1024, "s"), (5, 1024, "o"), (8, 4096, "o"), (9, 1024, "s")),
        *((32, 1024, "s"), (33, 1024, "o"), (64, 1024, "o"), (65, 1024, "d")),
        *((5, 1023, "s"), (5, 511, "s"), (65, 1023, "s"), (9999, 1024, "d")),
    ],
)
def test_rows_and_columns_decide(m: int, n: int, served: str) -> None:
    problem = Problem(m=m, n=n, k=512)

    assert server(problem, M3_MAX) == served
    assert server(replace(problem, invariant=True), M3_MAX) == "o"
    assert server(replace(problem, layout="marlin"), M3_MAX) in "od"


@pytest.mark.usefixtures("line")
@pytest.mark.parametrize(
    ("pairs", "is_sorted", "served"),
    [
        *((3, False, "s"), (4, True, "o"), (32, True, "o")),
        *((33, True, "s"), (99, False, "o")),
    ],
)
def test_pairs_of_an_expert_decide(pairs: int, is_sorted: bool, served: str) -> None:
    problem = Problem(m=pairs, n=768, k=512)
    gather = GatherProblem(problem=problem, experts=8, is_sorted=is_sorted)

    assert server(gather, M3_MAX) == served
    packed = replace(gather, problem=replace(problem, layout="marlin"))
    assert server(packed, M3_MAX) == "o"


def test_a_reason_names_the_table_and_the_rows_that_ours_serve(line: Any) -> None:
    assert str(answer_of(Problem(m=1, n=4096, k=512), M3_MAX)) == (
        "1 row on Apple M3 Max 40-core GPU: by the table of Apple M3 Max our kernels "
        "serve 5 to 8, 33 and more rows of such a weight (not measured here)"
    )
    gather = GatherProblem(problem=Problem(m=3, n=64, k=512), experts=8, is_sorted=True)
    reason = backend.reason_of_experts
    assert "kernel serves from 0.5 to 4 rows an expert" in str(reason(gather, M3_MAX))
    line["experts"] = [12, 8]
    backend.line_of.cache_clear()
    many = replace(gather, problem=Problem(m=96, n=64, k=512))
    assert "serves no number of sorted rows an expert" in str(reason(many, M3_MAX))
    assert "from 12 rows" in str(reason(replace(gather, is_sorted=False), M3_MAX))


@pytest.mark.parametrize(
    ("device", "stands"),
    [
        (M3_MAX, "M3 Max"),
        (Device.named("M3 Max", 30), "M3 Max"),
        (DEFAULT, "M1"),
        (replace(DEFAULT, arch="applegpu_g16g"), "M4"),
        (replace(DEFAULT, arch="applegpu_g18s"), "M5"),
        (replace(Device.named("M5 Max"), has_tensor_system=False), "M4 Max"),
        (replace(Device.named("M5 Ultra"), has_tensor_system=False), "M3 Ultra"),
        (replace(DEFAULT, arch="applegpu_g12g"), "M1"),
    ],
    ids=str,
)
def test_a_chip_that_the_table_has_not_goes_by_an_older_one_of_its_tier(
    device: Device, stands: str
) -> None:
    assert backend.line_of(problem_of(8, 4096, 4096), device).chip == f"Apple {stands}"
