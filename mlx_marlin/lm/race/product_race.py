"""Times the products of a model with our kernels and with stock MLX, in turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import planner, registry
from mlx_marlin.backends.graph import Product
from mlx_marlin.lm.race import model_products
from mlx_marlin.lm.race.forward_race import Budget
from mlx_marlin.lm.race.model_products import Entry
from mlx_marlin.lm.report.layer_uses import LayerUse
from mlx_marlin.measure import operands, timing, tuner
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.operands import Operands
from mlx_marlin.measure.timing import Spread, Weight
from mlx_marlin.planning.dequantize_plan import LEAST_ROWS, dequantize_plan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import AnyPlan, AnyProblem, GatherProblem
from mlx_marlin.planning.measurement import PROMPTS, Result, product_of

ROWS = (2, 4, 5, 8, 16, 32, 64)
"""Numbers of rows that are timed."""
MOST_FLOPS = 10**12
"""Most operations of a product that is timed, a second on the smallest GPU. What was
measured at the most rows holds for more."""
BETWEEN = {
    **{3: (2, 4), 6: (5, 8), 12: (8, 16), 24: (16, 32), 48: (32, 64)},
    **{128: (64, 256), 384: (256, 512)},
}
"""Numbers of rows that are timed if stock MLX serves one neighbour and we the other."""
CLOSE = 1.1
"""A second kernel is timed if its predicted time is at most this times the best one."""
ROUNDS = 3


AGAIN = 2
"""How often a product is timed again whose times are noise; then they count as
equal."""
SECONDS = 0.03
"""Time of a product's samples together, without compilation."""


Store = Callable[[Result], None]


