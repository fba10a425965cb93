"""What each key of a folder's quantization settings decides: the one table of it.

Taken from the classes that write them: AutoGPTQ 0.7.1 and AutoAWQ 0.2.9 (their
BaseQuantizeConfig and AwqConfig), GPTQModel 7.7 (gptqmodel/quantization/config.py),
transformers 5 (utils/quantization_config.py, which optimum writes), AutoRound 0.14's
exports, ModelOpt's (modelopt/torch/export/convert_hf_config.py), compressed-tensors
0.20 (quantization/quant_config.py, quant_args.py), and mlx-lm 0.32 (utils.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_marlin.regular_files import quoted, short


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CALIBRATION = _words(
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
PLACES = _words(
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
    **dict.fromkeys(_words("rotation adapter extra_config"), ABSENT),
    **dict.fromkeys(_words("super_bits super_group_size"), ABSENT),
}
KEYS = {
    "gptq": Keys(
        used=_words(
            "quant_method method format checkpoint_format bits w_bit wbits group_size "
            "q_group_size sym desc_act dynamic meta"
        ),
        neutral={
            **_INTEGERS,
            **dict.fromkeys(_words("is_marlin_format awq_gemm_checkpoint"), ABSENT),
            "packing_format": (None, "auto_round:auto_gptq", "auto_round:gptqmodel"),
        },
        irrelevant=CALIBRATION | PLACES | {"backend"},
    ),
    "awq": Keys(
        used=_words(
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
    "dynamic": Keys(
        used=_words("bits group_size sym desc_act"), irrelevant=CALIBRATION
    ),
    "compressed-tensors": Keys(
        used=_words("quant_method format config_groups sparsity_config"),
        neutral=dict.fromkeys(_words("transform_config moe_sparsity_config"), ABSENT),
        # The cache keeps its dtype here.
        irrelevant=_words(
            "ignore quantization_status kv_cache_scheme global_compression_ratio "
            "version run_compressed dequantize use_optimized_inference"
        ),
    ),
    "sparsity_config": Keys(
        neutral={"format": (None, "dense")},
        irrelevant=_words(
            "global_sparsity ignore registry_requires_subclass sparsity_structure "
            "targets"
        ),
    ),
    "group": Keys(
        used=_words("weights format"),
        # Activations keep their dtype here.
        irrelevant=_words("targets input_activations output_activations"),
    ),
    "weights": Keys(
        used=_words("num_bits type symmetric group_size strategy actorder"),
        neutral=dict.fromkeys(_words("block_structure dynamic"), ABSENT),
        irrelevant=_words("scale_dtype zp_dtype observer observer_kwargs"),
    ),
    "modelopt": Keys(
        used=_words("quant_method quant_algo group_size"),
        neutral=dict.fromkeys(_words("has_zero_point pre_quant_scale"), ABSENT),
        # The cache and activations keep their dtypes here.
        irrelevant=_words(
            "config_groups exclude_modules ignore kv_cache_quant_algo kv_cache_scheme "
            "producer quantized_layers"
        ),
    ),
    "fp8": Keys(
        used=_words("quant_method weight_block_size"),
        neutral={
            "fmt": (None, "e4m3", "float8_e4m3fn"),
            "scale_fmt": (None, "float", "ue8m0"),
        },
        # Activations keep their dtype here.
        irrelevant=PLACES | _words("activation_scheme dequantize ignored_layers"),
    ),
    "mlx": Keys(
        used=_words("bits group_size mode"),
        neutral={"quantize_input": ABSENT},
        irrelevant=_words("quant_method"),
    ),
    "mlx: layer": Keys(
        used=_words("bits group_size mode global_scale"),
        neutral={"quantize_input": ABSENT},
    ),
}
"""By method, and by the place of an object inside of a method's settings."""
