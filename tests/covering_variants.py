"""Records the instances of our kernels that the static check of `make test` sees.

After a change of the kernels' template arguments or of the instances that there are:

    python tests/covering_variants.py

It takes half a minute. `tests/shaders/test_static_check.py` compares what is recorded
with every instance.
"""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import groupby

from support.shader_variants import (
    RECORDED,
    Pair,
    Variant,
    chosen_variants,
    ordinary_variants,
)


def names_of(variant: Variant) -> tuple[str, tuple[str, ...]]:
    return variant.kernel, tuple(name for name, _ in variant.values)


def recorded(variants: tuple[Variant, ...]) -> str:
    """Returns instances as JSON, one a line, ordered by kernel."""
    texts = []
    by_kernel = sorted(variants, key=lambda each: each.kernel)
    for (kernel, names), group in groupby(by_kernel, names_of):
        rows = [[each.kind, *(value for _, value in each.values)] for each in group]
        lines = ",\n  ".join(map(json.dumps, rows))
        head = json.dumps(names)
        texts.append(
            f'{{"kernel": "{kernel}", "names": {head}, "instances": [\n  {lines}\n]}}'
        )
    return "[\n" + ",\n".join(texts) + "\n]\n"


def choose_covering() -> tuple[Variant, ...]:
    """Returns the chosen instances, and enough others that every two values meet."""
    chosen = chosen_variants()
    return *chosen, *pairwise(ordinary_variants(), chosen)


MOST_ABLE = 800
"""Instances with a pair among which the one with most other pairs is looked for."""


def pairwise(variants: Sequence[Variant], given: Sequence[Variant]) -> list[Variant]:
    """Instances that make, with the given ones, every pair of values meet."""
    missing: dict[tuple[str, Pair], list[Variant]] = {}
    shuffled = random.Random(0).sample(variants, len(variants))
    for variant in shuffled:
        for pair in variant.pairs:
            able = missing.setdefault((variant.kernel, pair), [])
            if len(able) < MOST_ABLE:
                able.append(variant)
    for variant in given:
        _cover(missing, variant)
    chosen = []
    while missing:
        candidates = min(missing.values(), key=len)
        best = max(candidates, key=lambda variant: _news(missing, variant))
        _cover(missing, best)
        chosen.append(best)
    return chosen


def _news(missing: Mapping[tuple[str, Pair], object], variant: Variant) -> int:
    return sum((variant.kernel, pair) in missing for pair in variant.pairs)


def _cover(missing: dict[tuple[str, Pair], list[Variant]], variant: Variant) -> None:
    for pair in variant.pairs:
        missing.pop((variant.kernel, pair), None)


if __name__ == "__main__":
    RECORDED.write_text(recorded(choose_covering()))
