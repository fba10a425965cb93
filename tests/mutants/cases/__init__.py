"""Cases on which a planted bug must show: small, ragged and awkward on purpose."""

from mutants.cases.blocks import BLOCK_CASES
from mutants.cases.case import Case, Judge
from mutants.cases.epilogue import EPILOGUE_CASES, NORMED_CASES
from mutants.cases.experts import EXPERT_CASES
from mutants.cases.formats import FORMAT_CASES
from mutants.cases.functions import FUNCTION_CASES
from mutants.cases.products import PRODUCT_CASES
from mutants.cases.repack import REPACK_CASES
from mutants.cases.staged import STAGED_CASES
from mutants.cases.tensor import TENSOR_CASES

CASES: dict[str, Case | Judge] = {
    **BLOCK_CASES,
    **EXPERT_CASES,
    **FUNCTION_CASES,
    **REPACK_CASES,
    **PRODUCT_CASES,
    **EPILOGUE_CASES,
    **NORMED_CASES,
    **FORMAT_CASES,
    **STAGED_CASES,
    **TENSOR_CASES,
}
