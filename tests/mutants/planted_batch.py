"""Bugs in batches: which product a tile is of, and where its rows and weights begin."""

from mutants.cases import BATCH_FUSED, BATCH_GEMM, BATCH_GEMV
from mutants.mutant import Detector, Mutant

_WORK = "lib/work"
_EPILOGUE = "lib/epilogue"
_LANE = "lib/lane"
_REDUCE = "lib/reduce"

_PRODUCTS = (
    Mutant(
        "the number of products is that of groups",
        _WORK,
        "work.batch = parts.batch;",
        "work.batch = parts.groups;",
        BATCH_GEMV,
        Detector.RACE,
    ),
    Mutant(
        "products are counted in tiles",
        _WORK,
        "split.product = column / columns;",
        "split.product = tile / columns;",
        BATCH_GEMM,
        Detector.OUTSIDE,
    ),
    Mutant(
        "columns go on from product to product",
        _WORK,
        "    column %= columns;\n",
        "",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the last columns of a product are the next one's",
        _WORK,
        "const uint columns = ceil_div(work.n, TILE_N);",
        "const uint columns = work.n / TILE_N;",
        BATCH_FUSED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "gemm: all tiles are those of one product",
        "lib/gemm_register",
        "split_at<WIDE, WHOLE, W::GROUP, BATCHED>",
        "split_at<WIDE, WHOLE, W::GROUP>",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: all tiles are those of one product",
        "lib/gemv",
        "split_at<WIDE, WHOLE, W::GROUP, BATCHED>",
        "split_at<WIDE, WHOLE, W::GROUP>",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
    ),
)

_ROWS = (
    Mutant(
        "products have as many rows as columns",
        _EPILOGUE,
        "order.first = split.product * work.m;",
        "order.first = split.product * work.n;",
        BATCH_GEMV,
        Detector.OUTSIDE,
    ),
    Mutant(
        "every product has the first one's rows of x",
        _EPILOGUE,
        "uint input_row(InOrder order, uint row) {\n  return order.first + row;",
        "uint input_row(InOrder order, uint row) {\n  return row;",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: every product has the first one's rows of x",
        "lib/gemv",
        "{input_row(order, 0) * work.k, uint",
        "{0, uint",
        BATCH_GEMV,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "every product is stored where the first one is",
        _EPILOGUE,
        "uint output_row(InOrder order, uint row) {\n  return order.first + row;",
        "uint output_row(InOrder order, uint row) {\n  return row;",
        BATCH_FUSED,
        Detector.RACE,
    ),
    Mutant(
        "a slot has the rows of one product",
        _EPILOGUE,
        "return work.m + order.others;",
        "return work.m;",
        BATCH_GEMV,
        Detector.RACE,
    ),
    Mutant(
        "a slot has the rows of a product more",
        _EPILOGUE,
        "(work.batch - 1) * work.m",
        "work.batch * work.m",
        BATCH_GEMV,
        Detector.OUTSIDE,
    ),
)

_WEIGHTS = (
    Mutant(
        "every product has the first weight",
        _LANE,
        "product * work.n +",
        "0 * work.n +",
        BATCH_GEMV,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "every product has the first weight's scales",
        _LANE,
        "tile.first_group = rows * group_at<W>(work.k) + own;",
        "tile.first_group = (rows - product * work.n) * group_at<W>(work.k) + own;",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "packed weights follow each other without padding",
        _LANE,
        "product * ceil_div(work.n, TILE_N) + col / TILE_N",
        "(product * work.n + col) / TILE_N",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "every product has the first packed weight's scales",
        _LANE,
        "(column * groups + own)",
        "(col / TILE_N * groups + own)",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemm: the product of a weight is forgotten",
        "lib/gemm_register",
        "lane_index, split.product);",
        "lane_index);",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: the product of a weight is forgotten",
        "lib/gemv",
        "lane_index, split.product);",
        "lane_index);",
        BATCH_FUSED,
        Detector.WRONG_RESULT,
    ),
)

_REDUCES = (
    Mutant(
        "the reduce looks for splits in the first product",
        _WORK,
        "product * ceil_div(work.n, TILE_N) + col / TILE_N;",
        "col / TILE_N;",
        BATCH_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the reduce rounds the parts of a column down",
        _REDUCE,
        "ceil_div(work.m, ROWS_OF_THREAD)",
        "max(work.m / ROWS_OF_THREAD, 1u)",
        BATCH_GEMM,
        Detector.OUTSIDE,
    ),
    Mutant(
        "the reduce goes on from product to product",
        _REDUCE,
        "(part - product * parts) * ROWS_OF_THREAD",
        "part * ROWS_OF_THREAD",
        BATCH_GEMM,
        Detector.OUTSIDE,
    ),
    Mutant(
        "the reduce takes slots for those of one product",
        _REDUCE,
        "(BATCHED ? work.batch : 1) * work.m * work.n",
        "work.m * work.n",
        BATCH_GEMV,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the reduce stores every product where the first one is",
        _REDUCE,
        "first_row = product * work.m + first;",
        "first_row = first;",
        BATCH_GEMV,
        Detector.RACE,
    ),
)

MUTANTS = (*_PRODUCTS, *_ROWS, *_WEIGHTS, *_REDUCES)
