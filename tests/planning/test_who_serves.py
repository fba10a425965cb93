"""Who serves a problem, for every combination of what the decision depends on.

The back end's answers are given, and a small model of the rules says what to expect.
"""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from mlx_marlin.backends import measured_results, planner, registry, selection
from mlx_marlin.backends.metal.device import DEFAULT
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.measurement import Measured
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate
from mlx_marlin.products import serving
from mlx_marlin.products.serving import Refusal

PROBLEM = Problem(m=4, n=64, k=256, layout="marlin")
EXPERTS = GatherProblem(problem=PROBLEM, experts=2)
BEST, SECOND, LAST = (planner.compare(PROBLEM).candidates[i].plan for i in (0, 1, 2))
DECODED = dequantize_plan(PROBLEM)
BACKWARD = dequantize_plan(PROBLEM, transposed=False)
GATHERED, FEWER = (
    registry.of_device(DEFAULT).choose_gather(each, DEFAULT)
    for each in (EXPERTS, replace(EXPERTS, experts=1))
)


@dataclass
class Answers:
    """A back end whose answers are given; it notes what it was asked."""

    unsupported_: str | None = None
    handover_: str | None = None
    decoded: bool = False
    alternatives: dict[Any, Any] = field(default_factory=dict)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    judged: list[Any] = field(default_factory=list)  # plans; None is the best one

    def unsupported(self, problem: Any, device: Any, transpose: bool) -> str | None:
        self.asked.append(("unsupported", problem, device, transpose))
        return self.unsupported_

    def handover(self, problem: Any, device: Any, plan: Any = None) -> str | None:
        self.asked.append(("handover", problem, device))
        self.judged.append(plan)
        return self.handover_

    def dequantize_first(self, problem: Any, device: Any) -> Any:
        assert (problem, device) == (PROBLEM, DEFAULT)
        return DECODED if self.decoded else None

    def choose_gather(self, gather: Any, device: Any) -> Any:
        assert (gather, device) == (EXPERTS, DEFAULT)
        return GATHERED

    def alternative(self, plan: Any, device: Any) -> Any:
        assert device == DEFAULT
        return self.alternatives.get(plan)


def installed(answers: Answers, patch: pytest.MonkeyPatch) -> Answers:
    patch.setattr(registry, "of_device", lambda device: answers)
    best: Any = Candidate((0.0,), None, BEST)  # type: ignore[arg-type]
    patch.setattr(planner, "propose", lambda problem, device: best)
    return answers


def given(
    patch: pytest.MonkeyPatch,
    measured: Measured | None = None,
    may: bool = True,
    fault: Any = lambda _: None,
) -> serving.Place:
    """Returns this process, with what was measured and whether it may hand over."""
    patch.setattr(measured_results, "find", lambda *_: measured)
    patch.setattr(selection, "may_hand_over", lambda: may)
    return serving.Place(device=DEFAULT, fault=fault)


def expected(
    back_end: Answers,
    problem: Any,
    transpose: bool,
    measured: Measured | None,
    may: bool,
) -> Any:
    """What the documents say, from the strongest rule to the weakest."""
    if back_end.unsupported_:
        return Refusal(back_end.unsupported_)
    if measured is not None and may and measured.reason:
        return Refusal(measured.reason, "speed")
    if measured is not None and measured.plan is not None:
        return measured.plan
    predicted_slower = may and measured is None and back_end.handover_
    if problem is EXPERTS:
        return Refusal("stock is fast", "speed") if predicted_slower else GATHERED
    if not transpose:
        return BACKWARD
    known = None if measured is None else measured.decodes
    if may and (back_end.decoded if known is None else known):
        return DECODED
    return Refusal("stock is fast", "speed") if predicted_slower else BEST


MEASURED = {
    "nothing": None,
    "ours": Measured(reason=None, plan=SECOND),
    "stock": Measured(reason="measured here: stock", plan=SECOND),
    "ours between": Measured(reason=None),
    "stock between": Measured(reason="measured here at two"),
    "decoded between": Measured(reason=None, decodes=True),
    "not decoded between": Measured(reason=None, decodes=False),
}


@pytest.mark.parametrize("measured", MEASURED.values(), ids=MEASURED)
@pytest.mark.parametrize("problem", [PROBLEM, EXPERTS], ids=["product", "experts"])
def test_the_first_rule_that_holds_decides(
    measured: Measured | None, problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unsupported, handover, decoded, transpose, may in product(
        (None, "no kernel"), (None, "stock is fast"), *[(False, True)] * 3
    ):
        back_end = installed(Answers(unsupported, handover, decoded), monkeypatch)

        place = given(monkeypatch, measured, may)
        answer = serving.serve_problem(problem, place, transpose=transpose)

        known = measured if transpose else None
        assert answer == expected(back_end, problem, transpose, known, may)
        assert back_end.asked[0] == ("unsupported", problem, DEFAULT, transpose)
        assert {asked[1:3] for asked in back_end.asked} == {(problem, DEFAULT)}
        assert {*back_end.judged} <= {None}


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("change", [{"batch": 2}, {"norm": 1e-5}, {"invariant": True}])
def test_only_plain_products_are_decoded_because_measured_ones_were(
    change: dict[str, Any], decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(Answers(decoded=True), monkeypatch)
    measured = Measured(reason=None, decodes=decodes)
    problem = replace(PROBLEM, **change)

    assert serving.serve_problem(problem, given(monkeypatch, measured)) is BEST


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("may", [False, True])
@pytest.mark.parametrize("handover", [None, "stock is fast"])
@pytest.mark.parametrize("faulty", [0, 1, 2, 3])
def test_a_plan_that_fails_is_replaced_by_the_next_that_does_not(
    measured: bool,
    may: bool,
    handover: str | None,
    faulty: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = [BEST, SECOND, LAST]
    back_end = installed(Answers(handover_=handover), monkeypatch)
    back_end.alternatives = {BEST: SECOND, SECOND: LAST}

    def fault(plan: Any) -> str | None:
        return f"fault {plans.index(plan)}" if plan in plans[:faulty] else None

    def may_be_slower(index: int) -> bool:
        """An alternative was not measured, and stock MLX may be faster than it."""
        return may and (bool(handover) or (measured and index == 0))

    want: Any = BEST
    for index in range(faulty):
        following = plans[index + 1] if index < 2 else None
        refused = following is None or may_be_slower(index)
        want = Refusal(f"fault {index}", "fault") if refused else following
        if refused:
            break

    place = given(monkeypatch, may=may, fault=fault)
    assert want == serving.usable(BEST, place, is_measured=measured)
    assert {*back_end.asked} <= {("handover", PROBLEM, DEFAULT)}
    assert back_end.judged == plans[1 : 1 + len(back_end.judged)]


def test_other_plans_have_no_alternative_where_a_back_end_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    back_end = installed(Answers(), monkeypatch)
    back_end.alternatives = {DECODED: BEST, GATHERED: GATHERED}
    refusal, refused = Refusal("anything", "speed"), Refusal("it failed", "fault")

    def failing(plan: Any) -> str | None:
        return None if plan is BEST else "it failed"

    place = given(monkeypatch, fault=failing)
    assert serving.usable(refusal, place) is refusal
    decoded = serving.usable(DECODED, place)
    assert decoded == refused  # never asked for
    back_end.alternatives = {GATHERED: FEWER}
    assert (
        serving.usable(GATHERED, replace(place, fault=lambda _: "it failed")) == refused
    )
    assert back_end.asked == [("handover", FEWER.gather, DEFAULT)]
    back_end.alternatives = {}
    gathered = serving.usable(GATHERED, place)
    assert gathered == refused
