"""Scaling of rotary embeddings: llama.cpp's metadata as mlx-lm's `rope_scaling`."""

from math import isclose, isfinite, log, pi, sqrt
from typing import Any, cast

from mlx_marlin.checkpoints.gguf.blocks import read_plain
from mlx_marlin.checkpoints.gguf.container import Container

LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling of Llama 3.1 to 3.3. The file stores only what becomes of it."""
_SCALINGS = {
    "llama": ("linear", "yarn", "llama3"),
    "qwen2": ("linear", "yarn"),
    "qwen3": ("linear", "yarn"),
    "gemma3_text": ("linear",),
    "phi3": ("longrope",),
    "gpt_oss": ("linear", "yarn"),
}
"""Scalings of mlx-lm's models, by model type; others have none."""
_NAMES = ("none", "linear", "yarn", "longrope")
"""Values of `rope.scaling.type` in llama.cpp (src/llama-model.cpp, commit 00342301)."""
_FACTORS = "rope_freqs.weight"
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


def check_rope(container: Container, head_dim: int, model_type: str) -> None:
    """Refuses rotary embeddings that mlx-lm's model does not have.

    Args:
        container: A GGUF file.
        head_dim: Features of a head.
        model_type: Model type in mlx-lm.

    Raises:
        ValueError: If there is a scaling that the model does not have, or if only a
            part of a head is rotated. The message names the file and the key.
    """
    prefix = _prefix(container)
    key = f"{prefix}rope.dimension_count"
    partial = key in container.metadata and container.integer(key) != head_dim
    if partial and model_type != "phi3":
        raise container.refusal(key, f"must be {head_dim}, the width of a head")
    scaling = _scaling_type(container)
    attention = f"{prefix}rope.scaling.attn_factor"
    if scaling != "longrope" and container.metadata.get(attention, 1.0) != 1.0:
        # llama.cpp multiplies queries and keys by it, whatever the scaling is.
        raise container.refusal(attention, "must be 1 for mlx-lm")
    if scaling is not None and scaling not in (*_SCALINGS.get(model_type, ()), "none"):
        place = _FACTORS if scaling == "llama3" else _type_key(container)
        raise container.refusal(place, f"({scaling}) is not in mlx-lm's {model_type!r}")


def rope_scaling(
    container: Container, base: float, head_dim: int
) -> dict[str, Any] | None:
    """Returns mlx-lm's `rope_scaling`, or None if rotations are not scaled.

    Args:
        container: A GGUF file.
        base: Base of the frequencies.
        head_dim: Features of a head.

    Raises:
        ValueError: If mlx-lm cannot scale in this way. The message names the file and
            the key or the tensor.
    """
    scaling = _scaling_type(container)
    if scaling in (None, "none"):
        return None
    if scaling == "llama3":
        return _llama3(container, base, head_dim)
    if scaling == "longrope":
        return _longrope(container)
    prefix = f"{_prefix(container)}rope.scaling."
    factor = container.positive(_factor_key(container))
    if scaling == "linear":
        return {"type": "linear", "factor": factor}
    optional = {
        "beta_fast": f"{prefix}yarn_beta_fast",
        "beta_slow": f"{prefix}yarn_beta_slow",
    }
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": container.integer(
            f"{prefix}original_context_length"
        ),
        **{
            name: container.real(key)
            for name, key in optional.items()
            if key in container.metadata
        },
    }


def _prefix(container: Container) -> str:
    return container.text("general.architecture") + "."


def _type_key(container: Container) -> str:
    return f"{_prefix(container)}rope.scaling.type"


def _factor_key(container: Container) -> str:
    """Returns the key of the factor: the older one only if the other is not there."""
    prefix, metadata = _prefix(container), container.metadata
    newer, older = f"{prefix}rope.scaling.factor", f"{prefix}rope.scale_linear"
    return older if older in metadata and newer not in metadata else newer


