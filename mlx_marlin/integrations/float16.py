"""`optimize(compute="float16")`: models in bfloat16 compute in float16.

GPUs without bfloat16 arithmetic emulate it. Converting a model's parameters is enough:
activations and caches have their dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.integrations.mlx_lm.module_changes import Changes
from mlx_marlin.integrations.mlx_lm.module_tree import entries
from mlx_marlin.integrations.mlx_lm.warm_up import cache_factory
from mlx_marlin.layers.joined import MarlinPart

COMPUTE = ("float16",)
"""Values of the option `compute`."""
LARGEST = 65504
SMALLEST_NORMAL = 2.0**-14
"""Numbers of float16. It is not documented that Apple's GPUs keep smaller ones."""
MOST_LOSS = 2.0**-9
"""Largest relative error of a parameter in the root mean square: that of bfloat16's own
rounding."""
PROMPT = 16
"""Tokens of the prompt that is computed as a check."""
ADAPTED = ("linear", "embedding")
"""Names under which mlx-lm's adapters hold the layer that they adapt."""
_RECORD = "_float16_record"


@dataclass(frozen=True, slots=True)
class Rounded:
    """Elements of a parameter that bfloat16 cannot regain from float16.

    Attributes:
        positions: Their positions in the flat array, of NumPy.
        values: Their bfloat16 bits, of NumPy, uint16.
    """

    positions: Any
    values: Any


@dataclass(slots=True)
class Record:
    """What `restore` needs, at the converted model.

    Attributes:
        rounded: The rounded elements of each converted parameter, by its path.
    """

    rounded: dict[str, Rounded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float16Outcome:
    """What `optimize(compute="float16")` does with the parameters of a model.

    Attributes:
        arrays: Arrays that become float16.
        elements: Their elements.
        rounded: Elements that float16 does not hold exactly. Each is below 2^-17, and
            is changed by at most 2^-25.
    """

    arrays: int
    elements: int
    rounded: int

    def __str__(self) -> str:
        """Returns a sentence."""
        return (
            f"compute=float16: {self.arrays} bfloat16 arrays convert; {self.rounded} "
            f"of {self.elements} elements are rounded, by at most 3e-8"
        )


def check_compute(model: nn.Module, compute: str | None) -> Float16Outcome | None:
    """Returns what becomes of a model's parameters; None if `compute` is None.

    Raises:
        ValueError: If `compute` is unknown, if the model is of a family that overflows
            float16, or has a parameter that float16 does not hold.
    """
    if compute is None:
        return None
    if compute not in COMPUTE:
        raise ValueError(f"compute={compute!r}: expected None or one of {COMPUTE}")
    _check_family(model)
    elements: dict[int, int] = {}
    rounded = 0
    for container, key, path in _arrays(model, mx.bfloat16):
        array = container[key]
        if id(array) in elements:
            continue
        reason = _why_not(array, path)
        if reason is not None:
            raise _refused(f"{path} {reason}")
        elements[id(array)] = array.size
        rounded += _rounded(array, _to_half(array)).positions.size
    return Float16Outcome(
        arrays=len(elements), elements=sum(elements.values()), rounded=rounded
    )


def use_float16(model: nn.Module, changes: Changes) -> None:
    """Converts the bfloat16 parameters of a model to float16, and runs a short prompt.

    Args:
        model: A model that `check_compute` accepts, without joined layers.
        changes: Records the changes.

    Raises:
        ValueError: If the logits of the prompt are not finite, or are wider than those
            of the model in bfloat16.
    """
    dtype = _logits_dtype(model)
    record = vars(model).get(_RECORD) or Record()
    known = {*record.rounded}

    # Undoing is exact, so that no parameter is held twice.
    def undo() -> None:
        _give_back(model, record, {*record.rounded} - known)

    changes.record(undo)
    vars(model)[_RECORD] = record
    for container, key, path in _arrays(model, mx.bfloat16):
        array = container[key]
        half = _to_half(array)
        record.rounded[path] = _rounded(array, half)
        container[key] = half
    if dtype is not None and dtype == mx.bfloat16:
        _check_logits(model)


def give_back_bfloat16(model: nn.Module, changes: Changes) -> None:
    """Converts the parameters that `use_float16` has converted back to bfloat16.

    A parameter has the bits that it had, unless it was changed. Parameters of packed
    layers have other names than MLX's: call it before and after their conversion.

    Args:
        model: The model.
        changes: Records the changes.
    """
    record: Record | None = vars(model).get(_RECORD)
    if record is None:
        return
    before = dict(record.rounded)
    given = _give_back(model, record, {*before})

    def undo() -> None:
        vars(model)[_RECORD] = record
        for container, key, path in _arrays(model, mx.bfloat16):
            if path in given:
                container[key] = _to_half(container[key])
        record.rounded.update({path: before[path] for path in given})

    changes.record(undo)


def _give_back(model: nn.Module, record: Record, paths: set[str]) -> set[str]:
    """Converts parameters back, and returns the paths of those that there were."""
    given = set()
    for container, key, path in _arrays(model, mx.float16):
        if path in paths:
            container[key] = _to_bfloat16(container[key], record.rounded.pop(path))
            given.add(path)
    if not record.rounded:
        vars(model).pop(_RECORD, None)
    return given


def _arrays(
    tree: Any, dtype: mx.Dtype, path: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Any, str]]:
    """Yields the arrays of a dtype in a model: their container, key and path.

    Paths are those without adapters. A shared array that is converted meanwhile is
    yielded once.
    """
    for key, entry in [*entries(tree)]:
        if isinstance(entry, mx.array) and entry.dtype == dtype:
            names = (name for name in path if name not in ADAPTED)
            yield tree, key, ".".join((*names, str(key)))
        elif isinstance(entry, dict | list) and not isinstance(entry, MarlinPart):
            yield from _arrays(entry, dtype, (*path, str(key)))


