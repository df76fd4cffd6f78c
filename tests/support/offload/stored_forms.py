"""Stored forms whose kernel decodes in one pass."""

from dataclasses import replace

import torch

from wanstream.offload.formats.one_pass import CODES, ROTATED_GROUPS, StoredForm
from wanstream.offload.formats.packing import MXFP8, NVFP4, QUANT_FORMATS, EightBit

_SCALES = [{}, {"by_row": False}, {"block": 32}]
_SCALES += [{"scale_dtype": dtype} for dtype in (torch.bfloat16, torch.float16)]
_PACKINGS = [*QUANT_FORMATS.values(), MXFP8]
_PACKINGS += [EightBit(dtype=dtype, **scales) for dtype in CODES for scales in _SCALES]
_PACKINGS += [EightBit(group=group) for group in ROTATED_GROUPS]
_PACKINGS.append(EightBit(group=256, by_row=False))
_FLOATS = [dtype for dtype in CODES if dtype != torch.int8]
FORMS = [StoredForm(dtype=torch.uint8, packing=packing) for packing in _PACKINGS]
_NVFP4 = (NVFP4, replace(NVFP4, high_first=False))
FORMS += [StoredForm(dtype=torch.uint8, packing=each, scaled=True) for each in _NVFP4]
FORMS += [StoredForm(dtype=dtype, scaled=scaled) for dtype in _FLOATS for scaled in (False, True)]
