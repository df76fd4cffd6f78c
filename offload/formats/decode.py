"""Decoding from stored bytes to the compute dtype, when a block arrives.

Fp8 is converted to fp32 exactly. Microscaled matrices are mxfp8 (OCP Microscaling Formats 1.0) and
nvfp4 (NVIDIA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from .chunk_size import WORK_BYTES_PER_VALUE, values_at_once
from .gguf_dequant import dequantise
from .layout import BlockFormat
from .one_pass import StoredForm, decode_in_one_pass, refusal
from .packing import TILE_COLUMNS, TILE_ROWS, Constants, EightBit, Microscaled, Packing, QuantFormat
from .rotation import kronecker_factors, rotated_sums, rotation_factor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_BIAS = 2.0**8  # ratio of the exponent biases of e4m3fn and fp16
_SIGN_TWICE = 0x4000  # bit that holds a second copy of the sign after the arithmetic shift
_FP32_MANTISSA_BITS = 23

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats. The fourth bit is the sign."""


def widen(stored: torch.Tensor, into: torch.Tensor, bits: torch.Tensor) -> None:
    """Write exactly `stored.float()`.

    Args:
        stored: one of `FP8_DTYPES`, on the CPU.
        into: fp32 tensor in the same shape.
        bits: int16 work tensor in the same shape. It is overwritten.
    """
    codes = stored.view(torch.int8)
    if stored.dtype == torch.float8_e5m2:
        # e5m2 is the upper byte of an fp16 number.
        torch.bitwise_left_shift(bits.copy_(codes), 8, out=bits)
        into.copy_(bits.view(torch.float16))
    elif _has_nan(codes):
        # The shift below would turn NaN into a number, so torch converts, one value at a time.
        into.copy_(stored)
    else:
        # Exponent and mantissa move to their places in fp16, where the bias is 15 instead of 7.
        torch.bitwise_left_shift(bits.copy_(codes), 7, out=bits)
        bits.bitwise_and_(~_SIGN_TWICE)
        into.copy_(bits.view(torch.float16)).mul_(_BIAS)


def _has_nan(codes: torch.Tensor) -> bool:
    """Return True if an e4m3fn value is NaN.

    NaN is 0x7F, the largest signed code, or 0xFF, the largest unsigned code.
    """
    return int(codes.amax()) == 0x7F or int(codes.view(torch.uint8).amax()) == 0xFF


def decode_block(
    raw: torch.Tensor,
    into: torch.Tensor,
    block_format: BlockFormat,
    scales: Mapping[str, torch.Tensor],
    constants: Constants | None = None,
) -> None:
    """Decode one block from the stored bytes.

    The result is exactly `(values * scale).to(dtype)`, where `values` are the stored or packed
    numbers in fp32. Tensors without a scale are only converted.

    Args:
        raw: the stored bytes, 1-D uint8 with at least `stored.nbytes`.
        into: 1-D uint8 with at least `computed.nbytes`, on any device. Ordered by the current
            stream there.
        block_format: layouts of `raw` and `into`.
        scales: fp32 factors, 0-d or [rows, 1], one for each name in `block_format.scaled`. They are
            copied on every call if they are on another device than `raw`.
        constants: read and added to. They are written on the current stream, and may be used on no
            other. None: this call uses its own.
    """
    assert scales.keys() == block_format.scaled, (
        f"got scales of {sorted(scales)}, need {sorted(block_format.scaled)}"
    )
    constants = {} if constants is None else constants
    for stored, computed in block_format.parts:
        part = stored.view(raw)
        values = computed.view(into)
        if isinstance(computed.packing, EightBit):
            _copy_codes(part, stored.packing, values, computed.packing, computed.shape)
            continue
        decode_tensor(
            part, values, packing=stored.packing, scale=scales.get(stored.name), constants=constants
        )


