"""Cases on which a planted bug must show: small, ragged and awkward on purpose."""

from mutants.cases.blocks import BLOCK_CASES, ChosenCase
from mutants.cases.case import Case
from mutants.cases.epilogue import EPILOGUE_CASES
from mutants.cases.expert_epilogue import EXPERT_EPILOGUE_CASES
from mutants.cases.formats import FORMAT_CASES
from mutants.cases.functions import FUNCTION_CASES, FunctionCase
from mutants.cases.gather import GATHER_CASES, GatherCase
from mutants.cases.normed import NORMED_CASES
from mutants.cases.products import PRODUCT_CASES
from mutants.cases.repack import REPACK_CASES, RepackCase
from mutants.cases.staged import STAGED_CASES
from mutants.cases.tensor import TENSOR_CASES
from support.block_kernels import Added, Rotated
from support.expert_products import ExpertProducts
from support.normed_products import Normed

CASES: dict[
    str,
    Case
    | RepackCase
    | GatherCase
    | FunctionCase
    | Rotated
    | Added
    | ChosenCase
    | Normed
    | ExpertProducts,
] = {
    **BLOCK_CASES,
    **EXPERT_EPILOGUE_CASES,
    **FUNCTION_CASES,
    **GATHER_CASES,
    **REPACK_CASES,
    **PRODUCT_CASES,
    **EPILOGUE_CASES,
    **NORMED_CASES,
    **FORMAT_CASES,
    **STAGED_CASES,
    **TENSOR_CASES,
}
