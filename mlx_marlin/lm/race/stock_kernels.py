"""Which kernels a race needs from MLX, and whether they are compiled already."""

import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import registry, selection
from mlx_marlin.backends.children import Ahead, Job
from mlx_marlin.lm.race import forward_race, model_products, product_race
from mlx_marlin.lm.report.layer_uses import LayerUse
from mlx_marlin.lm.warm_up import compile_steps
from mlx_marlin.planning.measurement import PROMPTS
from mlx_marlin.weights.dtypes import dtype

GROUPS = (7, 16, 32)
"""Most rows of the products that one process computes; a last one has the others. MLX
(0.32.4) has kernels for up to 7, 16, 32 and more rows. Those of a group are compiled
one after the other, so other groups would cost time only."""
LAYERS = 4
"""Layers of a model whose forward pass a process computes: their kernels are alike, and
hybrid models have each kind among so many."""

Rows = tuple[int, ...]


@dataclass(kw_only=True)
class StockKernels:
    """The kernels that a race needs besides those of our products."""

    # The processes that compile them; None where MLX compiles nothing
    ahead: Ahead | None = None
    # By their rows, the jobs that compute stock MLX's products
    products: Mapping[Rows, Job] = field(default_factory=dict)
    # The jobs that compute forward passes of a model's first layers
    passes: Sequence[Job] = ()
    prompts: Sequence[Job] = ()

    @property
    def jobs(self) -> list[Job]:
        """All jobs, in the order in which they start."""
        return [*self.passes, *self.products.values(), *self.prompts]

    def start(self) -> None:
        """Starts what is not compiled yet."""
        if self.ahead is not None:
            self.ahead.start(self.jobs)

    def has_products(self, m: int) -> bool:
        """Returns whether stock MLX's products of m rows compile nothing now."""
        jobs = (job for group, job in self.products.items() if m in group)
        return all(self.ahead is None or self.ahead.is_done(job) for job in jobs)

    def has_pass(self, m: int) -> bool:
        """Returns whether a forward pass of m rows compiles few and small kernels."""
        waits = self.waits_for_pass or (m in PROMPTS and self._running(self.prompts))
        return not waits and self.has_products(m)

    @property
    def waits_for_pass(self) -> bool:
        """Whether a process still compiles what forward passes of any rows need."""
        return self._running(self.passes) > 0

    @property
    def running(self) -> int:
        """Number of the processes that still compile."""
        return self._running(self.jobs)

    def _running(self, jobs: Sequence[Job]) -> int:
        return 0 if self.ahead is None else sum(map(self.ahead.is_running, jobs))

    @property
    def told(self) -> str:
        """What is being done, and how much of it is done."""
        count = len(self.jobs)
        return f"compiling MLX's own kernels, {count - self.running} of {count}"


def for_race(
    products: Iterable[LayerUse],
    key: str,
    model: bytes | None,
    options: Mapping[str, Any],
) -> StockKernels:
    """Returns the kernels of a race on this machine; starts to compile them.

    `model`: the model in MLX's layers as `pickled` has it; None if no pass is timed.
    """
    version = str(mx.__version__)  # type: ignore[attr-defined]
    ahead = registry.named(selection.backend()).ahead(version)
    if ahead is None:
        return StockKernels()
    # Equal products of other layers need the same kernels.
    quantized = {
        replace(each, paths=(), layers=())
        for each in products
        if each.request is not None and not each.stays
    }
    ordered = sorted(quantized, key=repr)
    rows = {*product_race.ROWS, *product_race.BETWEEN, *forward_race.ROWS, *PROMPTS}
    by_rows = {
        group: _job(repr((ordered, group)), (ordered, group))
        for group in _groups(m for m in rows if m > GROUPS[0])
    }
    # MLX's other kernels are alike for all few rows; its products have other jobs.
    few = _passes("pass", key, model, None, (1,))
    few += _passes("pass", key, model, dict(options), forward_race.ROWS)
    prompts = _passes("prompts", key, model, None, PROMPTS)
    prompts += _passes("prompts", key, model, dict(options), PROMPTS)
    found = StockKernels(ahead=ahead, products=by_rows, passes=few, prompts=prompts)
    found.start()
    return found


def _passes(
    name: str,
    key: str,
    model: bytes | None,
    options: dict[str, Any] | None,
    rows: Sequence[int],
) -> list[Job]:
    if model is None:
        return []
    return [_job(f"{name} {key} {options}", (model, options, rows))]


def _job(name: str, argument: Any) -> Job:
    return Job(name=name, module=__name__, argument=_pickled(argument))


def _groups(rows: Iterable[int]) -> list[Rows]:
    by_group: dict[int, list[int]] = {}
    for m in sorted(set(rows)):
        by_group.setdefault(sum(m > most for most in GROUPS), []).append(m)
    return [tuple(each) for each in by_group.values()]


def pickled(model: nn.Module) -> bytes | None:
    """Returns a model without the contents of its arrays, or None if it has others.

    What cannot be pickled, such as a lambda, is compiled when it is needed.
    """
    try:
        return _pickled(model)
    except Exception:  # whatever a module's attributes raise
        return None


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, object: Any) -> Any:
        if isinstance(object, mx.array):
            return object.shape, str(object.dtype).removeprefix("mlx.core.")
        if isinstance(object, mx.Dtype):
            return None, str(object).removeprefix("mlx.core.")
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, found: Any) -> Any:
        shape, name = found
        return dtype(name) if shape is None else mx.zeros(shape, dtype(name))


def work(argument: bytes) -> None:
    """Computes, with zeros, what makes MLX compile; runs in a process of its own."""
    first, *rest = _Unpickler(io.BytesIO(argument)).load()
    if isinstance(first, bytes):
        _pass(first, *rest)
    else:
        _multiply_all(first, *rest)


def _pass(model: bytes, options: dict[str, Any] | None, rows: Sequence[int]) -> None:
    """Runs the first layers, converted if there are options."""
    layers: Any = _Unpickler(io.BytesIO(model)).load()
    del layers.layers[LAYERS:]
    if options is not None:
        from mlx_marlin.lm.optimize import optimize

        optimize(layers, **options)
        compile_steps(partial(forward_race.one_pass, layers, m) for m in rows)
    for m in rows:
        forward_race.passes(layers, m, 1)


def _multiply_all(products: Sequence[LayerUse], rows: Rows) -> None:
    for m in rows:
        for product in products:
            with suppress(Exception):  # it is compiled when it is needed
                _multiply(product, m)


def _multiply(product: LayerUse, m: int) -> None:
    x, (indices,) = model_products.activations(product, m, 1)
    entry = model_products.Entry(plan=None, layout="mlx")
    mx.eval(model_products.call(product, m, entry)(x, *_zeros(product), *indices))


def _zeros(product: LayerUse) -> tuple[mx.array, mx.array, mx.array]:
    """Returns a weight of zeros in MLX's layout."""
    call = product.call
    shape = *product.batch, call.n
    words = mx.zeros((*shape, call.k * call.bits // 32), mx.uint32)
    scales = mx.zeros((*shape, call.k // call.group_size), call.scale_dtype)
    return words, scales, scales
