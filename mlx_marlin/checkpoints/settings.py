"""Where the quantization settings of a folder are, and what each of their keys decides.

The table of keys is taken from the classes that write them: AutoGPTQ 0.7.1 and AutoAWQ
0.2.9 (their BaseQuantizeConfig and AwqConfig), GPTQModel 7.7
(gptqmodel/quantization/config.py), transformers 5 (utils/quantization_config.py, which
optimum writes), AutoRound 0.14's exports, ModelOpt's
(modelopt/torch/export/convert_hf_config.py), compressed-tensors 0.20
(quantization/quant_config.py, quant_args.py), and mlx-lm 0.32 (utils.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_marlin.checkpoints.folder import Folder, read_json
from mlx_marlin.regular_files import quoted, short


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


CALIBRATION = words(
    """
    act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym amp
    auto_forward_data_parallel autoround_version batch_size cache_block_outputs
    cache_examples_on_gpu compute_device_filter damp_auto_increment damp_percent dataset
    device disable_exllama do_fuse enable_minmax_tuning enable_norm_bias_tuning
    enable_quanted_input exllama_config failsafe fallback fuse_max_seq_len gc_mode gptaq
    gradient_accumulate_steps hessian iters low_gpu_mem_usage lr max_input_length
    minmax_lr model_file_base_name model_free model_name_or_path model_seqlen moe
    modules_to_fuse mse not_use_best_mse nsamples offload_to_disk offload_to_disk_path
    pack_impl
    pad_token_id parallel_packing provider sampler scale_dtype seqlen static_groups
    supported_types tokenizer train_bs true_sequential use_cuda_fp16 use_exllama v2
    v2_alpha v2_memory_device vram_strategy wait_for_submodule_finalizers
    """
)
"""How a tool found the numbers, computes with them or is called."""
PLACES = words(
    """
    block_name_to_quantize lm_head module_name_preceding_first_block
    modules_in_block_to_quantize modules_to_not_convert quant_block_list
    to_quant_block_names
    """
)
"""Which layers are quantized: their tensors tell."""
ABSENT: tuple[object, ...] = (None, False, {}, [])
"""Values that say that something is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the keys of an object of settings decide. Other keys are refused."""

    # A reader uses them, or compares them with the tensors
    used: frozenset[str] = frozenset()
    # The values that a reader takes; others change weights or the model in ways that it
    # does not know
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    irrelevant: frozenset[str] = frozenset()  # They decide no number of a weight

    def check(self, settings: Mapping[str, Any], where: str) -> None:
        """Raises a ValueError that names a key or value that is not known.

        An unknown key that is null says nothing.
        """
        for key in settings.keys() - self.used - self.irrelevant:
            value, neutral = settings[key], self.neutral.get(key, (None,))
            # 0 equals False.
            if any(value == one and type(value) is type(one) for one in neutral):
                continue
            expected = "no such key: it may decide numbers; remove it if it does not"
            if key in self.neutral:
                expected = f"one of {neutral}"
            raise ValueError(
                f"{where}: {short(key)}={quoted(value)}, expected {expected}"
            )


CODE = {
    "model_file": "the code of another model than mlx-lm's, which is never run here: "
    "use mlx_lm.load(..., trust_remote_code=True) if you trust it",
    "quantize_activations": "layers that round their inputs: set it to false to "
    "compute with inputs as they are",
}
"""Keys of a config that change which code computes a model, and what they ask for."""


def check_code(config: Mapping[str, Any], where: str) -> None:
    """Raises a ValueError if a config asks for other code than its model's."""
    for key, meaning in CODE.items():
        if config.get(key) not in ABSENT:
            raise ValueError(f"{where}: {key}={quoted(config[key])}: {meaning}")


_INTEGERS = {
    "pack_dtype": (None, "int32"),
    "data_type": (None, "int"),
    **dict.fromkeys(words("rotation adapter extra_config"), ABSENT),
    **dict.fromkeys(words("super_bits super_group_size"), ABSENT),
}
KEYS = {
    "gptq": Keys(
        used=words(
            "quant_method method format checkpoint_format bits w_bit wbits group_size "
            "q_group_size sym desc_act dynamic meta"
        ),
        neutral={
            **_INTEGERS,
            **dict.fromkeys(words("is_marlin_format awq_gemm_checkpoint"), ABSENT),
            "packing_format": (None, "auto_round:auto_gptq", "auto_round:gptqmodel"),
        },
        irrelevant=CALIBRATION | PLACES | {"backend"},
    ),
    "awq": Keys(
        used=words(
            "quant_method method format checkpoint_format version bits w_bit wbits "
            "group_size q_group_size zero_point dynamic"
        ),
        neutral={
            **_INTEGERS,
            # Kernels; "llm-awq" is another layout.
            "backend": (
                *(None, "auto", "auto_trainable", "autoawq", "machete", "marlin"),
                *("exllama_v1", "exllama_v2", "gemm", "gemm_triton", "gemv"),
                *("gemv_fast", "torch_awq", "torch_fused_awq"),
            ),
            "packing_format": (None, "auto_round:auto_awq", "auto_round:awq"),
        },
        # The layout has no order of columns, but GPTQModel writes desc_act;
        # transformers writes sym=true beside zero_point=true.
        irrelevant=CALIBRATION | PLACES | {"desc_act", "meta", "sym"},
    ),
    "dynamic": Keys(used=words("bits group_size sym desc_act"), irrelevant=CALIBRATION),
    "compressed-tensors": Keys(
        used=words("quant_method format config_groups sparsity_config"),
        neutral=dict.fromkeys(words("transform_config moe_sparsity_config"), ABSENT),
        # The cache keeps its dtype here.
        irrelevant=words(
            "ignore quantization_status kv_cache_scheme global_compression_ratio "
            "version run_compressed dequantize use_optimized_inference"
        ),
    ),
    "sparsity_config": Keys(
        neutral={"format": (None, "dense")},
        irrelevant=words(
            "global_sparsity ignore registry_requires_subclass sparsity_structure "
            "targets"
        ),
    ),
    "group": Keys(
        used=words("weights format"),
        # Activations keep their dtype here.
        irrelevant=words("targets input_activations output_activations"),
    ),
    "weights": Keys(
        used=words("num_bits type symmetric group_size strategy actorder"),
        neutral=dict.fromkeys(words("block_structure dynamic"), ABSENT),
        irrelevant=words("scale_dtype zp_dtype observer observer_kwargs"),
    ),
    "modelopt": Keys(
        used=words("quant_method quant_algo group_size"),
        neutral=dict.fromkeys(words("has_zero_point pre_quant_scale"), ABSENT),
        # The cache and activations keep their dtypes here.
        irrelevant=words(
            "config_groups exclude_modules ignore kv_cache_quant_algo kv_cache_scheme "
            "producer quantized_layers"
        ),
    ),
    "fp8": Keys(
        used=words("quant_method weight_block_size"),
        neutral={
            "fmt": (None, "e4m3", "float8_e4m3fn"),
            "scale_fmt": (None, "float", "ue8m0"),
        },
        # Activations keep their dtype here.
        irrelevant=PLACES | words("activation_scheme dequantize ignored_layers"),
    ),
    "mlx": Keys(
        used=words("bits group_size mode"),
        neutral={"quantize_input": ABSENT},
        irrelevant=words("quant_method"),
    ),
    "mlx: layer": Keys(
        used=words("bits group_size mode global_scale"),
        neutral={"quantize_input": ABSENT},
    ),
}
"""By method, and by the place of an object inside of a method's settings."""


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
