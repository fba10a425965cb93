"""Bugs in how the CUDA kernel "mma" normalizes rows."""

from mutants.mutant import Detector, Mutant

NORMED = "packed, normalized rows, three warps a row and two"
ODD_X = "packed, normalized rows, odd offset of x"
ODD_NORM = "packed, normalized rows, odd offset of the norm's weight"

_ROWS = "cuda/rows.cuh"

MUTANTS = (
    Mutant(
        "rows: squares are summed up, and not their mean",
        _ROWS,
        "rsqrtf(squares / work.k",
        "rsqrtf(squares",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: nothing is added to the mean square",
        _ROWS,
        " + as_type<float>(EPSILON)",
        "",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: the norm has no weight",
        _ROWS,
        "float(value) * weights.value(j, T())",
        "float(value)",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: the first warp's squares stand for all",
        _ROWS,
        "i < share.members",
        "i < 1",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: a lane's neighbour is left out of the sum",
        "cuda/warp.cuh",
        "distance > 0",
        "distance > 1",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: all warps of a row have the same chunks",
        _ROWS,
        "(32 * member + threadIdx.x % 32)",
        "(threadIdx.x % 32)",
        NORMED,
        Detector.RACE,
    ),
    Mutant(
        "rows: they are read as if nothing lay between them",
        _ROWS,
        "rows.x + row * (work.k + SharedRows<T>::PADDING)",
        "rows.x + row * work.k",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: the weight lies in the first row's place",
        _ROWS,
        "T* own = place + (row + 1) * (work.k + SharedRows<T>::PADDING);\n    const T*",
        "T* own = place + row * (work.k + SharedRows<T>::PADDING);\n    const T*",
        NORMED,
        Detector.RACE,
    ),
    Mutant(
        "rows: no barrier before squares are summed up",
        _ROWS,
        "  __syncthreads();\n  for (int row",
        "  for (int row",
        NORMED,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "rows: no barrier before they are multiplied",
        _ROWS,
        "  __syncthreads();\n  return {place",
        "  return {place",
        NORMED,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "rows: x is not looked at for alignment",
        _ROWS,
        "is_aligned(rows.x) && is_aligned(rows.weight)",
        "is_aligned(rows.weight)",
        ODD_X,
        Detector.MISALIGNED,
    ),
    Mutant(
        "rows: a norm's weight is not looked at for alignment",
        _ROWS,
        "is_aligned(rows.x) && is_aligned(rows.weight)",
        "is_aligned(rows.x)",
        ODD_NORM,
        Detector.MISALIGNED,
    ),
)
