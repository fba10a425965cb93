"""What measurements say: labels, times, verdicts and their rows in files."""

import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from mlx_marlin.backends import planner, result_files
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.evidence import codec
from mlx_marlin.planning import measurement
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.measurement import (
    STOCK,
    Forwards,
    Measured,
    Result,
    label,
)
from support.results import HERE, PROBLEM, measured


def test_a_file_is_named_by_its_chip_and_a_digest_of_all() -> None:
    machine = replace(HERE, chip="(Apple) M9  Max!", cores=38)

    digest = hashlib.sha256(repr(machine).encode()).hexdigest()[:12]
    assert machine.file_name == f"apple-m9-max-38-cores-{digest}.json"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"strategy": "data_parallel"}, "data_parallel threadgroups=2 whole=2"),
        (
            {"strategy": "stripe", "num_threadgroups": 3, "k_parallel": 2}
            | {"partition": "ceil"},
            "stripe threadgroups=3 slices=2 partition=ceil",
        ),
        (
            {"strategy": "stream_k", "num_threadgroups": 4, "minimum": 2, "groups": 2},
            "stream_k threadgroups=4 slices=4 minimum=2 groups=2",
        ),
    ],
)
def test_a_label_has_what_is_not_implied(fields: dict[str, Any], text: str) -> None:
    plan = planner.make(PROBLEM, simdgroups_k=2, **fields)
    decoded = dequantize_plan(PROBLEM)

    assert label(plan) == f"{text}, gemv 4 rows, 1x1x2 simdgroups"
    assert label(decoded) == decoded.explain()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(value, True) for value in (1, 1e-300, sys.float_info.max)]
    + [(value, False) for value in (0, -1.0, math.inf, math.nan, 10**400, True, "1")],
)
def test_a_time_is_a_positive_number_that_a_float_can_be(
    value: object, expected: bool
) -> None:
    assert measurement.is_positive(value) is expected


def test_a_result_has_the_times_of_what_it_compares() -> None:
    whole = measured(PROBLEM, stock=True)
    for name in whole.medians_us:
        rest = {other: us for other, us in whole.medians_us.items() if other != name}
        with pytest.raises(ValueError, match=f"has no time for '{re.escape(name)}'"):
            replace(whole, medians_us=rest)
        assert replace(whole, medians_us=rest, live=True).medians_us == rest


@pytest.mark.parametrize(
    ("loads", "waits", "is_given_up"), [(3, 0, True), (2, 9, False), (2, 10, True)]
)
def test_three_loads_are_tried_and_one_that_waits_is_a_tenth(
    loads: int, waits: int, is_given_up: bool
) -> None:
    tries = loads * measurement.TRIED + waits * measurement.WAITED
    found = Forwards(key="", layout="mlx", seconds={}, date="", tries=tries)
    assert found.is_given_up == is_given_up


def test_a_result_says_why_stock_serves() -> None:
    ours, theirs = measured(PROBLEM), measured(PROBLEM, stock=True)
    live = replace(theirs, live=True, medians_us={})

    assert (ours.live, ours.problem, ours.us, ours.reason) == (
        *(False, PROBLEM),
        *(12.5, None),
    )
    assert theirs.reason == "measured here: stock MLX took 10.2 us, our best 12.5 us"
    assert (live.us, live.reason) == (
        None,
        "measured here: the whole model was slower with our kernels",
    )
    with pytest.raises(ValueError, match="live=True with stock=False"):
        replace(live, stock=False)


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("invariant", [False, True])
def test_stock_serves_the_rows_at_which_the_model_was_slower_if_it_may(
    layout: str, invariant: bool
) -> None:
    times = {1: (2.0, 3.0), 4: (5.0, 4.0), 16: (7.0, 7.0)}
    forwards = Forwards(
        key="k", layout=layout, seconds=times, date="", invariant=invariant
    )

    may = layout == "mlx" and not invariant
    assert forwards.slower == (1,)
    assert forwards.stock_rows == ((1,) if may else ())
    assert forwards.served == {1: 2.0 if may else 3.0, 4: 4.0, 16: 7.0}
    by_default = Forwards(key="k", layout=layout, seconds=times, date="")
    assert (by_default.invariant, by_default.packed_lost) == (False, False)
    assert by_default.tries == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layout": "gguf"}, r"layout='gguf', expected .*marlin"),
        ({"seconds": {0: (1.0, 2.0)}}, r"seconds\[0\]=\(1.0, 2.0\), expected two"),
        ({"seconds": {"1": (1.0, 2.0)}}, r"seconds\['1'\]"),
        ({"seconds": {1: (1.0,)}}, r"seconds\[1\]=\(1.0,\), expected two times"),
        ({"seconds": {1: (1.0, 2)}}, r"seconds\[1\]=\(1.0, 2\), expected two times"),
        ({"seconds": {1: (1.0, 2.0), 2: (0.0, 1.0)}}, r"seconds\[2\]=\(0.0, 1.0\)"),
        ({"seconds": {1: (1.0, math.inf)}}, r"seconds\[1\]=\(1.0, inf\)"),
    ],
)
def test_times_of_a_model_that_are_none_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    good: dict[str, Any] = {"key": "k", "layout": "mlx", "seconds": {1: (1.0, 2.0)}}

    with pytest.raises(ValueError, match=words):
        Forwards(**good | fields, date="")


