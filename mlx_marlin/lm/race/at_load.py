"""The race when `optimize` meets a model: its products, the layout, the whole model.

What is measured is kept with the machine's results, so a later call times nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from time import monotonic, sleep
from typing import Any

import mlx.nn as nn

from mlx_marlin import decision_log, state
from mlx_marlin.backends import children, measured_results, result_files, selection
from mlx_marlin.lm.known_layers import is_packed_faster
from mlx_marlin.lm.layer_conversion import is_marlin_layer
from mlx_marlin.lm.module_tree import computing_layers
from mlx_marlin.lm.race import forward_race, outcome, product_race, stock_kernels
from mlx_marlin.lm.race.forward_race import Budget, Seconds, Turns
from mlx_marlin.lm.race.model_products import products_of
from mlx_marlin.lm.race.product_race import ProductRace, contenders
from mlx_marlin.lm.race.stock_kernels import StockKernels
from mlx_marlin.lm.recipe import Recipe
from mlx_marlin.lm.report.layer_uses import LayerUse, Target, uses_of
from mlx_marlin.lm.warm_up import compile_steps
from mlx_marlin.measure import clocks
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.planning import measurement
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import Forwards, Result
from mlx_marlin.products import serving, this_machine
from mlx_marlin.products.serving import Refusal
from mlx_marlin.progress import Stages
from mlx_marlin.warn_once import warn_once

SECONDS, MORE_SECONDS = 20.0, 5.0
"""Time of a race, compilation included, and of what is left at each later load."""
WAIT = 0.2
"""Seconds between two looks at the processes that compile MLX's own kernels."""

Step = Callable[[], None]


