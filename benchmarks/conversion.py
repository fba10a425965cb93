"""How fast `mlx-marlin convert` is: MB/s of checkpoints with random weights.

    python benchmarks/conversion.py --gigabytes 1 gptq awq Q4_K

A model with the sizes of Llama 3 8B's layers, as many layers as fill the size, is
written in each format and converted to the packed layout. No time of writing counts.
Beside the time that passed, the seconds that all cores together computed are printed.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf_model
import mlx.core as mx
from tqdm import tqdm

from mlx_marlin.checkpoints.gguf.blocks import BLOCK_TYPES, LAYOUTS
from mlx_marlin.checkpoints.gguf.reading import DECODED
from mlx_marlin.checkpoints.quantization import Quantization
from mlx_marlin.checkpoints.writing import Shards
from mlx_marlin.lm.checkpoints.conversion import convert
from mlx_marlin.lm.checkpoints.gguf_source import open_source

HIDDEN, FEATURES, VOCABULARY, GROUP = 4096, 14336, 1024, 128
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEATURES, HIDDEN),
    "mlp.up_proj": (FEATURES, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEATURES),
}
"""Rows and columns of a layer's weights."""
Arrays = dict[str, mx.array]


def words(*shape: int) -> mx.array:
    """Random int32."""
    return mx.random.randint(-(2**31), 2**31 - 1, shape)


def scales(*shape: int) -> mx.array:
    return mx.random.uniform(0.01, 0.02, shape).astype(mx.float16)


def gptq(n: int, k: int, bits: int = 4) -> Arrays:
    return {
        "qweight": words(k * bits // 32, n),
        "qzeros": words(k // GROUP, n * bits // 32),
        "scales": scales(k // GROUP, n),
    }


def act_order(n: int, k: int) -> Arrays:
    order = mx.random.permutation(mx.arange(k, dtype=mx.int32) // GROUP)
    return gptq(n, k) | {"g_idx": order}


def awq(n: int, k: int) -> Arrays:
    return {
        "qweight": words(k, n // 8),
        "qzeros": words(k // GROUP, n // 8),
        "scales": scales(k // GROUP, n),
    }


def compressed(n: int, k: int) -> Arrays:
    return {
        "weight_packed": words(n, k // 8),
        "weight_scale": scales(n, k // GROUP),
        "weight_shape": mx.array([n, k], mx.int64),
    }


def nvfp4(n: int, k: int) -> Arrays:
    return {
        "weight_packed": words(n, k // 8).view(mx.uint8),
        "weight_scale": mx.random.randint(1, 64, (n, k // 16)).astype(mx.uint8),
        "weight_global_scale": mx.array([1000.0]),
    }


def plain(n: int, k: int) -> Arrays:
    return {"weight": mx.random.normal((n, k), mx.float16)}


def stock(n: int, k: int) -> Arrays:
    return {
        "weight": words(n, k // 8).view(mx.uint32),
        "scales": scales(n, k // GROUP),
        "biases": scales(n, k // GROUP),
    }


GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}


def groups(format: str, **weights: object) -> dict[str, object]:
    """The config of a compressed-tensors checkpoint."""
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"weights": {"num_bits": 4, **weights}}},
    }


COMPRESSED = groups("pack-quantized", group_size=GROUP)
NVFP4 = groups("nvfp4-pack-quantized", type="float", group_size=16)
FORMATS: dict[str, tuple[Callable[[int, int], Arrays], dict]] = {
    **{
        f"gptq-{bits}": (
            partial(gptq, bits=bits),
            {"quantization_config": GPTQ | {"bits": bits}},
        )
        for bits in (2, 3, 4, 8)
    },
    "act-order": (act_order, {"quantization_config": GPTQ | {"bits": 4}}),
    "awq": (awq, {"quantization_config": AWQ}),
    "compressed-tensors": (compressed, {"quantization_config": COMPRESSED}),
    "nvfp4-pack-quantized": (nvfp4, {"quantization_config": NVFP4}),
    "mlx": (stock, {"quantization": {"bits": 4, "group_size": GROUP}}),
    "float16-nearest": (plain, {}),
    "float16-search": (plain, {}),
}
ANEW = [
    block.name
    for block in BLOCK_TYPES.values()
    if block.name.startswith(DECODED) and block.name not in LAYOUTS
]
"""GGUF's types without kernels, which are quantized anew."""
GGUF = [*LAYOUTS, *ANEW]
"""Types of GGUF's blocks."""
PLAIN = {
    f"float16-{quantizer}": Quantization(group_size=GROUP, quantizer=quantizer)
    for quantizer in ("nearest", "search")
}
"""How plain weights are quantized."""


def write(path: Path, name: str, nbytes: float) -> Path:
    """Writes a checkpoint of about so many bytes; returns its file or folder."""
    path.mkdir()
    if name in GGUF:
        file = path / "model.gguf"
        weights = sum(n * k for n, k in LINEAR.values())
        layers = round(nbytes / weights / gguf_model.bytes_per_weight(name))
        gguf_model.write(file, name, LINEAR, max(1, layers))
        return file
    write_folder(path, *FORMATS[name], nbytes)
    return path


def write_folder(
    path: Path, arrays_of: Callable[[int, int], Arrays], settings: dict, nbytes: float
) -> None:
    # Arrays that are not evaluated have sizes.
    each = sum(a.nbytes for s in LINEAR.values() for a in arrays_of(*s).values())
    layers = max(1, round(nbytes / each))
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "intermediate_size": FEATURES,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config | settings))
    with Shards(path, {}) as shards:
        for layer in range(layers):
            start = f"model.layers.{layer}"
            for linear, (n, k) in LINEAR.items():
                for part, array in arrays_of(n, k).items():
                    shards.add(f"{start}.{linear}.{part}", array)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shards.add(f"{start}.{norm}.weight", scales(HIDDEN))
        shards.add("model.norm.weight", scales(HIDDEN))
        shards.add("model.embed_tokens.weight", scales(VOCABULARY, HIDDEN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.2)
    parser.add_argument(
        "formats", nargs="*", default=[*FORMATS, *GGUF], metavar="FORMAT"
    )
    arguments = parser.parse_args()
    for name in arguments.formats:
        with tempfile.TemporaryDirectory() as folder:
            source = write(Path(folder) / "source", name, arguments.gigabytes * 1e9)
            nbytes = sum(f.stat().st_size for f in (Path(folder) / "source").iterdir())
            opened = open_source(source, Quantization() if name in ANEW else None)
            _ = opened.model  # imports mlx-lm
            start, busy = time.perf_counter(), time.process_time()
            how = PLAIN.get(name)
            rows = convert(opened, Path(folder) / "result", quantization=how)
            for _ in tqdm(rows, name, unit="tensor", leave=False, disable=None):
                pass
            seconds = time.perf_counter() - start
            busy = time.process_time() - busy
        megabytes = nbytes / 1e6
        print(
            f"{name:<22}{megabytes:6.0f} MB {seconds:6.1f} s {busy:6.1f} s of cores "
            f"{megabytes / seconds:6.0f} MB/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
