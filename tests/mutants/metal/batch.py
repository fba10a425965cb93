"""Bugs in batches: which product a tile is of, and where its rows and weights begin."""

from mutants.cases.epilogue import BATCH_FUSED, BATCH_GEMM, BATCH_GEMV
from mutants.mutant import Detector, Mutant

_WORK = "lib/work"
_EPILOGUE = "lib/epilogue"
_WEIGHT_TILE = "lib/weight_tile"
_REDUCE = "lib/reduce"

_PRODUCTS = (
    Mutant(
        "the number of products is that of groups",
        _WORK,
        "read_work",
        "$1; return",
        "parts.groups; return",
        BATCH_GEMV,
        Detector.RACE,
    ),
    Mutant(
        "products are counted in tiles",
        _WORK,
        "split_at",
        "= $1 /",
        "= tile /",
        BATCH_GEMM,
        Detector.OUTSIDE,
        nth=(2, 2),
    ),
    Mutant(
        "columns go on from product to product",
        _WORK,
        "",
        "$1 %= $2;",
        "",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the last columns of a product are the next one's",
        _WORK,
        "split_at",
        "$1($2, $3)",
        "$2 / $3",
        BATCH_FUSED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "gemm: all tiles are those of one product",
        _WORK,
        "",
        ", L::BATCHED>",
        ">",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: all tiles are those of one product",
        _WORK,
        "",
        ", L::BATCHED>",
        ">",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
    ),
)

_ROWS = (
    Mutant(
        "products have as many rows as columns",
        _EPILOGUE,
        "rows_of_product",
        "$1; $2",
        "work.n; $2",
        BATCH_GEMV,
        Detector.OUTSIDE,
    ),
    Mutant(
        "every product has the first one's rows of x",
        _EPILOGUE,
        "input_row",
        "$1 +",
        "",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: every product has the first one's rows of x",
        "lib/gemv",
        "",
        "$1($2, 0) * $3",
        "0",
        BATCH_GEMV,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "every product is stored where the first one is",
        _EPILOGUE,
        "output_row",
        "$1 +",
        "",
        BATCH_FUSED,
        Detector.RACE,
    ),
    Mutant(
        "a slot has the rows of one product",
        _EPILOGUE,
        "rows_of_slot",
        "+ $1",
        "",
        BATCH_GEMV,
        Detector.RACE,
    ),
    Mutant(
        "a slot has the rows of a product more",
        _EPILOGUE,
        "",
        "($1 - 1)",
        "$1",
        BATCH_GEMV,
        Detector.OUTSIDE,
    ),
)

_WEIGHTS = (
    Mutant(
        "every product has the first weight",
        _WEIGHT_TILE,
        "",
        "$1 * $2 +",
        "0 * $2 +",
        BATCH_GEMV,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "every product has the first weight's scales",
        _WEIGHT_TILE,
        "weight_tile",
        "$1 * $2<",
        "($1 - product * work.n) * $2<",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
        nth=(3, 3),
    ),
    Mutant(
        "packed weights follow each other without padding",
        _WEIGHT_TILE,
        "",
        "$1 * $2($3, $4) + $5",
        "($1 * $3 + $5)",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "every product has the first packed weight's scales",
        _WEIGHT_TILE,
        "weight_tile",
        "= $1 * $2<",
        "= col / TILE_N * $2<",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
        nth=(1, 2),
    ),
    Mutant(
        "gemm: the product of a weight is forgotten",
        "lib/gemm_register",
        "gemm_register",
        ", $1); const",
        "); const",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
        nth=(4, 4),
    ),
    Mutant(
        "gemv: the product of a weight is forgotten",
        "lib/gemv",
        "",
        "($1), $2, $3)",
        "($1), $2)",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
    ),
)

_REDUCES = (
    Mutant(
        "the reduce looks for splits in the first product",
        _WORK,
        "",
        "$1 * $2($3, $4) +",
        "",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the reduce rounds the parts of a column down",
        _REDUCE,
        "",
        "uint $1 = $2($3, $4)",
        "uint $1 = max($3 / $4, 1u)",
        BATCH_GEMM,
        Detector.OUTSIDE,
    ),
    Mutant(
        "the reduce goes on from product to product",
        _REDUCE,
        "",
        "($1 - $2 * $3)",
        "$1",
        BATCH_GEMM,
        Detector.OUTSIDE,
    ),
    Mutant(
        "the reduce takes slots for those of one product",
        _REDUCE,
        "",
        "($1 ? $2 : 1) *",
        "",
        BATCH_GEMV,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the reduce stores every product where the first one is",
        _REDUCE,
        "",
        "= $1 * $2 +",
        "=",
        BATCH_GEMV,
        Detector.RACE,
    ),
)

MUTANTS = (*_PRODUCTS, *_ROWS, *_WEIGHTS, *_REDUCES)
