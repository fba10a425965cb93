"""Which of MLX's own kernels a race needs, and whether they are compiled already."""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.backends.cuda.compiling.ahead import Ahead, Job
from mlx_marlin.lm.race import forward_race, product_calls
from mlx_marlin.lm.race.model_products import ModelProduct
from mlx_marlin.lm.report.layer_product import LayerProduct
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
    """The kernels that stock MLX runs in a race, compiled by other processes.

    Attributes:
        products: What the layers compute.
        rows: The rows of products.
        key: What the times of the model are kept by.
        model: The model in MLX's layers as `pickled` has it; None if no pass is timed.
        ahead: The processes; None where MLX compiles nothing at run time.
    """

    products: Sequence[LayerProduct]
    rows: Sequence[int]
    key: str = ""
    model: bytes | None = None
    ahead: Ahead | None = None
    _jobs: dict[Rows, Job] = field(default_factory=dict)
    _pass: Job | None = None

    def start(self) -> None:
        """Starts what is not compiled yet."""
        if self.ahead is None:
            return
        if self.model is not None:
            name = f"pass {self.key}"
            self._pass = Job(name=name, module=__name__, argument=self.model)
        described = {replace(each, is_converted=True) for each in self.products}
        ordered = sorted(described, key=repr)
        for group in _groups(m for m in self.rows if m > GROUPS[0]):
            name, argument = repr((ordered, group)), pickle.dumps((ordered, group))
            job = Job(name=name, module=__name__, argument=argument)
            self._jobs[group] = job
        self.ahead.start([*([self._pass] if self._pass else []), *self._jobs.values()])

    def has_products(self, m: int) -> bool:
        """Returns whether stock MLX's products of m rows compile nothing now."""
        jobs = (job for group, job in self._jobs.items() if m in group)
        return all(self.ahead is None or self.ahead.is_done(job) for job in jobs)

    def has_pass(self, m: int) -> bool:
        """Returns whether a forward pass of m rows compiles few and small kernels."""
        return not self.waits_for_pass and self.has_products(m)

    @property
    def waits_for_pass(self) -> bool:
        """Whether a process still compiles what forward passes of any rows need."""
        if self.ahead is None or self._pass is None:
            return False
        return self.ahead.is_running(self._pass)

    @property
    def told(self) -> str:
        """What is being done, and how much of it is done; "" if nothing is."""
        if self.ahead is None:
            return ""
        jobs = [*self._jobs.values(), *([self._pass] if self._pass else [])]
        running = sum(map(self.ahead.is_running, jobs))
        done = len(jobs) - running
        return f"compiling MLX's own kernels, {done} of {len(jobs)}" * bool(running)


def for_race(
    products: Sequence[LayerProduct],
    rows: Sequence[int],
    key: str,
    model: bytes | None,
) -> StockKernels:
    """Returns the kernels of a race on this machine; starts to compile them."""
    is_slow = selection.traits().compiles_ahead
    ahead = Ahead(str(mx.__version__)) if is_slow else None  # type: ignore[attr-defined]
    found = StockKernels(
        products=products, rows=rows, key=key, model=model, ahead=ahead
    )
    found.start()
    return found


def _groups(rows: Iterable[int]) -> list[Rows]:
    by_group: dict[int, list[int]] = {}
    for m in sorted(set(rows)):
        by_group.setdefault(sum(m > most for most in GROUPS), []).append(m)
    return [tuple(each) for each in by_group.values()]


def pickled(model: nn.Module) -> bytes | None:
    """Returns a model without the contents of its arrays, or None if it has others.

    What cannot be pickled, such as a lambda, is compiled when it is needed.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(model)
    except Exception:  # whatever a module's attributes raise
        return None
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
    found = _Unpickler(io.BytesIO(argument)).load()
    compute: Callable[..., None] = (
        _pass if isinstance(found, nn.Module) else _multiply_all
    )
    compute(found)


def _pass(model: nn.Module) -> None:
    del model.layers[LAYERS:]
    forward_race.sample(model, [1], 1, lambda: False)


def _multiply_all(job: tuple[Sequence[LayerProduct], Rows]) -> None:
    products, rows = job
    for m in rows:
        for product in products:
            one = ModelProduct(product=product, layers=())
            x, (indices,) = product_calls.activations(one, m, 1)
            entry = product_calls.Entry(plan=None, layout="mlx")
            call = product_calls.call(one, m, entry)
            mx.eval(call(x, *_zeros(product), *indices))


def _zeros(product: LayerProduct) -> tuple[mx.array, mx.array, mx.array]:
    """Returns a weight of zeros in MLX's layout."""
    weight = product.weight
    assert weight is not None
    shape = *weight.batch, weight.n
    words = mx.zeros((*shape, weight.k * weight.bits // 32), mx.uint32)
    scales = mx.zeros(
        (*shape, weight.k // weight.group_size), dtype(weight.scale_dtype)
    )
    return words, scales, scales
