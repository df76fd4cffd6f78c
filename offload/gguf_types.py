"""What the numbers in a GGUF header stand for: the types of tensors and of fields, as ggml counts them."""

from __future__ import annotations

import torch

from .packing import PACKINGS

PLAIN_TYPES = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}

_PACKING_NAMES = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
}
PACKED_TYPES = {number: PACKINGS[name] for number, name in _PACKING_NAMES.items()}

# Those that cannot be unpacked. Q8_1 and Q8_K only exist while ggml computes.
OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}

READABLE_TYPES = ("F32", "F16", "BF16", *PACKINGS)
"""The types that weights may have, by name."""

SCALAR_FIELDS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of fields that are one number, and what `struct` calls them."""

STRING_FIELD = 8
ARRAY_FIELD = 9
