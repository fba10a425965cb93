"""What the code outside a back end has to know about it."""

from dataclasses import dataclass

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.formats import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the code outside a back end has to know about it and its GPU."""

    device_noun: str  # What one of its devices is called in messages, with an article
    # The device to plan for if this machine's is not known
    default_device: PlanningDevice
    # The names that its plans of products may have for the first kernel
    kernels: tuple[str, ...]
    plan_type: type[Plan]  # The type of its plans of products
    launches: frozenset[type]  # The types of plans that it launches
    # The layout that `optimize` gives weights: "mlx", or "marlin" where packed products
    # are faster
    default_layout: str = "mlx"
    # Dtypes of the activations that its kernels multiply
    dtypes: tuple[str, ...] = (*DTYPE_BYTES,)
    # Whether a traced graph of a call costs the host less than the call. If so, calls
    # are traced, and `optimize` joins layers and traces decoder blocks by default
    replays_graphs: bool = False
    # Whether MLX passes inputs of few elements in an address space that the kernels do
    # not read, so that they must be padded
    pads_small_inputs: bool = False
    # Whether the GPU reads an array that the host has written as fast as one of its own
    unified_memory: bool = True
    # Whether stock MLX multiplies activations in float32 by quantized weights, for any
    # number of rows
    stock_multiplies_float32: bool = True
    # Whether stock MLX's attention kernel for few queries takes a mask
    stock_masks_attention: bool = True
    # Whether stock MLX chooses its attention kernel by the capacity of the KV cache
    stock_attends_by_capacity: bool = False
    # Whether kernels can be compiled before they are launched, and several at a time
    compiles_ahead: bool = False
    # The fusions of a traced decoder block that are on by default (`lm.options`)
    fusions: frozenset[str] = frozenset({"residual"})
    # Whether the kernel of experts' products can keep the bits of a row independent of
    # the other rows
    keeps_experts_bits: bool = False
    # Whether `mlx-marlin tune MODEL` compares the options of `optimize`, and `optimize`
    # uses the result
    tunes_models: bool = True
