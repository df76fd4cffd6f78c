"""Block kernels: row-wise functions, attention, and products with one-byte codes.

Each implementation returns the reason if it is not available. A test on the device chooses
implementations.
"""

from .attention import (
    ATTENTIONS,
    INDUCTOR,
    INT8_ATTENTION,
    Kernels,
    attention_function,
    check_installed,
    check_usable,
)
from .block_math import EXACT, BlockMath, Codes, Gate, Norm, Spans
from .choice import first_line
from .fp8_linear import Fp8Linear, quantise_tokens_fp8
from .int8_linear import Int8Linear
from .math_choice import choose_math
from .multiplication import (
    CODE_FORMATS,
    arithmetic_of,
    choose_multiplication,
    multiplications,
    multiplied_formats,
    replace_linears,
)
from .scaled_linear import ScaledLinear
from .token_chunks import ALL, MIN_TOKENS, TokenChunks, chunk_slices

__all__ = [
    "ALL",
    "ATTENTIONS",
    "CODE_FORMATS",
    "EXACT",
    "INDUCTOR",
    "INT8_ATTENTION",
    "MIN_TOKENS",
    "BlockMath",
    "Codes",
    "Fp8Linear",
    "Gate",
    "Int8Linear",
    "Kernels",
    "Norm",
    "ScaledLinear",
    "Spans",
    "TokenChunks",
    "arithmetic_of",
    "attention_function",
    "check_installed",
    "check_usable",
    "choose_math",
    "choose_multiplication",
    "chunk_slices",
    "first_line",
    "multiplications",
    "multiplied_formats",
    "quantise_tokens_fp8",
    "replace_linears",
]