def test_times_of_a_model_and_its_machine_come_back_with_every_field() -> None:
    forwards = Forwards(
        key="a key",
        layout="marlin",
        seconds={2: (0.5, 0.25), 16: (1.0, 2.0)},
        date="a day",
        invariant=True,
        packed_lost=True,
        tries=9,
    )
    rows = [codec.encoded(each) for each in (forwards, HERE)]
    texts = json.loads(json.dumps(rows))

    assert codec.decoded(Forwards, texts[0]) == forwards
    assert codec.decoded(type(HERE), texts[1]) == HERE
    for name in ("invariant", "packed_lost"):
        other = codec.decoded(Forwards, texts[0] | {name: False})
        assert other == replace(forwards, **{name: False})


@pytest.mark.parametrize("stock", [False, True])
def test_a_row_comes_back_as_the_result_that_it_was(stock: bool) -> None:
    result = replace(
        measured(replace(PROBLEM, epilogue=Epilogue(bias=True)), stock=stock),
        live=stock,
    )
    row = json.loads(json.dumps(result_files.row(result)))
    assert result_files.decoded(row) == result
    kind = row["backend"], row["type"], row["served_by"]
    assert kind == ("metal", "MetalPlan", "stock" if stock else "ours")
    for name, odd in (("served_by", "me"), ("medians_us", [1.0])):
        with pytest.raises(ValueError, match=rf"{name}.*, expected"):
            result_files.decoded(row | {name: odd})
    long = "'" + "m" * 42 + "... (102 letters)"  # 60 letters in all
    for change, words in (
        ({"served_by": "m" * 100}, f"served_by={long}, expected"),
        ({"type": "Nothing"}, "type='Nothing' is not one of "),
        ({"backend": "cpu"}, "backend='cpu' is not one of ('metal', 'cuda')"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            result_files.decoded(row | change)


ROTATED = Epilogue(rotation=Rotation(64, 64, norm=1e-6, queries=64), parts=(64, 64))


@pytest.mark.parametrize(
    ("type", "value", "odd"),
    [
        (Epilogue, ROTATED, [{}, [], {**codec.encoded(ROTATED), "x": 1}]),
        (int, 7, [True, 7.0, "7", None]),
        (bool, True, [1, None]),
        (float, 1.5, [True, None, "1"]),
        (float | None, None, [True, "1"]),
        (list[float], [2.0, 2], [{}, [None]]),
        (float | None, 1.5, []),
        (str, "a", [1, None, ["a"]]),
        (tuple[int, ...], (1, 20), [[1, "2"], 1, {}]),
        (
            dict[int, tuple[float, ...]],
            {20: (0.5, 1.5)},
            [[], {"20": [""]}, {"2": 1.5}],
        ),
    ],
)
def test_a_value_comes_back_as_its_type_and_nothing_else_does(
    type: Any, value: object, odd: list[object]
) -> None:
    text = json.dumps(codec.encoded(value))

    assert codec.decoded(type, json.loads(text)) == value
    for each in odd:
        with pytest.raises(ValueError, match=r"^it.*(, expected|has not the fields)"):
            codec.decoded(type, each)


def at(m: int, *, stock: bool = False, decodes: bool = False) -> Result:
    """Returns the result of some rows, with a weight that is decoded first or not."""
    result = measured(replace(PROBLEM, m=m), stock=stock)
    if not decodes:
        return result
    plan = dequantize_plan(result.problem)  # type: ignore[arg-type]
    return replace(result, plan=plan, medians_us={label(plan): 9.0, STOCK: 8.0})


@pytest.mark.parametrize("lower", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("upper", [(False, False), (False, True), (True, False)])
def test_between_two_rows_ours_serve_as_they_do_at_both(
    lower: tuple[bool, bool], upper: tuple[bool, bool]
) -> None:
    ends = [
        at(m, stock=stock, decodes=decodes)
        for m, (stock, decodes) in ((16, lower), (300, upper))
    ]

    found = Measured.between(*ends)

    if lower[0] or upper[0]:
        by = 16 if lower[0] else 300
        words = f"measured here at 16 and 300 rows: stock MLX serves {by}"
        assert found == Measured(reason=words)
    else:
        same = lower[1] if lower == upper else None
        assert found == Measured(reason=None, decodes=same)


@pytest.mark.parametrize("decodes", [False, True])
def test_beyond_the_most_rows_what_holds_there_holds(decodes: bool) -> None:
    ours, stock = (at(300, stock=each, decodes=decodes) for each in (False, True))

    assert Measured.beyond(ours) == Measured(reason=None, decodes=decodes)
    assert Measured.beyond(stock) == Measured(
        reason="measured here up to 300 rows: stock MLX serves 300 and more"
    )


@pytest.mark.parametrize("stock", [False, True])
def test_what_was_measured_of_experts_holds_for_others_without_its_plan(
    stock: bool,
) -> None:
    experts = GatherProblem(problem=PROBLEM, experts=2)
    plan = planner.choose_gather(experts, DEFAULT)
    times = {label(plan): 2.0, STOCK: 1.0}
    result = Result(plan=plan, stock=stock, medians_us=times, clock="", date="")

    own = Measured.of(result, experts)
    other = Measured.of(result, replace(experts, bias=True))

    assert own == Measured(reason=result.reason, plan=plan, result=result)
    assert other == Measured(reason=result.reason)
