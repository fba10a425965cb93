"""What the code outside a back end has to know about it."""

from dataclasses import dataclass

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.formats import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the code outside a back end has to know about it and its GPU.

    Attributes:
        device_noun: What one of its devices is called in messages, with an article.
        default_device: The device to plan for if this machine's is not known.
        kernels: The names that its plans of products may have for the first kernel.
        plan_type: The type of its plans of products.
        launches: The types of plans that it launches.
        default_layout: The layout that `optimize` gives weights: "mlx", or "marlin"
            where packed products are faster.
        dtypes: Dtypes of the activations that its kernels multiply.
        replays_graphs: Whether a traced graph of a call costs the host less than the
            call. If so, calls are traced, and `optimize` joins layers and traces
            decoder blocks by default.
        pads_small_inputs: Whether MLX passes inputs of few elements in an address space
            that the kernels do not read, so that they must be padded.
        unified_memory: Whether the GPU reads an array that the host has written as fast
            as one of its own.
        stock_multiplies_float32: Whether stock MLX multiplies activations in float32 by
            quantized weights, for any number of rows.
        stock_masks_attention: Whether stock MLX's attention kernel for few queries
            takes a mask.
        stock_attends_by_capacity: Whether stock MLX chooses its attention kernel by the
            capacity of the KV cache.
        compiles_ahead: Whether kernels can be compiled before they are launched, and
            several at a time.
        fusions: The fusions of a traced decoder block that are on by default
            (`lm.fusions`).
        keeps_experts_bits: Whether the kernel of experts' products can keep the bits of
            a row independent of the other rows.
        tunes_models: Whether `mlx-marlin tune MODEL` compares the options of
            `optimize`, and `optimize` uses the result.
    """

    device_noun: str
    default_device: PlanningDevice
    kernels: tuple[str, ...]
    plan_type: type[Plan]
    launches: frozenset[type]
    default_layout: str = "mlx"
    dtypes: tuple[str, ...] = (*DTYPE_BYTES,)
    replays_graphs: bool = False
    pads_small_inputs: bool = False
    unified_memory: bool = True
    stock_multiplies_float32: bool = True
    stock_masks_attention: bool = True
    stock_attends_by_capacity: bool = False
    compiles_ahead: bool = False
    fusions: frozenset[str] = frozenset({"residual"})
    keeps_experts_bits: bool = False
    tunes_models: bool = True
