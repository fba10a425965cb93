"""How MLX dispatches its quantized kernels: templates, grids and small arguments."""

import math
from collections.abc import Sequence

import mlx.core as mx

from peers.foreign import Dispatch
from peers.mlx_products import LHS, RHS, Operands, Product

ROW_THREADS = (32, 2, 1)
TILE_THREADS = (32, 2, 2)
SPLIT_STEP = 32
NAX_TILE = (64, 64, 2, 2)
"""BK, BN, WM, WN of the kernels for tensor units, as MLX launches them."""
QVM_SPLITS = 8
"""Parts of k in `qvm_split_k`, below 8,192."""


def compute(product: Product, operands: Operands, header: str) -> mx.array:
    """The product by MLX's kernel; splits of k are added in a second step, as there."""
    y = dispatch(product, operands).run(header)
    return y.sum(axis=0) if _splits(product) > 1 else y


def error_of(product: Product, header: str) -> float:
    """Of the kernel's result, relative to its largest element."""
    operands = Operands.of(product)
    return operands.error(compute(product, operands, header))


def dispatch(product: Product, operands: Operands) -> Dispatch:
    """MLX's own call of the kernel for that product."""
    group, bits = product.format
    m, n = product.m, product.n
    splits = _splits(product)
    in_float32 = product.kernel == "qmm_t_splitk"
    return Dispatch(
        kernel=f"{product.family}_{product.kernel}",
        template=(product.dtype, group, bits, *_template(product)),
        groups=(*_groups(product), splits * product.results),
        threads=_threads(product.kernel),
        inputs=_inputs(product, operands),
        output="y",
        shape=(splits, product.results, m, n)[splits == 1 :],
        dtype=mx.float32 if in_float32 else product.dtype,
        constants={},
    )


def _is_matrix(kernel: str) -> bool:
    return "qmm" in kernel


def _threads(kernel: str) -> tuple[int, int, int]:
    if kernel == "qmv_quad":
        return 32, 1, 1
    return TILE_THREADS if _is_matrix(kernel) else ROW_THREADS


def vectors(m: int) -> int:
    """Rows of x that a threadgroup of `qmv_wide` takes: 2 to 5, evenly spread."""
    return max(2, math.ceil(m / math.ceil(m / 5)))


def _lanes(product: Product) -> int:
    """Lanes that share a row of w in `qmv_wide`."""
    return 8 if product.family == "affine" else 16


def _groups(product: Product) -> tuple[int, int]:
    m, n, kernel = product.m, product.n, product.kernel
    if _is_matrix(kernel):
        tile_m, tile_n = product.tile
        return math.ceil(n / tile_n), math.ceil(m / tile_m)
    if kernel == "qmv_wide":
        rows = 2 * 32 // _lanes(product)
        return math.ceil(m / vectors(m)), math.ceil(n / rows)
    if "qvm" in kernel:
        columns = 2 * min(product.format[0], 32)
    else:
        columns = 64 if kernel == "qmv_quad" else 8
    return m, math.ceil(n / columns)


def _splits(product: Product) -> int:
    if product.kernel == "qvm_split_k":
        return QVM_SPLITS
    if product.kernel != "qmm_t_splitk":
        return 1
    if product.splits:
        return product.splits
    step = max(product.format[0], SPLIT_STEP)
    splits = min(512 // math.prod(_groups(product)), product.k // step)
    while product.k % (splits * step):
        splits -= 1
    return splits


def _template(product: Product) -> Sequence[object]:
    batched = product.batch > 1
    aligned = product.n % product.tile[1] == 0
    match product.kernel:
        case "qmv_quad":
            return product.k, batched
        case "qmv_fast":
            return batched, product.n % 8 != 0
        case "qmv_wide":
            return vectors(product.m), _lanes(product), batched
        case "qvm_split_k":
            return (QVM_SPLITS,)
        case "qmm_t":
            return aligned, batched
        case "qmm_t_splitk" | "gather_qmm_t":
            return (aligned,)
        case "qmv" | "qvm" | "qmm_n":
            return (batched,)
        case "qmm_t_nax":
            return aligned, batched, product.bm, *NAX_TILE
        case "qmm_n_nax":
            return batched, product.bm, *NAX_TILE
        case "gather_qmm_t_nax":
            return aligned, product.bm, *NAX_TILE
        case "gather_qmm_n_nax":
            return product.bm, *NAX_TILE
        case _:
            return ()


def _inputs(product: Product, operands: Operands) -> dict[str, mx.array | int]:
    arrays = {**operands.weight, "x": operands.x}
    if product.kernel == "qvm_split_k":
        return {**arrays, **_split_rows(product, operands)}
    sizes = {"in_vec_size": product.k, "out_vec_size": product.n}
    if _is_matrix(product.kernel):
        sizes = {"K": product.k, "N": product.n}
    if _is_matrix(product.kernel) or product.kernel == "qmv_wide":
        sizes["M"] = product.m
    if product.kernel == "qmm_t_splitk":
        sizes["k_partition_size"] = product.k // _splits(product)
        sizes["split_k_partition_stride"] = product.m * product.n
    result = {**arrays, **sizes}
    if product.matrices > 1:
        result |= _shapes(operands)
    if product.gathered:
        result |= _indices()
    return result


def _integers(values: Sequence[int], dtype: mx.Dtype = mx.int64) -> mx.array:
    return mx.array(values, dtype=dtype)


def _strides(shape: Sequence[int]) -> list[int]:
    """Of a contiguous array, in elements."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _shapes(operands: Operands) -> dict[str, mx.array | int]:
    result: dict[str, mx.array | int] = {"x_batch_ndims": 1, "w_batch_ndims": 1}
    arrays = {"x": operands.x, **operands.weight}
    for name, array in arrays.items():
        letter = name[0]
        result[f"{letter}_strides"] = _integers(_strides(array.shape))
        if letter in "xw":
            result[f"{letter}_shape"] = _integers(array.shape, mx.int32)
    return result


def _indices() -> dict[str, mx.array | int]:
    return {
        "lhs_indices": _integers(LHS, mx.uint32),
        "rhs_indices": _integers(RHS, mx.uint32),
        "batch_ndims": 1,
        "batch_shape": _integers([len(LHS)], mx.int32),
        "lhs_strides": _integers([1]),
        "rhs_strides": _integers([1]),
    }


def _split_rows(product: Product, operands: Operands) -> dict[str, mx.array | int]:
    """k as a batch dimension of views: MLX's arguments of `qvm_split_k`."""
    part = product.k // QVM_SPLITS
    result: dict[str, mx.array | int] = {
        "in_vec_size": part,
        "out_vec_size": product.n,
        "final_block_size": product.k - (QVM_SPLITS - 1) * part,
        "x_batch_ndims": 1,
        "x_shape": _integers([QVM_SPLITS, product.m, part], mx.int32),
        "x_strides": _integers([part, product.k, 1]),
        "w_batch_ndims": 1,
        "w_shape": _integers(
            [QVM_SPLITS, part, operands.weight["w"].shape[-1]], mx.int32
        ),
    }
    for name, array in operands.weight.items():
        columns = array.shape[-1]
        result[f"{name[0]}_strides"] = _integers([part * columns, columns, 1])
    return result
