"""The race when `optimize` meets a model: its products, the layout, the whole model.

What is measured is kept with the machine's results, so a later call times nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import mlx.nn as nn

from mlx_marlin import decision_log, progress, state
from mlx_marlin.backends import result_files, selection, tuned_results
from mlx_marlin.lm.known_layers import is_packed_faster
from mlx_marlin.lm.layer_conversion import is_marlin_layer
from mlx_marlin.lm.module_tree import computing_layers
from mlx_marlin.lm.race import forward_race, product_race
from mlx_marlin.lm.race.forward_race import Samples
from mlx_marlin.lm.race.layout_choice import faster_layout
from mlx_marlin.lm.race.model_products import ModelProduct, products_of
from mlx_marlin.lm.race.product_race import ProductRace, contenders
from mlx_marlin.lm.recipe import Recipe
from mlx_marlin.lm.report.target import Target
from mlx_marlin.lm.warm_up import compile_steps
from mlx_marlin.lm.warn_once import warn_once
from mlx_marlin.measure import clocks
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import Forwards, Result
from mlx_marlin.planning.verdict import Refusal
from mlx_marlin.products import eligibility, serving

SECONDS = 20.0
"""Time of a race, compilation included. What is left continues at the next load. CUDA's
kernels take longer to compile: there a race ends when it is finished."""
FEW = 8
"""Rows of forward passes by whose sum a packed model is judged."""

Step = Callable[[], None]
Seconds = dict[int, tuple[float, float]]
"""Rows -> seconds of a forward pass with stock MLX and with our kernels."""


@dataclass(kw_only=True)
class Race:
    """The race of one model.

    Attributes:
        model: The model.
        recipe: What `optimize` does with it.
        convert: Converts the model as a recipe says.
        undo: Undoes the conversion.
        clock: What measures products.
        deadline: When to stop, by `now`.
        now: Clock that limits the race.
    """

    model: nn.Module
    recipe: Recipe
    convert: Callable[[Recipe], None]
    undo: Step
    clock: Clock
    deadline: float
    now: Callable[[], float]

    def __post_init__(self) -> None:
        self.target = Target.of(None)
        self.machine = tuned_results.machine(self.target.device, selection.backend())
        self.folder = result_files.folder()
        self._has_stopped = False
        self._is_converted = False
        self._stock: list[Samples] = []
        self._ours: list[Samples] = []
        stored = tuned_results.known(self.folder, self.machine)
        self.products = ProductRace(
            device=self.target.device,
            clock=self.clock,
            layouts=self._layouts(),
            stock=self.recipe.decides_layout or self.recipe.layout == "mlx",
            known=stored.results,
            store=lambda result: self._write([result]),
            is_over=self._is_over,
        )

    def run(self) -> Forwards:
        """Converts the model, times what is not known yet, and returns its times."""
        rows = self._missing_rows()
        if rows or not self.products.known:
            self._say_why()
        with self._stopping("its forward passes are not compared"):
            if rows:
                self._stock.append(self._sample(rows))
        self._convert_as(self.recipe)
        found = self._run_products()
        raced = self.recipe.raced
        if raced is None or not raced.packed_lost:
            self._use_layout(faster_layout(self.products, found))
        for problem, count in self.products.unfinished:
            tuned_results.leave_to_stock(self.machine, problem, count)
        state.reset()  # calls were prepared without the results
        seconds = self._compare(rows)
        lost = self._loses_packed(seconds)
        if lost:
            self._use_layout("mlx")
            seconds = self._compare(rows)
        kept = self._keep_forwards(seconds, lost)
        state.reset()
        return kept

    @contextmanager
    def _stopping(self, consequence: str) -> Iterator[None]:
        """Ends a part of the timing after an error in it, and all after Ctrl-C."""
        try:
            yield
        except KeyboardInterrupt:
            self._has_stopped = True
            decision_log.tell(
                "measuring was interrupted: it continues when the model is loaded"
            )
        except Exception as error:  # a kernel's, MLX's or the model's
            warn_once(
                f"not measured: {type(error).__name__}: {error}",
                f"a model could not be measured, so {consequence}: "
                f"{type(error).__name__}: {error}",
            )

    def _is_over(self) -> bool:
        return self._has_stopped or self.now() >= self.deadline

    def _convert_as(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.convert(recipe)
        self._is_converted = True

    def _undo(self) -> None:
        self._is_converted = False
        self.undo()

    def _use_layout(self, layout: str | None) -> None:
        if not self.recipe.decides_layout or layout in (None, self.recipe.layout):
            return
        self._undo()
        self._convert_as(self.recipe.with_layout(str(layout)))

    def _missing_rows(self) -> tuple[int, ...]:
        """Returns the rows of forward passes to time; they need a model of mlx-lm's."""
        if any(map(is_marlin_layer, computing_layers(self.model))):
            return ()  # stock MLX does not run it now
        if not forward_race.can_run(self.model):
            return ()
        raced = self.recipe.raced
        known = raced.seconds if raced else {}
        return tuple(m for m in forward_race.ROWS if m not in known)

    def _say_why(self) -> None:
        changed = result_files.changes(self.folder, self.machine)
        if changed:
            decision_log.tell(f"measuring again: {changed}")

    def _layouts(self) -> tuple[str, ...]:
        """Returns the layouts in which our kernels compete."""
        if not self.recipe.decides_layout:
            return (self.recipe.layout,)
        return ("marlin",) if is_packed_faster() else ("mlx", "marlin")

    def _run_products(self) -> list[ModelProduct]:
        """Times products, and returns those of the model."""
        race, found = self.products, products_of(self.model, self.target)
        rows = (1,) * self.recipe.decides_layout + product_race.ROWS
        for problem in (p for each in found for p in race.problems(each, 1).values()):
            tuned_results.begin_again(self.machine, problem)
        left = [each for each in found if not race.is_finished(each, rows)]
        if not left:
            return found
        with self._stopping("the cost model decides who serves what is left"):
            if selection.traits().compiles_ahead:
                compile_steps(race.steps(left, rows))
            for product in _shown(left):
                race.run(product, rows)
        if self._has_stopped:
            for product in left:
                if not race.is_finished(product, rows):
                    race.leave(product)
        return found

    def _sample(self, rows: Sequence[int], samples: int = 1) -> Samples:
        return forward_race.sample(self.model, rows, samples, self._is_over)

    def _compare(self, rows: Sequence[int]) -> Seconds:
        """Returns the seconds of forward passes with stock MLX and our kernels."""
        self._ours.clear()
        with self._stopping("its forward passes are not compared"):
            self._take_turns(rows)
        if not self._is_converted:  # it was interrupted in stock MLX's turn
            self._convert_as(self.recipe)
        return forward_race.medians(self._stock, self._ours)

    def _loses_packed(self, found: Seconds) -> bool:
        """Returns whether packed weights, where the race decides, are slower in all."""
        few = [pair for m, pair in found.items() if m <= FEW]
        stock, ours = (sum(pair[i] for pair in few) for i in (0, 1))
        packed = self.recipe.decides_layout and self.recipe.layout == "marlin"
        return packed and ours > stock

    def _take_turns(self, rows: Sequence[int]) -> None:
        """Times forward passes with our kernels and, in turns, with stock MLX.

        Packed weights would have to be unpacked, so there are no turns with them.
        """
        rows = [m for m in rows if self._stock and m in self._stock[0]]
        if not rows:
            return
        in_place, rounds = self.recipe.layout == "mlx", forward_race.ROUNDS
        self._ours.append(self._sample(rows, 1 if in_place else rounds))
        for _ in range(rounds - 1):
            if not in_place or self._is_over():
                return
            self._undo()
            self._stock.append(self._sample(rows))
            self._convert_as(self.recipe)
            self._ours.append(self._sample(rows))

    def _keep_forwards(self, found: Seconds, lost: bool) -> Forwards:
        """Keeps the times of the model; stock MLX serves rows at which it was slower.

        Args:
            found: The times.
            lost: Whether packed weights were given back because they were slower.
        """
        raced, layout = self.recipe.raced, self.recipe.layout
        before = raced.seconds if raced and raced.layout == layout else {}
        kept = Forwards(
            key=self.recipe.key,
            layout=layout,
            seconds=before | found,
            date=date.today().isoformat(),
            invariant=self.recipe.conversion.invariant,
            packed_lost=lost or (raced is not None and raced.packed_lost),
        )
        products = products_of(self.model, self.target)
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
            decision_log.tell(_told(slower, kept))
        return kept

    def _ours_of(self, product: ModelProduct, m: int) -> AnyProblem | None:
        """Returns the problem of a product in MLX's layout, if our kernels serve it.

        Where only packed weights raced, a refusal is a prediction and does not count.
        """
        problem = self.products.problem(product, m, "mlx")
        if problem is None or "mlx" not in self.products.layouts:
            return problem
        answer = serving.serve_problem(problem, self.target.serving)
        return None if isinstance(answer, Refusal) else problem

    def _live(self, problem: AnyProblem) -> Result:
        """Returns the result that leaves a problem to stock MLX."""
        known = self.products.known.get(problem)
        if known is not None:
            return replace(known, stock=True, live=True)
        return Result(
            plan=contenders(problem, self.target.device)[0],
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
            result_files.write(self.folder, self.machine, results, forwards)
        except OSError as error:
            tuned_results.remember(self.machine, results, forwards)
            warn_once(f"not kept: {error}", f"what was measured is not kept: {error}")


def run(
    model: nn.Module, recipe: Recipe, convert: Callable[[Recipe], None], undo: Step
) -> Forwards:
    """Converts a model and times what is not known; Ctrl-C ends the timing only.

    Args:
        model: The model.
        recipe: What to do with it.
        convert: Converts the model as a recipe says.
        undo: Undoes the conversion.

    Returns:
        The times of its forward passes.
    """
    race = Race(
        model=model,
        recipe=recipe,
        convert=convert,
        undo=undo,
        clock=clock(eligibility.target()),
        deadline=inf if selection.traits().compiles_ahead else monotonic() + SECONDS,
        now=monotonic,
    )
    return race.run()


def clock(device: Any) -> Clock:
    """Returns the clock of the race: few and short samples.

    Args:
        device: This machine's GPU.
    """
    measure = partial(
        clocks.wall_time, seconds=product_race.SECONDS, rounds=product_race.ROUNDS
    )
    return replace(clocks.clock_of(device), measure=measure)


def _told(rows: Sequence[int], kept: Forwards) -> str:
    if kept.stock_rows:
        served = "stock MLX serves them"
    elif kept.invariant:
        served = "they serve them all the same, since it is invariant"
    else:
        served = "packed weights stay, which stock MLX cannot read"
    listed = ", ".join(map(str, rows))
    return f"the whole model was slower with our kernels at {listed} rows: {served}"


def _shown(products: Sequence[ModelProduct]) -> Iterator[ModelProduct]:
    """Yields products one by one, and shows the shape of each on a progress bar."""
    with progress.bar("measure", "product", len(products)) as bar:
        for product in products:
            bar.set_description(f"measure {product.name}")
            yield product
            bar.update()