def _to_half(array: mx.array) -> mx.array:
    # On the CPU, whose conversion keeps subnormal numbers.
    half = array.astype(mx.float16, stream=mx.cpu)
    mx.eval(half)
    return half


def _rounded(array: mx.array, half: mx.array) -> Rounded:
    import numpy as np  # here, because serving does not need it

    own = _bits(array)
    positions = np.flatnonzero(own != _bits(half.astype(mx.bfloat16, stream=mx.cpu)))
    return Rounded(positions, own[positions])


def _to_bfloat16(half: mx.array, rounded: Rounded) -> mx.array:
    array = half.astype(mx.bfloat16, stream=mx.cpu)
    bits, positions = _bits(array), rounded.positions
    if positions.size and positions[-1] < bits.size:
        own = mx.array(rounded.values).view(mx.bfloat16).astype(mx.float16)
        unchanged = bits[positions] == _bits(own.astype(mx.bfloat16))
        bits[positions[unchanged]] = rounded.values[unchanged]
        array = mx.array(bits).view(mx.bfloat16).reshape(half.shape)
    mx.eval(array)
    return array


def _bits(array: mx.array) -> Any:
    """Returns the bits of a bfloat16 array, uint16 [size] of NumPy."""
    import numpy as np

    return np.array(array.flatten().view(mx.uint16))


def _why_not(array: mx.array, path: str) -> str | None:
    """Returns why float16 does not hold a parameter; None if it does."""
    wide = mx.abs(array.astype(mx.float32, stream=mx.cpu), stream=mx.cpu)
    largest = float(mx.max(mx.where(mx.isfinite(wide), wide, 0)))
    if largest > LARGEST:
        return f"has an element of {largest:.4g}, above {LARGEST}"
    if path.endswith("bias"):
        return None  # a summand: its error is absolute, at most 2^-14
    lost = mx.where(wide < SMALLEST_NORMAL, wide, 0)
    loss = float(mx.linalg.norm(lost) / mx.maximum(mx.linalg.norm(wide), 1e-30))
    if loss > MOST_LOSS:
        return (
            f"is too small: elements below {SMALLEST_NORMAL:.2g} are {loss:.1%} of it"
        )
    return None


def _refused(reason: str) -> ValueError:
    return ValueError(f"compute='float16': {reason}; expected compute=None")


def _check_family(model: nn.Module) -> None:
    """Raises a ValueError if a model is known to need bfloat16."""
    for module in model.modules():
        own = type(module).__module__.rpartition(".")[2]
        if "gemma" in own:
            raise _refused(
                f"{own} scales its embeddings, and its activations exceed {LARGEST}"
            )
        is_embedding = isinstance(module, nn.QuantizedEmbedding)
        if is_embedding and module["scales"].dtype == mx.uint8:
            raise _refused("MLX decodes embeddings whose scales are bytes to bfloat16")


def _logits(model: nn.Module) -> mx.array | None:
    """Returns the logits of a short prompt; None if that is not an mlx-lm model."""
    make_cache = cache_factory(model)
    if make_cache is None:
        return None
    logits: mx.array = model(mx.arange(PROMPT)[None], cache=make_cache())
    return logits


def _logits_dtype(model: nn.Module) -> mx.Dtype | None:
    logits = _logits(model)  # not evaluated
    return None if logits is None else logits.dtype


def _check_logits(model: nn.Module) -> None:
    logits = _logits(model)
    if logits is None:
        return
    if logits.dtype != mx.float16:
        raise _refused("the model has bfloat16 numbers that are no parameters")
    if not mx.all(mx.isfinite(logits)).item():
        raise _refused(f"activations of a short prompt exceed {LARGEST}")