@dataclass(kw_only=True)
class ProductRace:
    """The race of a model's products."""

    device: PlanningDevice  # This machine's GPU
    clock: Clock  # What measures
    layouts: Sequence[str]  # The layouts of the weights in which our kernels compete
    decides_layout: bool  # Whether the race decides the layout
    stock: bool  # Whether stock MLX competes: it does not if the weights stay packed
    # The results that are stored already, by their problems
    known: dict[AnyProblem, Result]
    store: Store  # Keeps a result
    budget: Budget  # The time for all products
    # Whether stock MLX's products of so many rows compile nothing now
    is_ready: Callable[[int], bool] = lambda m: True
    _kept_for: LayerUse | None = None
    _kept: dict[str, list[Weight]] = field(default_factory=dict)

    def run(self, product: LayerUse) -> Iterator[int]:
        """Times a product with the numbers of rows that are left and ready.

        Yields each before it is timed. Rows between them follow if they are needed.
        """
        for rows in (self.rows, self._between):
            for m in rows(product):
                if self._is_known(product, m) or not self.is_ready(m):
                    continue
                if self.budget.fits(m):
                    yield m
                    self._race(product, m)

    def rows(self, product: LayerUse) -> tuple[int, ...]:
        """Returns the numbers of rows to time; one only where the layout is open."""
        one = self.problem(product, 1, product.layout)
        assert one is not None
        each = 2 * product_of(one).m * product_of(one).n * product_of(one).k
        prompts = (m for m in PROMPTS if m * each <= MOST_FLOPS)
        return (*(1,) * self.decides_layout, *ROWS, *prompts)

    def left(self, product: LayerUse) -> list[int]:
        """Returns the numbers of rows that are left to time."""
        every = (*self.rows(product), *self._between(product))
        return [m for m in every if not self._is_known(product, m)]

    def problems(self, product: LayerUse, m: int) -> dict[str, AnyProblem]:
        """Returns the problems of a product by the layout of the weight."""
        found = {layout: self.problem(product, m, layout) for layout in self.layouts}
        return {layout: problem for layout, problem in found.items() if problem}

    def problem(
        self, product: LayerUse, m: int, layout: str | None
    ) -> AnyProblem | None:
        """Returns the problem in a layout, or None if our kernels do not compute it."""
        found, backend = product.problem(m, layout), registry.of_device(self.device)
        if found is None or backend.unsupported(found, self.device) is not None:
            return None
        return found

    def steps(self, products: Sequence[LayerUse]) -> Iterator[Callable[[], object]]:
        """Yields the calls of our kernels that are left to time."""
        for product in products:
            for m in self.left(product):
                yield partial(self._built, product, m)

    def _built(self, product: LayerUse, m: int) -> list[mx.array]:
        entries = [each for each in self._entries(product, m) if each.plan]
        if not entries:
            return []
        calls, inputs = self._prepared(product, m, entries, 1)
        return [call(inputs.x, *inputs.weights[0]) for call in calls.values()]

    def _is_known(self, product: LayerUse, m: int) -> bool:
        return self.known.keys() >= {*self.problems(product, m).values()}

    def _between(self, product: LayerUse) -> list[int]:
        """Returns the rows whose neighbours are served by stock MLX and by us."""
        return [m for m, pair in BETWEEN.items() if self._disagree(product, pair)]

    def _disagree(self, product: LayerUse, rows: Sequence[int]) -> bool:
        for layout in self.layouts:
            problems = [product.problem(m, layout) for m in rows]
            results = [self.known.get(each) for each in problems if each]
            served = {each.stock and not each.live for each in results if each}
            if len(served) > 1:
                return True
        return False

    def _race(self, product: LayerUse, m: int) -> None:
        problems = self.problems(product, m)
        entries = [
            entry
            for entry in self._entries(product, m)
            if entry.plan is None or guard.why_not(entry.plan) is None
        ]
        if all(entry.plan is None for entry in entries):
            return  # every kernel has failed its check
        count = model_products.layers_beyond_caches(product, m, self.device)
        calls, inputs = self._prepared(product, m, entries, count)
        for trial in range(1 + AGAIN):
            if trial and not self.budget.fits(m):
                return
            with self.budget.spending(m):
                spreads = self.clock.measure(calls, inputs)
            if self._judge(problems, spreads, is_final=trial == AGAIN):
                return

    def _entries(self, product: LayerUse, m: int) -> list[Entry]:
        entries = [
            Entry(plan=plan, layout=layout)
            for layout, problem in self.problems(product, m).items()
            for plan in contenders(problem, self.device)
        ]
        return entries + [Entry(plan=None, layout="mlx")] * self.stock

    def _judge(
        self,
        problems: Mapping[str, AnyProblem],
        spreads: Mapping[Entry, Spread],
        is_final: bool,
    ) -> bool:
        """Keeps the results of problems, and returns whether none was noise."""
        results = [
            self._result(layout, spreads, is_final)
            for layout in problems
            if _has(layout, spreads)
        ]
        for result in results:
            if result is not None:
                self.known[result.problem] = result
                self.store(result)
        return None not in results

    def _result(
        self, layout: str, spreads: Mapping[Entry, Spread], is_final: bool
    ) -> Result | None:
        rivals = {
            entry.plan: spread
            for entry, spread in spreads.items()
            if entry.plan is None or entry.layout == layout
        }
        plans = {plan: spread for plan, spread in rivals.items() if plan is not None}
        return tuner.verdict(timing.winner(plans), rivals, self.clock.name, is_final)

    def _prepared(
        self, product: LayerUse, m: int, entries: Sequence[Entry], count: int
    ) -> tuple[dict[Entry, Product], Operands]:
        """Returns the calls of entries, and what they read: weights of some layers."""
        layouts = [*dict.fromkeys(entry.layout for entry in entries)]
        x, indices = model_products.activations(product, m, count)
        each = [self._weights(product, layout, count) for layout in layouts]
        weights = tuple(sum(arrays, ()) for arrays in zip(*each, indices, strict=True))
        mx.eval(x, weights)
        calls = {
            entry: operands.reading(
                layouts.index(entry.layout), model_products.call(product, m, entry)
            )
            for entry in entries
        }
        problem = product_of(self.problems(product, m)[entries[0].layout])
        return calls, Operands(problem=problem, x=x, native=weights[0], weights=weights)

    def _weights(self, product: LayerUse, layout: str, count: int) -> list[Weight]:
        """Returns the arrays of some layers; those made for a product are kept."""
        if self._kept_for is not product:
            self._kept_for, self._kept = product, {}
        found = self._kept.get(layout, [])
        if len(found) < count:
            found = self._kept[layout] = model_products.weights(product, layout, count)
            mx.eval(found)
        return found[:count]


def contenders(problem: AnyProblem, device: PlanningDevice) -> list[AnyPlan]:
    """Returns the plans that race, the planner's first.

    A second kernel takes part if it is close, and with prompts both a kernel and
    decoding a packed weight.
    """
    if isinstance(problem, GatherProblem):
        return [planner.choose_gather(problem, device)]
    decoded = planner.choose_dequantize(problem, device)
    may_be_decoded = problem.layout == "marlin" and problem.batch == 1
    if decoded is not None and not may_be_decoded:
        return [decoded]
    best, *others = planner.compare(problem, device=device).candidates
    limit = CLOSE * best.prediction.seconds
    second = (
        other.plan
        for other in others
        if other.plan.kernel != best.plan.kernel and other.prediction.seconds <= limit
    )
    kernels: list[AnyPlan] = [
        best.plan,
        *[plan for plan in [next(second, None)] if plan],
    ]
    if not may_be_decoded or problem.m < LEAST_ROWS:
        return kernels
    if decoded is None:
        return [*kernels, dequantize_plan(problem)]
    return [decoded, best.plan]


def _has(layout: str, spreads: Mapping[Entry, Spread]) -> bool:
    return any(entry.plan and entry.layout == layout for entry in spreads)
