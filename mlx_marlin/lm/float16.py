"""`optimize(compute="float16")`: models in bfloat16 compute in float16.

GPUs without bfloat16 arithmetic emulate it. Converting a model's parameters is enough:
activations and caches have their dtype.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.lm.module_tree import Changes, named_arrays
from mlx_marlin.lm.options import COMPUTE
from mlx_marlin.lm.warm_up import cache_factory

LARGEST = 65504
SMALLEST_NORMAL = 2.0**-14
"""Numbers of float16. It is not documented that Apple's GPUs keep smaller ones."""
MOST_LOSS = 2.0**-9
"""Largest relative error of a parameter in the root mean square: that of bfloat16's own
rounding."""
PROMPT = 16
"""Tokens of the prompt that is computed as a check."""
_RECORD = "_float16_record"
"""Attribute of a converted model: the rounded elements of each parameter, by path."""


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


@dataclass(frozen=True, slots=True)
class Rounded:
    """Elements of a parameter that bfloat16 cannot regain from float16."""

    positions: Any  # Their positions in the flat array, of NumPy
    values: Any  # Their bfloat16 bits, of NumPy, uint16


Record = dict[str, Rounded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Float16Outcome:
    """What `optimize(compute="float16")` does with the parameters of a model."""

    arrays: int  # Arrays that become float16
    elements: int  # Their elements
    # Elements that float16 does not hold exactly. Each is below 2^-17, and is changed
    # by at most 2^-25
    rounded: int

    def __str__(self) -> str:
        """Returns a sentence."""
        return (
            f"compute=float16: {self.arrays} bfloat16 arrays convert; {self.rounded} "
            f"of {self.elements} elements are rounded, by at most 3e-8"
        )


def outcome_of(model: nn.Module) -> Float16Outcome:
    """Returns what becomes of the parameters of a model."""
    found: dict[int, mx.array] = {}  # keeps copies, so that no ID occurs twice
    rounded = 0
    for container, key, _ in named_arrays(model, mx.bfloat16):
        array = container[key]
        if id(array) not in found:
            found[id(array)] = array
            rounded += _rounded(array, _to_half(array)).positions.size
    return Float16Outcome(
        arrays=len(found),
        elements=sum(array.size for array in found.values()),
        rounded=rounded,
    )


def use_float16(model: nn.Module, changes: Changes) -> None:
    """Converts the bfloat16 parameters of a model to float16, and runs a short prompt.

    `model`: A model that `check_compute` accepts, without joined layers.
    """
    dtype = logits_dtype(model)
    record = vars(model).get(_RECORD) or {}
    known = {*record}

    # Undoing is exact, so that no parameter is held twice.
    def undo() -> None:
        _give_back(model, record, {*record} - known)

    changes.record(undo)
    vars(model)[_RECORD] = record
    for container, key, path in named_arrays(model, mx.bfloat16):
        array = container[key]
        half = _to_half(array)
        record[path] = _rounded(array, half)
        container[key] = half
    if record.keys() != known:
        check_logits(model, dtype)


def give_back_bfloat16(model: nn.Module, changes: Changes) -> None:
    """Converts the parameters that `use_float16` has converted back to bfloat16.

    A parameter has the bits that it had, unless it was changed. Parameters of packed
    layers have other names than MLX's: call it before and after their conversion.
    """
    record: Record | None = vars(model).get(_RECORD)
    if record is None:
        return
    before = dict(record)

    def undo() -> None:
        given = before.keys() - record.keys()
        for container, key, path in named_arrays(model, mx.bfloat16):
            if path in given:
                container[key] = _to_half(container[key])
        record.update(before)
        vars(model)[_RECORD] = record

    changes.record(undo)
    _give_back(model, record, {*before})


def drop_float16_record(model: nn.Module, changes: Changes) -> None:
    """Drops what is known of parameters that were converted and are no longer there.

    If another conversion has replaced them, as quantization does, the float16 arrays of
    the same layer are rounded to bfloat16, so that the layer computes in one dtype.
    """
    record: Record | None = vars(model).get(_RECORD)
    if record is None:
        return
    layers = {_layer_of(path) for path in record}
    rounded: list[tuple[Any, Any, mx.array]] = []

    def undo() -> None:
        for container, key, half in rounded:
            container[key] = half
        vars(model)[_RECORD] = record

    changes.record(undo)
    del vars(model)[_RECORD]
    for container, key, path in named_arrays(model, mx.float16):
        if _layer_of(path) in layers:
            rounded.append((container, key, container[key]))
            container[key] = container[key].astype(mx.bfloat16)
            mx.eval(container[key])


def _layer_of(path: str) -> str:
    return path.rpartition(".")[0]


def _give_back(model: nn.Module, record: Record, paths: set[str]) -> None:
    """Converts the parameters with these paths back, if they are there."""
    for container, key, path in named_arrays(model, mx.float16):
        if path in paths and path in record:
            container[key] = _to_bfloat16(container[key], record[path])
            del record[path]
    if not record:
        vars(model).pop(_RECORD, None)


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
