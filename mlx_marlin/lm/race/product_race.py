"""Times the products of a model with our kernels and with stock MLX, in turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import planner, registry
from mlx_marlin.backends.launcher import Product
from mlx_marlin.lm.race import product_calls
from mlx_marlin.lm.race.model_products import ModelProduct
from mlx_marlin.lm.race.product_calls import Entry
from mlx_marlin.measure import timing, tuner
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.operands import Operands
from mlx_marlin.measure.timing import Spread, Weight
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import AnyProblem, GatherProblem
from mlx_marlin.planning.measurement import Result, product_of
from mlx_marlin.planning.verdict import AnyPlan

ROWS = (2, 4, 5, 8, 16, 32, 64)


"""Numbers of rows that are timed."""


BETWEEN = {3: (2, 4), 6: (5, 8), 12: (8, 16), 24: (16, 32), 48: (32, 64)}


"""Numbers of rows that are timed if stock MLX serves one neighbour and we the other."""


CLOSE = 1.1


"""A second kernel is timed if its predicted time is at most this times the best one."""


ROUNDS = 3


SECONDS = 0.03


"""Time of a product's samples together, without compilation."""


Store = Callable[[Result], None]


@dataclass(kw_only=True)
class ProductRace:
    """The race of a model's products.

    Attributes:
        device: This machine's GPU.
        clock: What measures.
        layouts: The layouts of the weights in which our kernels compete.
        stock: Whether stock MLX competes: it does not if the weights stay packed.
        known: The results that are stored already, by their problems.
        store: Keeps a result.
        is_over: Whether there is no more time.
        unfinished: Problems without a result, with their rows or pairs; None for all
            rows of a problem.
    """

    device: PlanningDevice
    clock: Clock
    layouts: Sequence[str]
    stock: bool
    known: dict[AnyProblem, Result]
    store: Store
    is_over: Callable[[], bool]
    unfinished: list[tuple[AnyProblem, int | None]] = field(default_factory=list)
    _kept_for: ModelProduct | None = None
    _kept: dict[str, list[Weight]] = field(default_factory=dict)

    def run(self, product: ModelProduct, rows: Sequence[int]) -> None:
        """Times a product with these numbers of rows, and between them if needed.

        When there is no more time, the rest is left to stock MLX.
        """
        for m in rows:
            self._race(product, m)
        for m in self._between(product):
            self._race(product, m)

    def is_finished(self, product: ModelProduct, rows: Sequence[int]) -> bool:
        """Returns whether nothing is left to time."""
        every = (*rows, *self._between(product))
        return all(self._is_known(product, m) for m in every)

    def leave(self, product: ModelProduct, m: int | None = None) -> None:
        """Leaves a product to stock MLX, which reads MLX's layout only.

        Args:
            product: The product.
            m: The rows. Default: all that are not timed.
        """
        problem = self.problems(product, m or 1).get("mlx")
        if problem is not None:
            rows = None if m is None else product_of(problem).m
            self.unfinished.append((problem, rows))

    def problems(self, product: ModelProduct, m: int) -> dict[str, AnyProblem]:
        """Returns the problems of a product by the layout of the weight."""
        found = {layout: self.problem(product, m, layout) for layout in self.layouts}
        return {layout: problem for layout, problem in found.items() if problem}

    def problem(self, product: ModelProduct, m: int, layout: str) -> AnyProblem | None:
        """Returns the problem in a layout, or None if our kernels do not compute it."""
        found, backend = product.problem(m, layout), registry.of_device(self.device)
        if found is None or backend.unsupported(found, self.device) is not None:
            return None
        return found

    def steps(
        self, products: Sequence[ModelProduct], rows: Sequence[int]
    ) -> Iterator[Callable[[], object]]:
        """Yields the calls of our kernels that will be timed."""
        for product in products:
            for m in rows:
                if not self._is_known(product, m):
                    yield partial(self._built, product, m)

    def _built(self, product: ModelProduct, m: int) -> list[mx.array]:
        entries = [each for each in self._entries(product, m) if each.plan]
        if not entries:
            return []
        calls, inputs = self._prepared(product, m, entries, 1)
        return [call(inputs.x, *inputs.weights[0]) for call in calls.values()]

    def _is_known(self, product: ModelProduct, m: int) -> bool:
        return self.known.keys() >= {*self.problems(product, m).values()}

    def _between(self, product: ModelProduct) -> list[int]:
        """Returns the rows whose neighbours are served by stock MLX and by us."""
        return [m for m, pair in BETWEEN.items() if self._disagree(product, pair)]

    def _disagree(self, product: ModelProduct, rows: Sequence[int]) -> bool:
        for layout in self.layouts:
            problems = [product.problem(m, layout) for m in rows]
            results = [self.known.get(each) for each in problems if each]
            served = {each.stock and not each.live for each in results if each}
            if len(served) > 1:
                return True
        return False

    def _race(self, product: ModelProduct, m: int) -> None:
        if self._is_known(product, m):
            return
        if self.is_over():
            self.leave(product)
            return
        problems = self.problems(product, m)
        entries = [
            entry
            for entry in self._entries(product, m)
            if entry.plan is None or guard.why_not(entry.plan) is None
        ]
        if all(entry.plan is None for entry in entries):
            return  # every kernel has failed its check
        count = product.count(m, self.device)
        calls, inputs = self._prepared(product, m, entries, count)
        for _ in range(2):  # again if it is too noisy
            if self._judge(problems, self.clock.measure(calls, inputs)):
                return
        self.leave(product, m)

    def _entries(self, product: ModelProduct, m: int) -> list[Entry]:
        entries = [
            Entry(plan=plan, layout=layout)
            for layout, problem in self.problems(product, m).items()
            for plan in contenders(problem, self.device)
        ]
        return entries + [Entry(plan=None, layout="mlx")] * self.stock

    def _judge(
        self, problems: Mapping[str, AnyProblem], spreads: Mapping[Entry, Spread]
    ) -> bool:
        """Keeps the results of problems, and returns whether none was noise."""
        results = [
            self._result(layout, spreads)
            for layout in problems
            if _has(layout, spreads)
        ]
        for result in results:
            if result is not None:
                self.known[result.problem] = result
                self.store(result)
        return None not in results

    def _result(self, layout: str, spreads: Mapping[Entry, Spread]) -> Result | None:
        rivals = {
            entry.plan: spread
            for entry, spread in spreads.items()
            if entry.plan is None or entry.layout == layout
        }
        plans = {plan: spread for plan, spread in rivals.items() if plan is not None}
        return tuner.verdict(timing.winner(plans), rivals, self.clock.name)

    def _prepared(
        self, product: ModelProduct, m: int, entries: Sequence[Entry], count: int
    ) -> tuple[dict[Entry, Product], Operands]:
        """Returns the calls of entries, and what they read: weights of some layers."""
        layouts = [*dict.fromkeys(entry.layout for entry in entries)]
        x, indices = product_calls.activations(product, m, count)
        each = [self._weights(product, layout, count) for layout in layouts]
        weights = tuple(sum(arrays, ()) for arrays in zip(*each, indices, strict=True))
        mx.eval(x, weights)
        calls = {
            entry: product_calls.reading(
                layouts.index(entry.layout), product_calls.call(product, m, entry)
            )
            for entry in entries
        }
        problem = product_of(self.problems(product, m)[entries[0].layout])
        return calls, Operands(problem=problem, x=x, native=weights[0], weights=weights)

    def _weights(self, product: ModelProduct, layout: str, count: int) -> list[Weight]:
        """Returns the arrays of some layers; those made for a product are kept."""
        if self._kept_for is not product:
            self._kept_for, self._kept = product, {}
        found = self._kept.get(layout, [])
        if len(found) < count:
            found = self._kept[layout] = product.weights(layout, count)
            mx.eval(found)
        return found[:count]


def contenders(problem: AnyProblem, device: PlanningDevice) -> list[AnyPlan]:
    """Returns the plans that race: the planner's, and a second kernel that is close."""
    if isinstance(problem, GatherProblem):
        return [planner.choose_gather(problem, device)]
    decoded = planner.choose_dequantize(problem, device)
    if decoded is not None:
        return [decoded]
    best, *others = planner.compare(problem, device=device).candidates
    limit = CLOSE * best.prediction.seconds
    second = (
        other.plan
        for other in others
        if other.plan.kernel != best.plan.kernel and other.prediction.seconds <= limit
    )
    return [best.plan, *[plan for plan in [next(second, None)] if plan]]


def _has(layout: str, spreads: Mapping[Entry, Spread]) -> bool:
    return any(entry.plan and entry.layout == layout for entry in spreads)
