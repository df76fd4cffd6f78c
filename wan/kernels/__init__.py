"""Kernels of a block: row-wise functions, attention, and products with codes of one byte.

Each implementation returns the reason why it is not available. Implementations are chosen by a test on the device.
"""

from __future__ import annotations

from .attention import (
    ATTENTIONS,
    INDUCTOR,
    INT8_ATTENTION,
    Kernels,
    KernelsError,
    attention_function,
    check_installed,
    check_usable,
)
from .block_math import EXACT, BlockMath, Codes, Gate, Norm, Rms
from .fp8_linear import Fp8Linear
from .int8_linear import Int8Linear
from .math_choice import MathChoice, choose_math
from .multiplication import (
    CODE_FORMATS,
    choose_multiplication,
    multiplications,
    multiplied_formats,
    replace_linears,
)

__all__ = [
    "ATTENTIONS",
    "CODE_FORMATS",
    "EXACT",
    "INDUCTOR",
    "INT8_ATTENTION",
    "BlockMath",
    "Codes",
    "Fp8Linear",
    "Gate",
    "Int8Linear",
    "Kernels",
    "KernelsError",
    "MathChoice",
    "Norm",
    "Rms",
    "attention_function",
    "check_installed",
    "check_usable",
    "choose_math",
    "choose_multiplication",
    "multiplications",
    "multiplied_formats",
    "replace_linears",
]
