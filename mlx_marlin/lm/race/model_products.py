"""The distinct products of a model's layers, with the weights that they multiply."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.joined import MarlinPart, whole
from mlx_marlin.layers.native import native_weight
from mlx_marlin.lm.report.layer_groups import described
from mlx_marlin.lm.report.layer_product import LayerProduct
from mlx_marlin.lm.report.target import Target
from mlx_marlin.measure.timing import Weight
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import plain, product_of
from mlx_marlin.planning.problem import Problem, in_stock_mlx
from mlx_marlin.products import serving
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.products.request import Request
from mlx_marlin.products.serving import Refusal

MOST_LAYERS = 8
"""Most layers whose weights a chain reads in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProduct:
    """A product that layers of a model compute."""

    product: LayerProduct  # What one of the layers computes
    # The layers that hold the weights; of joined layers, the one of all
    layers: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The shape as k→n, with the number of experts."""
        weight = self.product.weight
        assert weight is not None
        experts = f", {weight.batch[0]} experts" if self.product.choices else ""
        return f"{weight.k}→{weight.n}{experts}"

    @property
    def layout(self) -> str:
        """The layout of the layers' weights."""
        assert self.product.weight is not None
        return self.product.weight.layout

    def request(self, m: int, layout: str) -> Request:
        """Returns the call of a layer with m rows, if its weight had a layout."""
        assert self.product.weight is not None
        weight = replace(self.product.weight, layout=layout)
        product = replace(self.product, weight=weight, parts=(), bias=False)
        return product.request(m, on_cpu=False)

    def problem(self, m: int, layout: str) -> AnyProblem | None:
        """Returns the problem that is raced, or None if our kernels do not serve it."""
        found = serving.problem_of(self.request(m, layout))
        return None if isinstance(found, Refusal) else plain(found)

    def rows_of(self, problem: AnyProblem) -> int:
        """Returns the rows of the layer's input for a problem of it."""
        return product_of(problem).m // max(self.product.choices, 1)

    def weights(self, layout: str, count: int) -> list[Weight]:
        """Returns the arrays of the first layers, in a layout."""
        return [_arrays(layer, layout) for layer in self.layers[:count]]

    def count(self, m: int, device: PlanningDevice) -> int:
        """Returns how many layers have weights that exceed the caches together."""
        problem = self.problem(m, self.layout)
        assert problem is not None
        product = product_of(problem)
        experts = min(product.m, len(self._experts)) if self.product.choices else 1
        needed = device.cache_bytes // (product.weight_bytes * experts) + 1
        return min(needed, MOST_LAYERS, len(self.layers))

    @property
    def _experts(self) -> range:
        assert self.product.weight is not None
        return range(self.product.weight.batch[0])


def products_of(model: nn.Module, target: Target) -> list[ModelProduct]:
    """Returns the distinct products that may be served by us or by stock MLX.

    The one that reads most comes first.
    """
    found: dict[AnyProblem, list[tuple[LayerProduct, Any]]] = {}
    for _, layer, product in described(model, target):
        if product.weight is None or product.stays or not product.is_converted:
            continue
        if isinstance(layer, MarlinPart) and layer.index:
            continue  # the first part has the joined weight
        if product.invariant or product.weight.global_scale:
            continue
        one = ModelProduct(product=product, layers=())
        if "not transposed" in product.operation:
            continue
        problem = one.problem(1, one.layout)
        if problem is not None and in_stock_mlx(product_of(problem)) is not None:
            found.setdefault(problem, []).append((product, whole(layer)))
    products = [
        ModelProduct(product=pairs[0][0], layers=tuple(layer for _, layer in pairs))
        for pairs in found.values()
    ]
    return sorted(products, key=_bytes, reverse=True)


def single_products(
    model: nn.Module, layouts: Sequence[str]
) -> tuple[Counter[Problem], int]:
    """Returns the products of a model's layers that have one weight, with one row.

    An embedding counts if it is also the output head. Its weight stays in its layout,
    because rows of it are read too.
    """
    counts: Counter[Problem] = Counter()
    others = 0
    for _, layer, product in described(model, Target.of(None)):
        if product.weight is None or product.weight.batch:
            continue
        one = ModelProduct(product=product, layers=(layer,))
        given = layouts
        if product.operation == "as_linear":
            given = (one.layout if product.is_converted else "mlx",)
        elif getattr(layer, "is_packed_only", False):
            given = ("marlin",)
        found = [one.problem(1, layout) for layout in given]
        counts.update(each for each in found if isinstance(each, Problem))
        others += not any(found)
    return counts, others


def stock_parts(product: ModelProduct) -> Sequence[int]:
    """Returns the rows of the weights that stock MLX multiplies one by one."""
    assert product.product.weight is not None
    return product.product.parts or (product.product.weight.n,)


def _bytes(product: ModelProduct) -> int:
    problem = product.problem(1, product.layout)
    assert problem is not None
    return product_of(problem).weight_bytes * len(product.layers)


def _arrays(layer: Any, layout: str) -> tuple[mx.array, ...]:
    """Returns codes, scales and biases of a layer, or scales in place of biases."""
    packed = getattr(layer, "packed", None)
    if layout == "marlin":
        if packed is None:
            w, scales, biases, (group_size, bits, mode) = native_weight(layer)
            packed = pack(
                w, scales, biases, group_size=group_size, bits=bits, mode=mode
            )
        return packed.words, packed.scales, packed.scales
    if packed is not None:
        w, scales, *rest = unpack(packed)
        return w, scales, rest[0] if rest else scales
    w, scales, biases, _ = native_weight(layer)
    return w, scales, scales if biases is None else biases
