"""Scaling of rotary embeddings: llama.cpp's metadata as mlx-lm's `rope_scaling`."""

from math import isclose, isfinite, log, pi, sqrt
from typing import Any, cast

from mlx_marlin.checkpoints.gguf.blocks import read_plain
from mlx_marlin.checkpoints.gguf.configuration.facts import Facts
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
    "gemma4_text": ("proportional",),
    "phi3": ("longrope",),
    "gpt_oss": ("linear", "yarn"),
    "ministral3": ("yarn",),
}
"""Scalings of mlx-lm's models, by model type; others have none."""
PARTIAL = ("phi3", "glm4", "glm4_moe", "qwen3_5", "qwen3_5_moe")
"""Model types of mlx-lm that may rotate a part of a head."""
_NAMES = ("none", "linear", "yarn", "longrope")
"""Values of `rope.scaling.type` in llama.cpp (src/llama-model.cpp, commit 00342301)."""
_TYPE = "rope.scaling.type"
_ATTENTION = "rope.scaling.attn_factor"
_ORIGINAL = "rope.scaling.original_context_length"
_FACTORS = "rope_freqs.weight"
_NOT_ROTATED = float(1 << 80)
"""Wavelengths that are so many times as long rotate nothing; Gemma 4's files: 1e30."""
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


def check_rope(facts: Facts, model_type: str) -> None:
    """Refuses rotary embeddings that mlx-lm's model does not have."""
    key = "rope.dimension_count"
    if (
        model_type not in PARTIAL
        and facts.integer(key, facts.head_dim) != facts.head_dim
    ):
        raise facts.refusal(key, f"must be {facts.head_dim}, the width of a head")
    scaling = _scaling_type(facts)
    if scaling != "longrope" and facts.real(_ATTENTION, 1.0) != 1.0:
        # llama.cpp multiplies queries and keys by it, whatever the scaling is.
        raise facts.refusal(_ATTENTION, "must be 1 for mlx-lm")
    if scaling is not None and scaling not in (*_SCALINGS.get(model_type, ()), "none"):
        reason = f"({scaling}) is not in mlx-lm's {model_type!r}"
        if scaling == "llama3":
            raise facts.container.refusal(_FACTORS, reason)
        raise facts.refusal(_TYPE, reason)


def rope_scaling(facts: Facts, base: float) -> dict[str, Any] | None:
    """Returns mlx-lm's `rope_scaling`, or None if rotations are not scaled."""
    scaling = _scaling_type(facts)
    if scaling in (None, "none"):
        return None
    if scaling == "proportional":
        return _proportional(facts)
    if scaling == "llama3":
        return _llama3(facts, base)
    if scaling == "longrope":
        return _longrope(facts)
    factor = facts.positive(_factor_key(facts))
    if scaling == "linear":
        return {"type": "linear", "factor": factor}
    optional = {
        name: facts.real(f"rope.scaling.yarn_{name}")
        for name in ("beta_fast", "beta_slow")
        if f"rope.scaling.yarn_{name}" in facts
    }
    original = facts.integer(_ORIGINAL)
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        **optional,
    }


def _factor_key(facts: Facts) -> str:
    """Returns the key of the factor: the older one only if the other is not there."""
    newer, older = "rope.scaling.factor", "rope.scale_linear"
    return older if older in facts and newer not in facts else newer


def _scaling_type(facts: Facts) -> str | None:
    """Returns the scaling that tensors or keys say; None without one."""
    name = _named_scaling(facts)
    of_lengths = list(filter(facts.has, _LONGROPE))
    if facts.has(_FACTORS):
        if of_lengths:
            raise ValueError(
                f"{facts.container.path}: tensor {of_lengths[0]!r} is beside "
                f"{_FACTORS!r}, expected one of the two"
            )
        tensors = "proportional" if facts.prefix == "gemma4." else "llama3"
    elif of_lengths:
        tensors = "longrope"
    else:
        return "linear" if name is None and _is_scaled(facts) else name
    if name not in (None, "none", "linear", tensors):
        raise facts.refusal(_TYPE, f"is beside {tensors} in tensors")
    if name != "none" and _is_scaled(facts):
        # llama.cpp would divide frequencies by both.
        raise facts.refusal(_factor_key(facts), f"must be 1 beside {tensors}")
    return tensors


def _named_scaling(facts: Facts) -> str | None:
    if _TYPE not in facts:
        return None
    name = facts.container.text(facts.prefix + _TYPE)
    if name not in _NAMES:
        raise facts.refusal(_TYPE, f"is not one of {[*_NAMES]}")
    return name


def _is_scaled(facts: Facts) -> bool:
    """Returns whether a factor scales frequencies; llama.cpp takes 0 for 1."""
    return facts.real(_factor_key(facts), 1.0) not in (0.0, 1.0)


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


def _proportional(facts: Facts) -> dict[str, Any]:
    """Returns Gemma 4's rotation of a part of a head.

    The file has a factor for each pair of features: 1, and 1e30 for those that are not
    rotated.
    """
    factors = _factors(facts.container, _FACTORS)
    rotated = factors.count(1.0)
    still = [factor for factor in factors[rotated:] if factor >= _NOT_ROTATED]
    if 2 * len(factors) != facts.head_dim or rotated + len(still) != len(factors):
        raise ValueError(
            f"{facts.container.path}: tensor {_FACTORS!r} is not {facts.head_dim // 2} "
            f"factors, 1 and then {_NOT_ROTATED:.0e}"
        )
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": rotated / len(factors),
    }


def _llama3(facts: Facts, base: float) -> dict[str, Any]:
    """Returns Llama 3's scaling if its factors are those of the file."""
    container, head_dim = facts.container, facts.head_dim
    factors = _factors(container, _FACTORS)
    factor = max(factors)
    if len(factors) != (head_dim + 1) // 2 or not all(
        isclose(given, wanted, rel_tol=1e-4)
        for given, wanted in zip(
            factors, _llama3_factors(base, head_dim, factor), strict=True
        )
    ):
        raise ValueError(
            f"{container.path}: tensor {_FACTORS!r} is not Llama 3's scaling with "
            f"base {base}, and mlx-lm takes no factors"
        )
    return {"type": "llama3", "factor": factor, **LLAMA3}


def _llama3_factors(base: float, head_dim: int, factor: float) -> list[float]:
    """Returns what the wavelength of each pair of features is multiplied by."""
    context = LLAMA3["original_max_position_embeddings"]
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        turns = context / (2 * pi * base ** (index / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _longrope(facts: Facts) -> dict[str, Any]:
    """Returns Phi-3's scaling; mlx-lm derives the factor of attention by itself."""
    longest, original = facts.integer("context_length"), facts.integer(_ORIGINAL)
    if original < 2:
        raise facts.refusal(_ORIGINAL, "is not above 1")
    ratio = longest / original
    expected = sqrt(1 + log(ratio) / log(original)) if ratio > 1 else 1.0
    if not isclose(facts.real(_ATTENTION, 1.0), expected, rel_tol=1e-3):
        raise facts.refusal(_ATTENTION, f"must be {expected:.6f} for mlx-lm's 'phi3'")
    long, short = (_factors(facts.container, name) for name in _LONGROPE)
    return {
        "type": "longrope",
        "long_factor": long,
        "short_factor": short,
    }