def prepare_decoding(formats: Iterable[BlockFormat], device: torch.device) -> None:
    """Compile and test the kernels for `formats` on `device`, so no step waits for it."""
    for fmt in formats:
        for stored, computed in fmt.parts:
            scaled = stored.name in fmt.scaled
            form = StoredForm(dtype=stored.dtype, packing=stored.packing, scaled=scaled)
            if computed.packing is None and form.has_kernel:
                refusal(form, computed.dtype, device, _decode_by_torch)


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
        into: contiguous memory in the values' shape and the compute dtype, on any device.
        packing: packing of the values, if any.
        scale: fp32, 0-d or [rows, 1], if any.
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
    """Return True if converting through fp32 is faster.

    On a CPU, torch converts these dtypes one value at a time.
    """
    if stored.device.type != "cpu":
        return False
    return stored.dtype in FP8_DTYPES or (stored.dtype, computed) == (torch.float16, torch.bfloat16)


WriteRows = Callable[[slice, torch.Tensor], None]
"""Writes the values in some rows: into fp32 on a CPU, into the compute dtype on a device."""


def _write_rows(into: torch.Tensor, device: torch.device, write: WriteRows) -> None:
    """Decode in pieces of several rows.

    On a CPU the values pass through one fp32 work tensor, unless `into` is fp32 on a CPU too.

    Args:
        into: [rows, ...].
        device: device with the stored values.
    """
    rows = len(into)
    at_once = max(1, min(rows, values_at_once(device) * rows // max(1, into.numel())))
    in_place = into.device == device and (into.dtype == torch.float32 or device.type != "cpu")
    parts = [slice(start, min(rows, start + at_once)) for start in range(0, rows, at_once)]
    if in_place:
        for part in parts:
            write(part, into[part])
        return
    work = torch.empty(at_once, *into.shape[1:], dtype=torch.float32, device=device)
    for part in parts:
        values = work[: part.stop - part.start]
        write(part, values)
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
    stored: torch.Tensor,
    packing: Microscaled,
    scale: torch.Tensor | None,
    into: torch.Tensor,
    constants: Constants,
) -> WriteRows:
    shape = tuple(into.shape)
    count = packing.code_bytes(shape)
    codes = stored[:count].view(shape[0], -1)
    scales = group_scales(stored[count:], packing, shape).unsqueeze(-1)
    if scale is not None:
        # `microscaled_kernel` also multiplies both scales first. Another order has other bits.
        scales = scales * scale
    if packing.bits == 4:
        return _in_groups(_look_up(codes, packing, into, constants), scales, packing.values)
    return _in_groups(_convert(codes.view(torch.float8_e4m3fn)), scales, packing.values)


def _in_groups(write: WriteRows, scales: torch.Tensor, columns: int) -> WriteRows:
    """Return `write`, followed by the product with each group's scale [rows, groups, 1]."""

    def write_scaled(part: slice, values: torch.Tensor) -> None:
        write(part, values)
        values.view(len(values), -1, columns).mul_(scales[part])

    return write_scaled


def _copy_codes(
    stored: torch.Tensor,
    packing: Packing | None,
    into: torch.Tensor,
    kept: EightBit,
    shape: tuple[int, ...],
) -> None:
    """Copy codes, and row scales or one scale for every row. A plain cast has scale 1."""
    codes, scales = kept.split(into, shape)
    if packing is None:
        codes.copy_(stored, non_blocking=True)
        scales.fill_(1)
        return
    assert isinstance(packing, EightBit), (
        f"{packing.name} is stored, and {kept.name} is computed with"
    )
    for part, target in zip(packing.split(stored, shape), (codes, scales), strict=True):
        target.copy_(part.expand(target.shape), non_blocking=True)


def _decode_codes(
    stored: torch.Tensor, packing: EightBit, into: torch.Tensor, constants: Constants
) -> None:
    codes, scale = packing.split(stored, tuple(into.shape))
    scale = scale.float()
    if packing.group:
        _write_rows(into, stored.device, _of_rotated(codes, packing, scale, constants))
    elif _is_on_device(stored, into):
        blocks = len(codes), -1, packing.block or codes.shape[1]
        _write_product(codes.view(blocks), scale.unsqueeze(-1), into.view(blocks))
    elif packing.block:
        write = _in_groups(_convert(codes), scale.unsqueeze(-1), packing.block)
        _write_rows(into, stored.device, write)
    else:
        scale = scale if packing.by_row else scale.view(())
        _write_rows(into, stored.device, _of_numbers(codes, scale))


def _write_product(stored: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> None:
    """Write `stored` x `scale` without a work tensor.

    This takes one launch, or two from fp8, which torch cannot multiply.
    """
    if stored.dtype in FP8_DTYPES:
        # Exact: the compute dtypes contain all fp8 values.
        stored = into.copy_(stored, non_blocking=True)
    # A factor with a dimension makes the product fp32 before it is rounded.
    torch.mul(stored, scale if scale.dim() else scale.view((1,) * into.dim()), out=into)


def _of_rotated(
    codes: torch.Tensor, packing: EightBit, scale: torch.Tensor, constants: Constants
) -> WriteRows:
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
    """Return a function that converts rows with plain numbers."""
    bits = torch.empty(0, dtype=torch.int16)

    def write(part: slice, values: torch.Tensor) -> None:
        nonlocal bits
        if stored.device.type != "cpu" or stored.dtype not in FP8_DTYPES:
            values.copy_(stored[part])
            return
        if bits.numel() < values.numel():
            bits = torch.empty(values.numel(), dtype=torch.int16)
        widen(stored[part], values, bits[: values.numel()].view(values.shape))

    return write


def _look_up(
    codes: torch.Tensor, packing: Microscaled, into: torch.Tensor, constants: Constants
) -> WriteRows:
    """Return a function that converts rows with 4-bit codes, two per byte."""
    dtype = torch.float32 if codes.device.type == "cpu" else into.dtype
    # Both values as one integer: it takes a third of the time of looking up rows with two.
    word = {4: torch.int64, 2: torch.int32}[dtype.itemsize]
    if (packing, dtype) not in constants:
        table = pair_table(packing, dtype).view(word).view(-1)
        constants[packing, dtype] = (table.to(codes.device, non_blocking=True),)
    [table] = constants[packing, dtype]

    def write(part: slice, values: torch.Tensor) -> None:
        # `index_select` takes int32 and int64 only.
        torch.index_select(table, 0, codes[part].reshape(-1).int(), out=values.view(word).view(-1))

    return write


def group_scales(
    scales: torch.Tensor, packing: Microscaled, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the group scales in a matrix: fp32 [rows, groups].

    Args:
        scales: stored scales, 1-D uint8 in tiles.
        packing: MXFP8, with e8m0 scales, or NVFP4, with e4m3fn.
        shape: matrix shape.
    """
    rows, columns = packing.scale_shape(shape)
    # A tile holds scale (row, column) at (row % 32) * 16 + row // 32 * 4 + column.
    tiles = (rows // TILE_ROWS, columns // TILE_COLUMNS)
    codes = scales.view(*tiles, 32, TILE_ROWS // 32, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    codes = codes.reshape(rows, columns)[: shape[0], : shape[1] // packing.values]
    if packing.bits == 4:
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    # e8m0 is the exponent of an fp32 number: 2**(code - 127). The scale 2**-127 becomes 0. Only
    # groups of zeros have it.
    return codes.int().bitwise_left_shift_(_FP32_MANTISSA_BITS).view(torch.float32)


def pair_table(packing: Microscaled, dtype: torch.dtype) -> torch.Tensor:
    """Return both values for each byte in a 4-bit packing, [256, 2] on the CPU."""
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=dtype)
    codes = torch.arange(256)
    high = values[codes >> 4]
    low = values[codes & 15]
    return torch.stack((high, low) if packing.high_first else (low, high), dim=1)


def decode_work_bytes(values: int, device: torch.device) -> int:
    """Return the device bytes for decoding quantised tensors with up to `values` values."""
    return WORK_BYTES_PER_VALUE * min(values, values_at_once(device))
