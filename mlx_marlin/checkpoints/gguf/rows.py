"""Which rows of a tensor in a file are those of a parameter, and in which order.

llama.cpp's conversion permutes rows for its kernels, and joins some projections. What
it did is a rule here, by the name that `architectures` uses; facts are from its
conversion/llama.py and conversion/qwen.py at commit 03173d5e.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mlx_marlin.checkpoints.gguf.container import Container

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Index: TypeAlias = npt.NDArray[np.int64]

Rule: TypeAlias = "Callable[[Container, int], Index]"


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Heads of linear attention (gated delta nets)."""

    keys: int  # heads of queries and keys
    values: int  # heads of values, a multiple of `keys`
    key_dim: int  # features of a head of keys
    value_dim: int  # features of a head of values


def linear_heads(container: Container) -> LinearHeads:
    """Returns the heads of linear attention that the metadata say."""
    prefix = f"{container.text('general.architecture')}.ssm."
    keys, values, key_dim, inner = (
        container.integer(prefix + key)
        for key in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    if not keys or not values or values % keys:
        raise container.refusal(f"{prefix}group_count", f"does not divide {values}")
    if not inner or inner % values:
        raise container.refusal(
            f"{prefix}inner_size", f"is not whole heads of {values}"
        )
    return LinearHeads(keys, values, key_dim, inner // values)


def _in_pairs(key: str) -> Rule:
    """Of a head's rows, row i of each half are stored next to each other."""

    def index(container: Container, rows: int) -> "Index":
        import numpy as np

        prefix = f"{container.text('general.architecture')}.attention."
        heads = container.integer(f"{prefix}head_count")
        if f"{prefix}{key}" in container.metadata:
            heads = container.integer(f"{prefix}{key}")
        if heads == 0 or rows % (2 * heads):
            raise ValueError(
                f"{rows} rows cannot be divided into pairs of {heads} heads"
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    return index


def _half(which: int) -> Rule:
    def index(_: Container, rows: int) -> "Index":
        import numpy as np

        if rows % 2:
            raise ValueError(f"{rows} rows are not those of two projections")
        half = rows // 2
        return np.arange(which * half, (which + 1) * half)

    return index


def _grouped(container: Container, rows: int) -> "Index":
    """Puts heads of values that have one head of keys next to each other.

    They are the last rows. In the file there is one for each head of keys, and so on.
    """
    import numpy as np

    heads = linear_heads(container)
    first = max(0, rows - heads.values * heads.value_dim)
    width, rest = divmod(rows - first, heads.values)
    if not width or rest:
        raise ValueError(f"{rows} rows are not those of {heads.values} heads")
    values = np.arange(first, rows).reshape(-1, heads.keys, width).swapaxes(0, 1)
    return np.concatenate([np.arange(first), values.reshape(-1)])


def _of_key_heads(which: int) -> Rule:
    """Each head of keys has the betas of its heads of values, and then the alphas."""

    def index(container: Container, rows: int) -> "Index":
        import numpy as np

        heads = linear_heads(container)
        if rows != 2 * heads.values:
            raise ValueError(f"{rows} rows, expected two for {heads.values} heads")
        return np.arange(rows).reshape(heads.keys, 2, -1)[:, which].reshape(-1)

    return index


RULES: dict[str, Rule] = {
    "pairs of queries": _in_pairs("head_count"),
    "pairs of keys": _in_pairs("head_count_kv"),
    "gate": _half(0),
    "up": _half(1),
    "grouped": _grouped,
    "betas": _of_key_heads(0),
    "alphas": _of_key_heads(1),
}