@dataclass(kw_only=True)
class Race:
    """The race of one model."""

    model: nn.Module  # The model
    recipe: Recipe  # What `optimize` does with it
    convert: Callable[[Recipe], None]  # Converts the model as a recipe says
    undo: Step  # Undoes the conversion
    clock: Clock  # What measures products
    now: Callable[[], float]  # Clock that limits the race
    wait: Callable[[float], None]  # Lets seconds pass

    def __post_init__(self) -> None:
        self._began = self.now()
        limit = SECONDS if self.recipe.raced is None else MORE_SECONDS
        self.deadline = self._began + limit
        self.target = Target.of(None)
        self.place = self.target.place
        self.machine = measured_results.machine(self.place.device, selection.backend())
        self.folder = result_files.folder()
        self._has_stopped = False
        self._is_converted = False
        self._has_timed = False
        self._is_kept = True
        self._unwritten: list[Result] = []
        stored = measured_results.known(self.folder, self.machine)
        self._kernels = StockKernels()
        given_up = self.recipe.raced is not None and self.recipe.raced.is_given_up
        self._is_given_up = given_up
        self.products = ProductRace(
            device=self.place.device,
            clock=self.clock,
            layouts=self._layouts(),
            decides_layout=self.recipe.decides_layout,
            stock=self.recipe.decides_layout or self.recipe.layout == "mlx",
            known=stored.results,
            store=self._unwritten.append,
            budget=Budget(now=self.now, end=self.deadline),
            is_ready=lambda m: self._kernels.has_products(m),
        )
        self._turns = Turns(
            model=self.model,
            convert=self._ensure_converted,
            undo=self._undo,
            say=lambda what: self._bar.say(what),
            now=self.now,
            deadline=self.deadline,
            budget=self.products.budget,
        )

    def run(self) -> Forwards:
        """Converts the model, times what is not known yet, and returns its times."""
        with Stages("step") as self._bar:
            self._bar.say("converting")
            kept = self._run()
        if self._has_timed:
            self._tell(kept)
        return kept

    def _run(self) -> Forwards:
        rows = self._missing_rows()
        if rows or not self.products.known:
            self._say_why()
        if rows:
            self._begin_passes(rows)
        before = self.now()
        self._convert_as(self.recipe)
        self._turns.conversion = self.now() - before
        found = products_of(self.model, self.target)
        self._run_products(found)
        raced = self.recipe.raced
        if not self._has_stopped and (raced is None or not raced.packed_lost):
            self._use_layout(outcome.faster_layout(self.products, found))
        state.reset()  # calls were prepared without the results
        # Without ours, stock MLX's passes were timed for nothing.
        seconds = self._compare(rows, is_needed=bool(self._turns.stock))
        # Where the race decides, packed weights that are slower in all are given back.
        is_open = self.recipe.decides_layout and self.recipe.layout == "marlin"
        lost = is_open and outcome.loses_packed(seconds)
        if lost:
            self._use_layout("mlx")
            self._turns.ours.clear()
            seconds = self._compare(rows, is_needed=False)
        self._ensure_converted()
        kept = self._keep_forwards(seconds, lost)
        state.reset()
        return kept

    def _begin_passes(self, rows: Sequence[int]) -> None:
        """Times stock MLX's passes of the model as it is, if that compiles nothing."""
        products = uses_of(self.model, self.target)
        model = stock_kernels.pickled(self.model)
        key, options = self.recipe.key, self._options()
        with self._stopping("its forward passes are not compared"):
            self._kernels = stock_kernels.for_race(products, key, model, options)
            ready = [m for m in rows if self._kernels.has_pass(m)]
            if not ready:
                return
            third = self._began + (self.deadline - self._began) / 3
            self._turns.begin(ready, self.recipe.layout == "mlx", third)
            # Passes of ours take about as long.
            self.products.budget.end -= self.now() - self._began
            self.products.budget.needs_one = False

    def _tell(self, kept: Forwards) -> None:
        """Tells who serves which rows, and whether something is left."""
        found = products_of(self.model, self.target)
        served = outcome.served(self.products, found, kept)
        seconds = self.now() - self._began
        stored = "kept" if self._is_kept else "not kept"
        more = ""
        if self._is_left(found, kept.seconds):
            rest = "stock MLX serves the rest"
            later = "the rest is measured at the next loads"
            more = f"; {rest if kept.is_given_up else later}"
        decision_log.tell(f"measured: {served}; {seconds:.0f} s, {stored}{more}")

    @contextmanager
    def _stopping(self, consequence: str) -> Iterator[None]:
        """Ends a part of the timing after an error in it, and all after Ctrl-C."""
        try:
            yield
        except KeyboardInterrupt:
            self._has_stopped = True
            children.end_all()
            decision_log.tell(
                "measuring was interrupted: it continues when the model is loaded"
            )
        except Exception as error:  # a kernel's, MLX's or the model's
            warn_once(
                f"not measured: {type(error).__name__}: {error}",
                f"a model could not be measured, so {consequence}: "
                f"{type(error).__name__}: {error}",
            )

    def _is_left(self, found: Sequence[LayerUse], seconds: Seconds) -> bool:
        """Returns whether a product or a pass of the model is not measured."""
        if any(map(self.products.left, found)):
            return True
        can_run = forward_race.can_run(self.model)
        return can_run and bool(forward_race.missing(seconds))

    def _convert_as(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.convert(recipe)
        self._is_converted = True

    def _undo(self) -> None:
        self._is_converted = False
        self.undo()

    def _ensure_converted(self) -> None:
        if not self._is_converted:
            self._convert_as(self.recipe)

    def _use_layout(self, layout: str | None) -> None:
        if not self.recipe.decides_layout or layout in (None, self.recipe.layout):
            return
        if self._is_converted:
            self._undo()
        self._convert_as(self.recipe.with_layout(str(layout)))

    def _missing_rows(self) -> tuple[int, ...]:
        """Returns the rows of forward passes to time; they need a model of mlx-lm's."""
        if any(map(is_marlin_layer, computing_layers(self.model))):
            return ()  # stock MLX does not run it now
        if self._is_given_up or not forward_race.can_run(self.model):
            return ()
        raced = self.recipe.raced
        return forward_race.missing(raced.seconds if raced else {})

    def _say_why(self) -> None:
        changed = result_files.changes(self.folder, self.machine)
        if changed:
            decision_log.tell(f"measuring again: {changed}")

    def _layouts(self) -> tuple[str, ...]:
        """Returns the layouts in which our kernels compete."""
        if not self.recipe.decides_layout:
            return (self.recipe.layout,)
        return ("marlin",) if is_packed_faster() else ("mlx", "marlin")

    def _run_products(self, found: Sequence[LayerUse]) -> None:
        """Times products, and leaves to stock MLX what there is no time for."""
        race = self.products
        for problem in (p for each in found for p in race.problems(each, 1).values()):
            measured_results.begin_again(self.machine, problem)
        left = [each for each in found if race.left(each)]
        if not left:
            return
        if self._is_given_up:
            self._leave(left)
            return
        has_failed = True
        with self._stopping("the cost model decides who serves what is left"):
            if self._kernels.ahead is None:
                key = self.recipe.key
                self._kernels = stock_kernels.for_race(found, key, None, {})
            if selection.traits().compiles_ahead:
                compile_steps(race.steps(left), self._bar)
            self._time(left)
            has_failed = False
        if self._has_stopped or not has_failed:
            self._leave([each for each in left if race.left(each)])

    def _leave(self, products: Sequence[LayerUse]) -> None:
        """Leaves what is not timed to stock MLX, which reads MLX's layout only."""
        for each in products:
            problem = self.products.problems(each, 1).get("mlx")
            if problem is not None:
                measured_results.leave_to_stock(self.machine, problem)

    def _options(self) -> dict[str, Any]:
        """Returns the options of `optimize` that convert a model like this one."""
        options = self.recipe.options | {"layout": self.recipe.conversion.layout}
        fuse = sorted(self.recipe.fuse) if self.recipe.trace else None
        return {**options, "fuse": fuse, "measure": False}

    def _time(self, left: Sequence[LayerUse]) -> None:
        """Times products while there is time, and those of MLX's kernels are ready."""
        self._bar.expect(sum(len(self.products.left(each)) for each in left))
        while True:
            for product in left:
                self._time_product(product)
            if self.products.budget.is_over or not self._kernels.waits_for_pass:
                return
            self._bar.say(self._kernels.told)
            self.wait(WAIT)

    def _time_product(self, product: LayerUse) -> None:
        """Times a product; what an interrupt leaves is kept too."""
        try:
            for m in self.products.run(product):
                self._has_timed = True
                self._bar.say(f"timing {product.title}, {m} rows")
                self._bar.step()
        finally:
            if self._unwritten:
                self._write(self._unwritten)
                self._unwritten.clear()

    def _compare(self, rows: Sequence[int], is_needed: bool) -> Seconds:
        """Returns the seconds of forward passes with stock MLX and our kernels."""
        ready = [m for m in rows if self._kernels.has_pass(m)]
        if self._turns.stock:
            ready = [m for m in rows if m in self._turns.stock[0]]
        may_begin = is_needed or self._turns.has_time
        if ready and may_begin and not self._has_stopped:
            with self._stopping("its forward passes are not compared"):
                self._turns.take(ready, self.recipe.layout == "mlx")
        found = forward_race.medians(self._turns.stock, self._turns.ours)
        self._has_timed = self._has_timed or bool(found)
        return found

    def _keep_forwards(self, found: Seconds, lost: bool) -> Forwards:
        """Keeps the times of the model; stock MLX serves rows at which it was
        slower."""
        raced, layout = self.recipe.raced, self.recipe.layout
        before = raced.seconds if raced and raced.layout == layout else {}
        kept = Forwards(
            key=self.recipe.key,
            layout=layout,
            seconds=before | found,
            date=date.today().isoformat(),
            invariant=self.recipe.conversion.invariant,
            packed_lost=lost or (raced is not None and raced.packed_lost),
            tries=raced.tries if raced is not None else 0,
        )
        products = products_of(self.model, self.target)
        if self._is_left(products, kept.seconds):
            kept = replace(kept, tries=kept.tries + self._tries())
        ours = {
            m: [each for each in (self._ours_of(p, m) for p in products) if each]
            for m in kept.slower
            if m in found
        }
        # Where stock MLX serves every product already, the difference is noise.
        slower = [m for m in ours if ours[m] or m not in kept.stock_rows]
        left = [each for m in slower if m in kept.stock_rows for each in ours[m]]
        if raced is None or kept != replace(raced, date=kept.date):
            self._write([self._live(problem) for problem in left], [kept])
        if slower:
            decision_log.tell(outcome.slower(slower, kept))
        return kept

    def _tries(self) -> int:
        """Returns by how many tries a load has come closer to giving up."""
        if self._has_stopped or self._is_given_up:
            return 0
        return measurement.WAITED if self._kernels.running else measurement.TRIED

    def _ours_of(self, product: LayerUse, m: int) -> AnyProblem | None:
        """Returns the problem of a product in MLX's layout, if our kernels serve it.

        Where only packed weights raced, a refusal is a prediction and does not count.
        """
        problem = self.products.problem(product, m, "mlx")
        if problem is None or "mlx" not in self.products.layouts:
            return problem
        answer = serving.serve_problem(problem, self.place)
        return None if isinstance(answer, Refusal) else problem

    def _live(self, problem: AnyProblem) -> Result:
        """Returns the result that leaves a problem to stock MLX."""
        known = self.products.known.get(problem)
        if known is not None:
            return replace(known, stock=True, live=True)
        return Result(
            plan=contenders(problem, self.place.device)[0],
            stock=True,
            medians_us={},
            clock=self.clock.name,
            date=date.today().isoformat(),
            live=True,
        )

    def _write(
        self, results: Sequence[Result], forwards: Sequence[Forwards] = ()
    ) -> None:
        try:
            measured_results.keep(self.folder, self.machine, results, forwards)
            self._is_kept = True
        except OSError as error:
            self._is_kept = False
            warn_once(f"not kept: {error}", f"what was measured is not kept: {error}")


def run(
    model: nn.Module, recipe: Recipe, convert: Callable[[Recipe], None], undo: Step
) -> Forwards:
    """Converts a model and times what is not known; Ctrl-C ends the timing only."""
    race = Race(
        model=model,
        recipe=recipe,
        convert=convert,
        undo=undo,
        clock=clock(this_machine.device()),
        now=monotonic,
        wait=sleep,
    )
    return race.run()


def clock(device: Any) -> Clock:
    """Returns the clock of the race: few and short samples."""
    measure = partial(
        clocks.wall_time, seconds=product_race.SECONDS, rounds=product_race.ROUNDS
    )
    return replace(clocks.clock_of(device), measure=measure)
