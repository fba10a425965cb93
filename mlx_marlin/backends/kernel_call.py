"""What building a kernel returns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


class KernelCall(Protocol):
    """What `mx.fast.metal_kernel` and `cuda_kernel` return, to MLX an `object`."""

    def __call__(
        self,
        *,
        inputs: Sequence["mx.array"],
        template: Sequence[tuple[str, "mx.Dtype | int | bool"]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence["mx.Dtype"],
        init_value: float | None = None,
    ) -> list["mx.array"]:
        """Adds one dispatch to the graph."""
        ...
