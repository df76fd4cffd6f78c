"""Decoding of stored bytes to the compute dtype, on arrival of a block; fp8 is converted to fp32 exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch

from ...devices import runtime_for
from .gguf_dequant import dequantise
from .layout import BlockFormat
from .microscaling import group_scales, pair_table
from .one_pass import StoredForm, decode_in_one_pass, refusal
from .packing import Constants, EightBit, Microscaled, Packing, QuantFormat
from .rotation import kronecker_factors, rotated_sums, rotation_factor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_BIAS = 2.0**8  # ratio of the exponent biases of e4m3fn and fp16
_SIGN_TWICE = 0x4000  # bit that holds a second copy of the sign after the arithmetic shift


def widen(stored: torch.Tensor, into: torch.Tensor, bits: torch.Tensor) -> None:
    """Write exactly `stored.float()`.

    Args:
        stored: one of `FP8_DTYPES`, on the CPU.
        into: fp32 tensor of the same shape.
        bits: int16 work tensor of the same shape; overwritten.
    """
    codes = stored.view(torch.int8)
    if stored.dtype == torch.float8_e5m2:
        torch.bitwise_left_shift(bits.copy_(codes), 8, out=bits)
        into.copy_(bits.view(torch.float16))
    elif _has_nan(codes):
        into.copy_(stored)
    else:
        torch.bitwise_left_shift(bits.copy_(codes), 7, out=bits)
        bits.bitwise_and_(~_SIGN_TWICE)
        into.copy_(bits.view(torch.float16)).mul_(_BIAS)


def _has_nan(codes: torch.Tensor) -> bool:
    """Return True if an e4m3fn value is NaN: 0x7F, the largest signed code, or 0xFF, the largest unsigned code."""
    return int(codes.amax()) == 0x7F or int(codes.view(torch.uint8).amax()) == 0xFF


# Scaled and quantised values are converted through fp32 in chunks of about this many values. That bounds the extra
# memory to 8 MB for a matrix of any size, plus the same for the integers of quantised ones. On a CPU it takes half the
# time of converting the matrix at once, and 64 Ki to 4 Mi values perform equally.
CHUNK_VALUES = 2 * 1024**2

# On a device without Triton, a piece of quantised values takes 2 to 20 kernel launches, so that pieces of
# `CHUNK_VALUES` would take thousands for a block. Larger ones take work memory: at most 0.5 % of the device's.
WORK_BYTES_PER_VALUE = 8
VRAM_PER_VALUE = 200 * WORK_BYTES_PER_VALUE


def decode_block(
    raw: torch.Tensor,
    into: torch.Tensor,
    block_format: BlockFormat,
    scales: Mapping[str, torch.Tensor],
    constants: Constants | None = None,
) -> None:
    """Decode the stored bytes of one block.

    The result is exactly `(values * scale).to(dtype)`, where `values` are the stored numbers in fp32, or those of their
    packing; tensors without a scale are only converted.

    Args:
        raw: the stored bytes, 1-D uint8 of at least `stored.nbytes`.
        into: 1-D uint8 of at least `computed.nbytes`, on any device; ordered by the current stream there.
        block_format: layouts of `raw` and `into`.
        scales: fp32 factors, 0-d or [rows, 1], one for each name in `block_format.scaled`. They are copied on every
            call if they are on another device than `raw`.
        constants: added to and read; they are written on the current stream, and may be used on no other. None: those
            of this call only.
    """
    assert scales.keys() == block_format.scaled, f"got scales of {sorted(scales)}, need {sorted(block_format.scaled)}"
    constants = {} if constants is None else constants
    for stored, computed in block_format.parts:
        values = into[computed.offset : computed.offset + computed.nbytes]
        part = raw[stored.offset : stored.offset + stored.nbytes].view(stored.dtype).view(stored.view_shape)
        if isinstance(computed.packing, EightBit):
            _copy_codes(part, stored.packing, values, computed.packing, computed.shape)
            continue
        values = values.view(computed.dtype).view(computed.shape)
        decode_tensor(part, values, packing=stored.packing, scale=scales.get(stored.name), constants=constants)


def prepare_decoding(formats: Iterable[BlockFormat], device: torch.device) -> None:
    """Compile and test the kernels for blocks in `formats` on `device`, so that no step of a run waits for it."""
    forms = {
        (StoredForm(dtype=stored.dtype, packing=stored.packing, scaled=stored.name in fmt.scaled), computed.dtype)
        for fmt in formats
        for stored, computed in fmt.parts
        if computed.packing is None
    }
    for form, dtype in forms:
        if form.has_kernel:
            refusal(form, dtype, device, _decode_by_torch)


def decode_tensor(
    stored: torch.Tensor,
    into: torch.Tensor,
    *,
    packing: Packing | None = None,
    scale: torch.Tensor | None = None,
    constants: Constants | None = None,
) -> None:
    """Decode one tensor as `decode_block` does.

    Args:
        stored: as returned by `tensor_views` and `read_tensors`.
        into: contiguous memory of the values' shape in the compute dtype, on any device.
        packing: packing of the values, if they have one.
        scale: fp32, 0-d or [rows, 1], if there is one.
        constants: as in `decode_block`.
    """
    scale = None if scale is None else scale.to(stored.device)
    constants = {} if constants is None else constants
    if not decode_in_one_pass(stored, into, packing, scale, constants, eager=_decode_by_torch):
        _decode_by_torch(stored, into, packing, scale, constants)


def _decode_by_torch(
    stored: torch.Tensor,
    into: torch.Tensor,
    packing: Packing | None,
    scale: torch.Tensor | None,
    constants: Constants,
) -> None:
    if isinstance(packing, QuantFormat):
        _write_rows(into.view(-1, packing.values), stored.device, _of_groups(stored, packing))
    elif isinstance(packing, Microscaled):
        _write_rows(into, stored.device, _of_microscaled(stored, packing, scale, into, constants))
    elif isinstance(packing, EightBit):
        _decode_codes(stored, packing, into, constants)
    elif scale is not None and _is_on_device(stored, into):
        _write_product(stored, scale, into)
    elif scale is not None or _is_slow_to_convert(stored, into.dtype):
        _write_rows(into, stored.device, _of_numbers(stored, scale))
    else:
        into.copy_(stored, non_blocking=True)


def _is_on_device(stored: torch.Tensor, into: torch.Tensor) -> bool:
    return into.device.type != "cpu" and stored.device == into.device


def _is_slow_to_convert(stored: torch.Tensor, computed: torch.dtype) -> bool:
    """Return True if converting through fp32 is faster: torch converts these dtypes one value at a time on a CPU."""
    if stored.device.type != "cpu":
        return False
    return stored.dtype in FP8_DTYPES or (stored.dtype, computed) == (torch.float16, torch.bfloat16)


WriteRows = Callable[[slice, torch.Tensor], None]
"""Writes the values of some rows: into fp32 on a CPU, into the compute dtype on a device."""


def _write_rows(into: torch.Tensor, device: torch.device, write: WriteRows) -> None:
    """Decode in pieces of rows; on a CPU through one fp32 work tensor, unless `into` is fp32 on a CPU too.

    Args:
        into: [rows, ...].
        device: device of the stored values.
    """
    rows = len(into)
    at_once = max(1, min(rows, values_at_once(device) * rows // max(1, into.numel())))
    in_place = into.device == device and (into.dtype == torch.float32 or device.type != "cpu")
    work = torch.empty(0 if in_place else at_once, *into.shape[1:], dtype=torch.float32, device=device)
    for start in range(0, rows, at_once):
        part = slice(start, min(rows, start + at_once))
        values = into[part] if in_place else work[: part.stop - start]
        write(part, values)
        if not in_place:
            into[part].copy_(values, non_blocking=True)


def _of_groups(groups: torch.Tensor, packing: QuantFormat) -> WriteRows:
    return lambda part, values: dequantise(groups[part], packing, values)


def _of_numbers(stored: torch.Tensor, scale: torch.Tensor | None) -> WriteRows:
    write = _convert(stored)

    def write_scaled(part: slice, values: torch.Tensor) -> None:
        write(part, values)
        if scale is not None:
            values.mul_(scale[part] if scale.dim() else scale)

    return write_scaled


def _of_microscaled(
    stored: torch.Tensor, packing: Microscaled, scale: torch.Tensor | None, into: torch.Tensor, constants: Constants
) -> WriteRows:
    shape = tuple(into.shape)
    count = packing.code_bytes(shape)
    codes = stored[:count].view(shape[0], -1)
    scales = group_scales(stored[count:], packing, shape).unsqueeze(-1)
    if scale is not None:
        scales = scales * scale
    write = (
        _look_up(codes, packing, into, constants) if packing.bits == 4 else _convert(codes.view(torch.float8_e4m3fn))
    )

    def write_scaled(part: slice, values: torch.Tensor) -> None:
        write(part, values)
        values.view(*scales[part].shape[:2], packing.values).mul_(scales[part])

    return write_scaled


def _copy_codes(
    stored: torch.Tensor, packing: Packing | None, into: torch.Tensor, kept: EightBit, shape: tuple[int, ...]
) -> None:
    """Copy codes, and their scales or the only scale for every row; that of a plain cast is 1."""
    codes, scales = kept.split(into, shape)
    if packing is None:
        codes.copy_(stored, non_blocking=True)
        scales.fill_(1)
        return
    assert isinstance(packing, EightBit), f"{packing.name} is stored, and {kept.name} is computed with"
    for part, target in zip(packing.split(stored, shape), (codes, scales), strict=True):
        target.copy_(part.expand(target.shape), non_blocking=True)


def _decode_codes(stored: torch.Tensor, packing: EightBit, into: torch.Tensor, constants: Constants) -> None:
    codes, scale = packing.split(stored, tuple(into.shape))
    scale = scale.float()
    if packing.group:
        _write_rows(into, stored.device, _of_rotated(codes, packing, scale, constants))
    elif _is_on_device(stored, into):
        blocks = len(codes), -1, packing.block or codes.shape[1]
        _write_product(codes.view(blocks), scale.unsqueeze(-1), into.view(blocks))
    elif packing.block:
        _write_rows(into, stored.device, _of_blocks(codes, packing, scale))
    else:
        _write_rows(into, stored.device, _of_numbers(codes, scale if packing.by_row else scale.view(())))


def _write_product(stored: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> None:
    """Write `stored` x `scale` without a work tensor: in one launch, or two from fp8, which torch cannot multiply."""
    if stored.dtype in FP8_DTYPES:
        stored = into.copy_(stored, non_blocking=True)  # exact: the compute dtypes contain all its values
    # A factor with a dimension makes the product fp32 before it is rounded.
    torch.mul(stored, scale if scale.dim() else scale.view((1,) * into.dim()), out=into)


def _of_blocks(codes: torch.Tensor, packing: EightBit, scale: torch.Tensor) -> WriteRows:
    write = _convert(codes)
    scale = scale.unsqueeze(-1)

    def write_scaled(part: slice, values: torch.Tensor) -> None:
        write(part, values)
        values.view(len(values), -1, packing.block).mul_(scale[part])

    return write_scaled


def _of_rotated(codes: torch.Tensor, packing: EightBit, scale: torch.Tensor, constants: Constants) -> WriteRows:
    scale = scale * rotation_factor(packing.group)  # exact: a power of two
    key = packing, torch.float32
    if key not in constants:
        constants[key] = kronecker_factors(packing.group, codes.device)
    factors = constants[key]

    def write(part: slice, values: torch.Tensor) -> None:
        summed = rotated_sums(codes[part].float(), factors)
        torch.mul(summed, scale[part] if packing.by_row else scale, out=values)

    return write


def _convert(stored: torch.Tensor) -> WriteRows:
    """Return a function that converts rows of plain numbers."""
    if stored.device.type == "cpu" and stored.dtype in FP8_DTYPES:
        return _widen_rows(stored)

    def write(part: slice, values: torch.Tensor) -> None:
        values.copy_(stored[part])

    return write


def _widen_rows(stored: torch.Tensor) -> WriteRows:
    bits = torch.empty(0, dtype=torch.int16)

    def write(part: slice, values: torch.Tensor) -> None:
        nonlocal bits
        if bits.numel() < values.numel():
            bits = torch.empty(values.numel(), dtype=torch.int16)
        widen(stored[part], values, bits[: values.numel()].view(values.shape))

    return write


def _look_up(codes: torch.Tensor, packing: Microscaled, into: torch.Tensor, constants: Constants) -> WriteRows:
    """Return a function that converts rows of 4-bit codes, two in each byte."""
    dtype = torch.float32 if codes.device.type == "cpu" else into.dtype
    # Both values as one integer: a third of the time of looking up rows of two.
    word = {4: torch.int64, 2: torch.int32}[dtype.itemsize]
    if (packing, dtype) not in constants:
        table = pair_table(packing, dtype).view(word).view(-1)
        constants[packing, dtype] = (table.to(codes.device, non_blocking=True),)
    [table] = constants[packing, dtype]

    def write(part: slice, values: torch.Tensor) -> None:
        torch.index_select(table, 0, codes[part].reshape(-1).int(), out=values.view(word).view(-1))

    return write


def values_at_once(device: torch.device) -> int:
    """Return the number of quantised values that are decoded at once on `device`.

    Devices with much memory are fast ones, on which a launch costs more of a block's time: a card of 24 GB decodes 16
    Mi values at once, and one of 80 GB the largest matrix of Wan2.2 A14B.
    """
    return max(CHUNK_VALUES, _vram_bytes(device) // VRAM_PER_VALUE)


@functools.cache  # the driver takes long to return it
def _vram_bytes(device: torch.device) -> int:
    runtime = runtime_for(device)
    return 0 if runtime is None or not runtime.count() else runtime.memory().total


def decode_work_bytes(values: int, device: torch.device) -> int:
    """Return the bytes of device memory that decoding quantised tensors of up to `values` values takes."""
    return WORK_BYTES_PER_VALUE * min(values, values_at_once(device))
