"""Stored forms whose kernel decodes in one pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from wanstream.offload.formats.one_pass import CODES, ROTATED_GROUPS, StoredForm
from wanstream.offload.formats.packing import MXFP8, NVFP4, QUANT_FORMATS, EightBit

_EIGHT_BIT = [
    EightBit(dtype=dtype, **form)
    for dtype in CODES
    for form in (
        {},
        {"by_row": False},
        {"block": 32},
        {"scale_dtype": torch.bfloat16},
        {"scale_dtype": torch.float16},
    )
]
_EIGHT_BIT += [EightBit(group=group) for group in ROTATED_GROUPS] + [
    EightBit(group=256, by_row=False)
]
FORMS = [
    *(
        StoredForm(dtype=torch.uint8, packing=packing)
        for packing in (*QUANT_FORMATS.values(), MXFP8, *_EIGHT_BIT)
    ),
    *(
        StoredForm(dtype=torch.uint8, packing=each, scaled=True)
        for each in (NVFP4, replace(NVFP4, high_first=False))
    ),
    *(
        StoredForm(dtype=dtype, scaled=scaled)
        for dtype in CODES
        if dtype != torch.int8
        for scaled in (False, True)
    ),
]
