"""Records the instances of our kernels that the static check of `make test` sees.

After a change of the kernels' template arguments or of the instances that there are:

    python tests/covering_variants.py

It takes half a minute. `tests/shaders/test_static_check.py` compares what is recorded
with every instance.
"""

import json
from itertools import groupby

from support.shader_variants import RECORDED, Variant, choose_covering


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


if __name__ == "__main__":
    RECORDED.write_text(recorded(choose_covering()))