def _scaling_type(container: Container) -> str | None:
    """Returns the scaling that tensors or keys say; None without one."""
    name = _named_scaling(container)
    if _FACTORS in container.tensors:
        tensors = "llama3"
    elif any(each in container.tensors for each in _LONGROPE):
        tensors = "longrope"
    else:
        return "linear" if name is None and _is_scaled(container) else name
    if name not in (None, "none", "linear", tensors):
        raise container.refusal(_type_key(container), f"is beside {tensors} in tensors")
    if name != "none" and _is_scaled(container):
        # llama.cpp would divide frequencies by both.
        raise container.refusal(_factor_key(container), f"must be 1 beside {tensors}")
    return tensors


def _named_scaling(container: Container) -> str | None:
    key = _type_key(container)
    if key not in container.metadata:
        return None
    name = container.text(key)
    if name not in _NAMES:
        raise container.refusal(key, f"is not one of {[*_NAMES]}")
    return name


def _is_scaled(container: Container) -> bool:
    """Returns whether a factor scales frequencies; llama.cpp takes 0 for 1."""
    key = _factor_key(container)
    return key in container.metadata and container.real(key) not in (0.0, 1.0)


def _factors(container: Container, name: str) -> list[float]:
    """Reads factors of wavelengths."""
    info = container.tensors.get(name)
    if info is None or info.type.name != "F32" or len(info.shape) != 1:
        found = "missing" if info is None else f"{info.type.name} {info.shape}"
        raise ValueError(
            f"{container.path}: tensor {name!r} is {found}, expected F32 of one axis"
        )
    array = read_plain(container.data(info), info.type, info.shape)
    values = cast(list[float], array.tolist())
    if not all(isfinite(value) and value > 0 for value in values):
        raise ValueError(f"{container.path}: tensor {name!r} has a factor not above 0")
    return values


def _llama3(container: Container, base: float, head_dim: int) -> dict[str, Any]:
    """Returns Llama 3's scaling if its factors are those of the file."""
    factors = _factors(container, _FACTORS)
    factor = max(factors)
    if len(factors) != (head_dim + 1) // 2 or not all(
        isclose(given, wanted, rel_tol=1e-4)
        for given, wanted in zip(
            factors, llama3_factors(base, head_dim, factor), strict=True
        )
    ):
        raise ValueError(
            f"{container.path}: tensor {_FACTORS!r} is not Llama 3's scaling with "
            f"base {base}, and mlx-lm takes no factors"
        )
    return {"type": "llama3", "factor": factor, **LLAMA3}


def llama3_factors(base: float, head_dim: int, factor: float) -> list[float]:
    """Returns what the wavelength of each pair of features is multiplied by.

    Args:
        base: Base of the frequencies.
        head_dim: Features of a head.
        factor: The factor of long wavelengths.
    """
    context = LLAMA3["original_max_position_embeddings"]
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        turns = context / (2 * pi * base ** (index / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _longrope(container: Container) -> dict[str, Any]:
    """Returns Phi-3's scaling; mlx-lm derives the factor of attention by itself."""
    prefix = _prefix(container)
    original_key = f"{prefix}rope.scaling.original_context_length"
    longest = container.integer(f"{prefix}context_length")
    original = container.integer(original_key)
    if original < 2:
        raise container.refusal(original_key, "is not above 1")
    ratio = longest / original
    expected = sqrt(1 + log(ratio) / log(original)) if ratio > 1 else 1.0
    key = f"{prefix}rope.scaling.attn_factor"
    given = container.real(key) if key in container.metadata else 1.0
    if not isclose(given, expected, rel_tol=1e-3):
        raise container.refusal(key, f"must be {expected:.6f} for mlx-lm's 'phi3'")
    long, short = (_factors(container, name) for name in _LONGROPE)
    return {
        "type": "longrope",
        "long_factor": long,
        "short_factor": short,
    }
