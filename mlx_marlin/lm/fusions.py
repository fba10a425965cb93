"""The fusions of a traced decoder block that `optimize(fuse=...)` switches on."""

from collections.abc import Iterable

FUSIONS = {
    "residual": "the residual sum into the output and down projections",
    "gate": "gate, up and activation of an MLP or shared expert into one product",
    "norm": "the RMSNorm into the product that follows, for few rows",
    "rope": "the norms of q's and k's heads, and rope, into one kernel",
    "add_norm": "the sum after attention and the norm after it into one kernel",
    "experts": "experts: choice, gate and up with activation, and sum, a kernel each",
}
"""Fusion -> what it fuses."""


def fusions(fuse: Iterable[str] | None, trace: bool = True) -> frozenset[str]:
    """Returns fusions by their names; None for those that a back end has by default."""
    if fuse is None:
        from mlx_marlin.backends import selection  # it imports MLX

        return selection.traits().fusions
    names = None if isinstance(fuse, str) else frozenset(fuse)
    if names is None or not names <= FUSIONS.keys():
        raise ValueError(f"fuse={fuse!r}: expected some of {(*FUSIONS,)}, as a tuple")
    if names and not trace:
        raise ValueError(f"fuse={fuse!r}: expected trace=True, got trace=False")
    return names
