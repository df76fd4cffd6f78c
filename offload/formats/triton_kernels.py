"""Triton decode kernels. Imported only where Triton is installed.

A unit is 16 neighbouring values with one scale. A kernel reads stored bytes once and writes compute
dtype values once. All arithmetic is in fp32, in the eager decoders' order and rounded once at the
end, so both have the same bits. Kernels must be launched without contraction of multiplications and
additions.
"""

import triton
import triton.language as tl

from .gguf_dequant import LEVELS
from .packing import UNIT

_UNIT = tl.constexpr(UNIT)
_LOW_LEVELS, _HIGH_LEVELS = (
    # Each number packs eight signed bytes, the first in the lowest bits.
    tl.constexpr(int.from_bytes((level & 255 for level in half), "little", signed=True))
    for half in (LEVELS[:8], LEVELS[8:])
)


# By default, Triton compiles a kernel again for sizes of 1, for multiples of 16, and for pointers
# aligned to 16 bytes. Sizes differ between matrices, so this would happen during a run.
@triton.jit(do_not_specialize=["scales", "units", "units_per_scale"])
def codes_kernel(
    stored,
    scales,
    into,
    units,
    units_per_scale,
    CODES: tl.constexpr,
    SCALED: tl.constexpr,
    UNITS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Decode one-byte codes, with one scale per run of `units_per_scale` units."""
    first, unit, valid = _units(units, UNITS)
    value = tl.arange(0, _UNIT)[None, :]
    codes = tl.load(stored + first * _UNIT + unit * _UNIT + value, mask=valid, other=0)
    values = _number(codes, CODES)
    if SCALED:
        scale = tl.load(scales + (first + unit) // units_per_scale, mask=valid, other=0.0)
        values = values * scale.to(tl.float32)
    _store(into, first, unit, value, valid, values, BY_BITS)


@triton.jit(do_not_specialize=["scales", "groups", "groups_per_scale"])
def rotated_kernel(
    stored,
    scales,
    signs,
    into,
    groups,
    groups_per_scale,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Rotate groups of `GROUP` int8 codes back with the matrix `signs`.

    Each `groups_per_scale` groups have one scale.
    """
    parts: tl.constexpr = GROUP // COLUMNS
    first = (tl.program_id(0) // parts).to(tl.int64) * GROUPS
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    group = tl.arange(0, GROUPS)[:, None]
    valid = first + group < groups
    sums = tl.full((GROUPS, COLUMNS), 0.0, tl.float32)  # of integers below 2**18: exact
    for start in tl.static_range(0, GROUP, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        codes = tl.load(
            stored + first * GROUP + group * GROUP + depth[None, :], mask=valid, other=0
        )
        turned = tl.load(signs + depth[:, None] * GROUP + column)
        # Every device multiplies fp16, but not every one multiplies int8.
        sums = tl.dot(codes.to(tl.int8, bitcast=True).to(tl.float16), turned, acc=sums)
    row = first + tl.arange(0, GROUPS)
    scale = (
        tl.load(scales + row // groups_per_scale, mask=row < groups, other=0.0).to(tl.float32)
        * FACTOR
    )
    values = _rounded(sums * scale[:, None], into, BY_BITS)
    tl.store(into + first * GROUP + group * GROUP + column, values, mask=valid)


@triton.jit(do_not_specialize=["overall", "units", "units_per_row", "scale_columns"])
def microscaled_kernel(
    stored,
    overall,
    into,
    units,
    units_per_row,
    scale_columns,
    FOUR_BITS: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    UNITS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Decode mxfp8 or nvfp4: codes row by row, then scales in tiles with 128 rows and 4 columns."""
    first, unit, valid = _units(units, UNITS)
    row = ((first + unit) // units_per_row).to(tl.int32)
    column = ((first + unit) % units_per_row).to(tl.int32)
    if FOUR_BITS:
        codes_end = units.to(tl.int64) * (_UNIT // 2)
    else:
        column = column // 2  # a scale of mxfp8 is for two units
        codes_end = units.to(tl.int64) * _UNIT
    tile = (row // 128) * (scale_columns // 4) + column // 4
    place = tile.to(tl.int64) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    scale_codes = tl.load(stored + codes_end + place, mask=valid, other=0)
    value = tl.arange(0, _UNIT)[None, :]
    if FOUR_BITS:
        scale = _number(scale_codes, "float8_e4m3fn") * tl.load(overall)
        pair = tl.arange(0, _UNIT // 2)[None, :]
        pairs = tl.load(
            stored + first * (_UNIT // 2) + unit * (_UNIT // 2) + pair, mask=valid, other=0
        ).to(tl.int32)
        high = _e2m1(pairs >> 4) * scale
        low = _e2m1(pairs & 15) * scale
        both = tl.join(high, low) if HIGH_FIRST else tl.join(low, high)
        values = both.reshape(UNITS, _UNIT)
    else:
        scale = (scale_codes.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        codes = tl.load(stored + first * _UNIT + unit * _UNIT + value, mask=valid, other=0)
        values = _number(codes, "float8_e4m3fn") * scale
    _store(into, first, unit, value, valid, values, BY_BITS)


@triton.jit(do_not_specialize=["units"])
def groups_kernel(
    stored,
    into,
    units,
    FORMAT: tl.constexpr,
    NBYTES: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Decode GGUF groups. `gguf_dequant` has the layouts."""
    first, unit, valid = _units(units, UNITS)
    value = tl.arange(0, _UNIT)[None, :]
    # `UNITS` is a multiple of `UNITS_PER_GROUP`, so each program starts with a whole group.
    start = stored + first // UNITS_PER_GROUP * NBYTES
    group = unit // UNITS_PER_GROUP
    part = unit % UNITS_PER_GROUP
    start = start + group * NBYTES
    if UNITS_PER_GROUP == 2:
        values = _of_32(start, part, value, valid, FORMAT)
    else:
        values = _of_256(start, part, value, valid, FORMAT)
    _store(into, first, unit, value, valid, values, BY_BITS)


@triton.jit
def _units(units, UNITS: tl.constexpr):
    """Return this program's first unit, its unit numbers from there, and which units exist."""
    # A position in a large matrix may exceed 2**31, so it has 64 bits.
    first = tl.program_id(0).to(tl.int64) * UNITS
    unit = tl.arange(0, UNITS)[:, None]
    return first, unit, first + unit < units


@triton.jit
def _store(into, first, unit, value, valid, values, BY_BITS: tl.constexpr):
    rounded = _rounded(values, into, BY_BITS)
    tl.store(into + first * _UNIT + unit * _UNIT + value, rounded, mask=valid)


@triton.jit
def _rounded(values, into, BY_BITS: tl.constexpr):
    """Round fp32 values to the dtype of `into`.

    With `BY_BITS`, round bf16 as integers, because the interpreter truncates it.
    """
    if BY_BITS and into.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # NaN differs from itself. Rounding would carry into the sign for some NaN.
        rounded = tl.where(values == values, rounded, 0x7FFF)
        rounded = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = values.to(into.dtype.element_ty)
    return rounded


@triton.jit
def _number(codes, CODES: tl.constexpr):
    """Return bytes as fp32 numbers.

    fp8 passes through fp16 bits, which any device can do.
    """
    if CODES == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    bits = codes.to(tl.int16)
    if CODES == "float8_e5m2":
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    magnitude = bits & 0x7F
    half = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _e2m1(codes):
    """Return 4-bit floats in int32 as fp32 numbers."""
    half = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    # The exponent bias of fp16 is 15, and that of e2m1 is 1: 2**14.
    return half.to(tl.float32) * 16384.0


@triton.jit
def _of_32(start, part, value, valid, FORMAT: tl.constexpr):
    """Return the values [units, 16] in groups of two units."""
    if FORMAT == "Q8_0":
        codes = _byte(start + 2 + part * 16 + value, valid).to(tl.int8)
    elif FORMAT == "Q4_0":
        codes = _nibble(start + 2 + value, part, valid) - 8
    elif FORMAT == "IQ4_NL":
        codes = _level(_nibble(start + 2 + value, part, valid))
    elif FORMAT == "Q5_0":
        codes = _nibble(start + 6 + value, part, valid) + _fifth(start + 2, part, value, valid) - 16
    elif FORMAT == "Q4_1":
        codes = _nibble(start + 4 + value, part, valid)
    else:
        tl.static_assert(FORMAT == "Q5_1")
        codes = _nibble(start + 8 + value, part, valid) + _fifth(start + 4, part, value, valid)
    values = codes.to(tl.float32) * _half(start, 0, valid)
    if FORMAT == "Q4_1" or FORMAT == "Q5_1":
        values += _half(start, 2, valid)
    return values


@triton.jit
def _of_256(start, part, value, valid, FORMAT: tl.constexpr):
    """Return the values [units, 16] in groups of sixteen units."""
    within = part % 2 * 16 + value  # in rows of 32 values
    if FORMAT == "Q6_K":
        low = _nibble(start + part // 8 * 64 + part % 4 * 16 + value, part % 8 // 4, valid)
        codes = (
            low + _quarter(start + 128 + part // 8 * 32 + within, part % 8 // 2, valid) * 16 - 32
        )
        scale = _byte(start + 192 + part, valid).to(tl.int8).to(tl.float32) * _half(
            start, 208, valid
        )
    elif FORMAT == "Q2_K":
        codes = _quarter(start + 16 + part // 8 * 32 + within, part % 8 // 2, valid)
        both = _byte(start + part, valid)
        scale = (both & 15).to(tl.float32) * _half(start, 80, valid)
        minimum = (both >> 4).to(tl.float32) * _half(start, 82, valid)
    elif FORMAT == "Q3_K":
        third = (_byte(start + within, valid) >> part // 2) & 1
        codes = _quarter(start + 32 + part // 8 * 32 + within, part % 8 // 2, valid) + third * 4 - 4
        number = (
            _nibble(start + 96 + part % 8, part // 8, valid)
            + _quarter(start + 104 + part % 4, part // 4, valid) * 16
        )
        scale = (number - 32).to(tl.float32) * _half(start, 108, valid)
    elif FORMAT == "IQ4_XS":
        codes = _level(_nibble(start + 8 + part // 2 * 16 + value, part % 2, valid))
        number = _nibble(start + 4 + part // 4, part // 2 % 2, valid)
        number += _quarter(start + 2 + part // 8, part // 2 % 4, valid) * 16
        scale = (number - 32).to(tl.float32) * _half(start, 0, valid)
    else:
        tl.static_assert(FORMAT == "Q4_K" or FORMAT == "Q5_K")
        subgroup = part // 2
        lower = _byte(start + 12 + subgroup % 4, valid)
        factor = _six_bits(_byte(start + 4 + subgroup % 4, valid), lower & 15, subgroup)
        offset = _six_bits(_byte(start + 8 + subgroup % 4, valid), lower >> 4, subgroup)
        scale = factor.to(tl.float32) * _half(start, 0, valid)
        minimum = offset.to(tl.float32) * _half(start, 2, valid)
        row = part // 4 * 32 + within
        if FORMAT == "Q4_K":
            codes = _nibble(start + 16 + row, subgroup % 2, valid)
        else:
            fifth = (_byte(start + 16 + within, valid) >> subgroup) & 1
            codes = _nibble(start + 48 + row, subgroup % 2, valid) + fifth * 16
    values = codes.to(tl.float32) * scale
    if FORMAT == "Q2_K" or FORMAT == "Q4_K" or FORMAT == "Q5_K":
        values -= minimum
    return values


@triton.jit
def _byte(place, valid):
    return tl.load(place, mask=valid, other=0).to(tl.int32)


@triton.jit
def _nibble(place, half, valid):
    """Return each byte's low (`half` 0) or high bits (1)."""
    return (_byte(place, valid) >> half * 4) & 15


@triton.jit
def _quarter(place, quarter, valid):
    """Return one of four 2-bit numbers per byte, 0 for the lowest."""
    return (_byte(place, valid) >> quarter * 2) & 3


@triton.jit
def _fifth(place, part, value, valid):
    """Return 16 x each value's fifth bit, from four bytes of bits."""
    bits = tl.load((place + part * 2).to(tl.pointer_type(tl.uint16)), mask=valid, other=0).to(
        tl.int32
    )
    return ((bits >> value) & 1) * 16


@triton.jit
def _half(start, OFFSET: tl.constexpr, valid):
    """Return the fp16 number at one byte offset in every group, as fp32."""
    return tl.load((start + OFFSET).to(tl.pointer_type(tl.float16)), mask=valid, other=0.0).to(
        tl.float32
    )


@triton.jit
def _six_bits(first, last, subgroup):
    """Return a 6-bit number.

    The first four numbers are in one byte each. The upper bits for the last four are in the same
    bytes.
    """
    return tl.where(subgroup < 4, first & 63, last + (first >> 6) * 16)


@triton.jit
def _level(codes):
    """Return the levels for 4-bit codes, from eight bytes in each of two integers."""
    levels = tl.where(codes < 8, _LOW_LEVELS, _HIGH_LEVELS)
    return (levels >> ((codes & 7) * 8).to(tl.int64)).to(tl.int8)


INTERPRETED = not isinstance(codes_kernel, triton.runtime.JITFunction)
"""True if TRITON_INTERPRET was set when this module was imported."""
