"""Whether a model in bfloat16 can compute in float16: `optimize(compute="float16")`."""

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.compute import COMPUTE
from mlx_marlin.lm.module_tree import named_arrays
from mlx_marlin.lm.warm_up import cache_factory

LARGEST = 65504
SMALLEST_NORMAL = 2.0**-14
"""Numbers of float16. It is not documented that Apple's GPUs keep smaller ones."""
MOST_LOSS = 2.0**-9
"""Largest relative error of a parameter in the root mean square: that of bfloat16's own
rounding."""
PROMPT = 16
"""Tokens of the prompt that is computed as a check."""


def check_compute(model: nn.Module, compute: str | None) -> None:
    """Checks the option `compute`, and that a model's parameters fit it."""
    if compute is None:
        return
    if compute not in COMPUTE:
        raise ValueError(f"compute={compute!r}: expected None or one of {COMPUTE}")
    _check_family(model)
    checked: dict[int, mx.array] = {}  # keeps copies, so that no ID occurs twice
    for container, key, path in named_arrays(model, mx.bfloat16):
        array = container[key]
        reason = None if id(array) in checked else _why_not(array, path)
        if reason is not None:
            raise refused(f"{path} {reason}")
        checked[id(array)] = array


def _why_not(array: mx.array, path: str) -> str | None:
    """Returns why float16 does not hold a parameter; None if it does.

    Infinities and NaN stay what they are.
    """
    if not array.size:
        return None
    with mx.stream(mx.cpu):  # which keeps subnormal numbers
        wide = mx.abs(array.astype(mx.float32))
        wide = mx.where(mx.isfinite(wide), wide, 0)
        largest = float(mx.max(wide))
        if largest > LARGEST:
            return f"has an element of {largest:.4g}, above {LARGEST}"
        # The error of a summand is absolute, at most 2^-14.
        if path.endswith("bias") or largest == 0:
            return None
        relative = wide / largest  # whose squares do not underflow
        lost = mx.where(wide < SMALLEST_NORMAL, relative, 0)
        loss = float(mx.linalg.norm(lost) / mx.linalg.norm(relative))
    if loss > MOST_LOSS:
        return (
            f"is too small: elements below {SMALLEST_NORMAL:.2g} are {loss:.1%} of it"
        )
    return None


def refused(reason: str) -> ValueError:
    """Returns the error for a model that does not fit float16."""
    return ValueError(f"compute='float16': {reason}; expected compute=None")


def _check_family(model: nn.Module) -> None:
    """Raises a ValueError if a model is known to need bfloat16."""
    for module in model.modules():
        own = type(module).__module__.rpartition(".")[2]
        if "gemma" in own:
            raise refused(
                f"{own} scales its embeddings, and its activations exceed {LARGEST}"
            )
        is_embedding = isinstance(module, nn.QuantizedEmbedding)
        if is_embedding and module["scales"].dtype == mx.uint8:
            raise refused("MLX decodes embeddings whose scales are bytes to bfloat16")


def _logits(model: nn.Module) -> mx.array | None:
    """Returns the logits of a short prompt; None if that is not an mlx-lm model."""
    make_cache = cache_factory(model)
    if make_cache is None:
        return None
    logits: mx.array = model(mx.arange(PROMPT)[None], cache=make_cache())
    return logits


def logits_dtype(model: nn.Module) -> mx.Dtype | None:
    """Returns the dtype of the logits; None if that is not an mlx-lm model."""
    logits = _logits(model)  # not evaluated
    return None if logits is None else logits.dtype


def check_logits(model: nn.Module, before: mx.Dtype | None) -> None:
    """Checks the logits of a short prompt.

    `model`: A model in float16.
    `before`: the dtype that its logits had. None if it is not an mlx-lm model, which is
    not checked.
    """
    logits = None if before is None else _logits(model)
    if logits is None:
        return
    if before == mx.bfloat16 and logits.dtype != mx.float16:
        raise refused("the model has bfloat16 numbers that are no parameters")
    if not mx.all(mx.isfinite(logits)).item():
        raise refused(f"activations of a short prompt exceed {LARGEST}")
