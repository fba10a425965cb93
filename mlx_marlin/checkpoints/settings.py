"""Where the quantization settings of a folder are, and which method they name."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_marlin.checkpoints.folder import Folder, read_json
from mlx_marlin.checkpoints.setting_keys import CALIBRATION, KEYS, PLACES
from mlx_marlin.regular_files import quoted, short

METHODS = ("gptq", "awq", "compressed-tensors", "modelopt", "fp8", "mlx")
SEPARATE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of settings beside config.json, with the method if they name none: those of
AutoGPTQ and GPTQModel, of AutoAWQ, and of NVIDIA's ModelOpt."""
AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
PACKINGS = {
    **dict.fromkeys(("auto_gptq", "gptq", "gptqmodel"), "gptq"),
    **dict.fromkeys(("auto_awq", "awq"), "awq"),
}
"""The method by AutoRound's `packing_format`, without "auto_round:" before it."""
PLAIN_BITS = 16
"""Layers of so many bits are not quantized, in AutoRound's settings of single ones."""

NUMBERS = ("bits", "w_bit", "wbits", "num_bits", "group_size", "q_group_size")
"""Keys of settings whose values are numbers."""


def in_config(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns where config.json has settings, and what is there; None if nothing is.

    As in mlx-lm, a model with a part for text may have them in that part's config.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    places = {
        "quantization": config.get("quantization"),
        "quantization_config": config.get("quantization_config"),
        "text_config: quantization_config": inner,
    }
    found = ((key, value) for key, value in places.items() if value is not None)
    return next(found, ("", None))


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config without what `in_config` finds."""
    places = ("quantization", "quantization_config")
    kept = {key: value for key, value in config.items() if key not in places}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = {k: v for k, v in text.items() if k not in places}
    return kept


def method_of(folder: Folder) -> tuple[str, dict[str, Any]]:
    """Returns how a checkpoint is quantized, and the settings: ("", {}) if it is
    not."""
    place, settings = in_config(folder.config)
    where = f"{folder.path / 'config.json'}: {place}"
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(f"{where}={quoted(settings)}, expected an object")
    method = "mlx"
    if place != "quantization":
        for name, usual in SEPARATE_FILES.items():
            if (file := folder.path / name).exists():
                method = usual if settings is None else method
                where = f"{file} and {where}".removesuffix(": ")
                own = read_json(file)
                if isinstance(own.get("quantization"), dict):  # ModelOpt's
                    own = own["quantization"]
                settings = _united(own, settings or {}, where)
        if settings is None:
            return "", {}
        named = one_value(settings, where, "quant_method", "method")
        method = method if named is None else named
    if method == "mxfp4":  # gpt-oss's own, whose blocks mlx-lm renames
        return "mlx", {"mode": "mxfp4", "group_size": 32, "bits": 4}
    if method in AUTO_ROUND:
        method, settings = _of_auto_round(settings, where)
    if method not in METHODS:
        known = (*METHODS, "auto-round", "mxfp4")
        raise ValueError(
            f"{where}: quant_method={quoted(method)}, expected one of {known}; of "
            f"other methods, convert the model's plain weights"
        )
    for kind, part, inner in _parts(method, settings):
        if not isinstance(inner, dict):
            raise ValueError(
                f"{where}: {short(part)}={quoted(inner)}, expected an object"
            )
        place = f"{where}: {short(part)}" if part else where
        KEYS[kind].check(inner, place)
        _check_numbers(inner, place)
    return method, settings


def _of_auto_round(settings: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Returns the method of AutoRound's folder, and its settings in the method's
    terms."""
    packing = str(settings.get("packing_format") or settings.get("backend") or "")
    name = packing.lower().removeprefix("auto_round:").partition(":")[0]
    symmetric = settings.get("sym") is True
    is_ambiguous = name == "gptqmodel" and not symmetric
    if name not in PACKINGS or is_ambiguous:
        expected = "'auto_round:auto_gptq' or 'auto_round:auto_awq'"
        raise ValueError(
            f"{where}: packing_format={quoted(packing)}, expected {expected}"
        )
    own = {
        key: value
        for key, value in settings.items()
        if key not in ("packing_format", "backend", "extra_config", "quant_method")
    }
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"{where}: extra_config={quoted(extra)}, expected an object")
    layers = {
        layer: {key: value for key, value in said.items() if key != "data_type"}
        for layer, said in extra.items()
        if isinstance(said, dict) and said.get("bits") != PLAIN_BITS
    }
    if layers:
        own["dynamic"] = layers
    method = PACKINGS[name]
    if method == "awq" and "sym" in own:
        own["zero_point"] = not symmetric
    return method, own


def _check_numbers(settings: Mapping[str, Any], where: str) -> None:
    """Raises a ValueError if a number is in quotes."""
    for key in NUMBERS:
        if isinstance(value := settings.get(key), str):
            raise ValueError(
                f"{where}: {key}={quoted(value)} is a text, expected a number: remove "
                f"the quotes in the file"
            )


def one_value(settings: Mapping[str, Any], where: str, *keys: str) -> Any:
    """Returns the value of a setting with several names; None if it has none.

    Strings are returned in lower case.
    """
    found = {key: settings[key] for key in keys if settings.get(key) is not None}
    values = [v.lower() if isinstance(v, str) else v for v in found.values()]
    if any(value != values[0] for value in values):
        raise ValueError(f"{where}: {short(str(found))}, expected the same value")
    return values[0] if values else None


def _united(own: dict[str, Any], config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the settings of two files, which must agree on what decides numbers."""
    for key in ({*own} & {*config}) - CALIBRATION - PLACES - {"meta", "backend"}:
        both = {"in its own file": own[key], "in config.json": config[key]}
        one_value(both, f"{where}: {key}", *both)
    return own | {key: value for key, value in config.items() if value is not None}


def _parts(method: str, settings: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the key of `KEYS`, the place and the value of each object of settings."""
    whole = dict(settings)
    if method == "mlx":
        for key, value in settings.items():
            if isinstance(value, dict):
                yield "mlx: layer", key, whole.pop(key)
            elif isinstance(value, bool) and key not in KEYS[method].neutral:
                whole.pop(key)  # whether this layer is quantized
    for pattern, value in _objects(whole, "dynamic"):
        yield "dynamic", pattern, value
    if method == "compressed-tensors":
        if whole.get("sparsity_config"):
            yield "sparsity_config", "sparsity_config", whole["sparsity_config"]
        for group, value in _objects(whole, "config_groups"):
            yield "group", group, value
            if isinstance(value, dict) and value.get("weights") is not None:
                yield "weights", f"{group}: weights", value["weights"]
    yield method, "", whole


def _objects(settings: dict[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Yields what an object of objects holds, or the value that is no object."""
    value = settings.get(key)
    if isinstance(value, dict):
        yield from ((f"{key}: {name}", inner) for name, inner in value.items())
    elif value is not None:
        yield key, value
