"""GGUF dequantisation: quantised groups to fp32, or on a device to the compute dtype at once.

Every operation is a kernel launch on a device. `tests/gpu/offload/test_launches.py` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .packing import QUANT_FORMATS, QuantFormat

# The sixteen levels for 4-bit codes in IQ4_NL and IQ4_XS.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantise(groups: torch.Tensor, packing: QuantFormat, into: torch.Tensor) -> None:
    """Compute fp32 values and write them, rounded once to the dtype of `into`.

    Args:
        groups: uint8 [n, packing.nbytes]. Each group starts at an even address, because it contains
            fp16 numbers.
        packing: group format.
        into: [n, packing.values], contiguous, on the same device as `groups`. fp32 on a CPU.
    """
    _DEQUANTISERS[packing.name](groups, into)


def _q4_0(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `d (q - 8)`: fp16 d, then 16 bytes with two q each, low bits for the first half."""
    q = _nibbles(groups[:, 2:].unsqueeze(1))
    # uint8 would wrap below 0.
    _scaled(q.view(torch.int8).sub_(8).view(-1, 32), _half(groups, 0), into)


def _q4_1(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `d q + m`."""
    q = _nibbles(groups[:, 4:].unsqueeze(1))
    _scaled(q.view(-1, 32), _half(groups, 0), into, minimum=-_half(groups, 1))


def _q5_0(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `d (q - 16)`: 4 bytes between d and the nibbles hold each value's fifth bit."""
    q = _five_bits(groups[:, 2:])
    _scaled(q.view(torch.int8).sub_(16), _half(groups, 0), into)


def _q5_1(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `d q + m`."""
    q = _five_bits(groups[:, 4:])
    _scaled(q, _half(groups, 0), into, minimum=-_half(groups, 1))


def _q8_0(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `d q` from signed bytes."""
    _scaled(groups[:, 2:].view(torch.int8), _half(groups, 0), into)


def _iq4_nl(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `d level[q]`."""
    q = _nibbles(groups[:, 2:].unsqueeze(1))
    _scaled(_levels(q).view(-1, 32), _half(groups, 0), into)


def _q2_k(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `(d scale) q - (m minimum)`: 16 subgroups with 16 values each.

    One byte holds a subgroup's scale and minimum.
    """
    scales = groups[:, :16]
    q = _quarters(groups[:, 16:80].reshape(-1, 2, 32))
    # d and m are at bytes 80 and 82: fp16 numbers 40 and 41.
    scale = ((scales & 15) * _half(groups, 40)).unsqueeze(-1)
    minimum = ((scales >> 4) * _half(groups, 41)).unsqueeze(-1)
    _scaled(q.view(-1, 16, 16), scale, into.view(-1, 16, 16), minimum=minimum)


def _q3_k(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `(d (scale - 32)) (q - 4)`. The third bits come first, 8 in each of 32 bytes."""
    q = _quarters(groups[:, 32:96].reshape(-1, 2, 32)).view(-1, 8, 32)
    q.add_(_bits(groups[:, :32]), alpha=4)
    low = groups[:, 96:104].unsqueeze(1)
    high = groups[:, 104:108].unsqueeze(1)
    scale = _nibbles(low).view(-1, 16).add_(_quarters(high).view(-1, 16), alpha=16)
    scale = scale.view(torch.int8).sub_(32) * _half(groups, 54)
    _scaled(q.view(torch.int8).sub_(4).view(-1, 16, 16), scale.unsqueeze(-1), into.view(-1, 16, 16))


def _q4_k(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `(d scale) q - (m minimum)`: 8 subgroups with 32 values each."""
    scale, minimum = _six_bit_scales(groups)
    q = _nibbles(groups[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    _scaled(q, scale, into.view(-1, 8, 32), minimum=minimum)


def _q5_k(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Like Q4_K, with all fifth bits before the nibbles, as 8 bits in each of 32 bytes."""
    scale, minimum = _six_bit_scales(groups)
    q = _nibbles(groups[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    q.add_(_bits(groups[:, 16:48]), alpha=16)
    _scaled(q, scale, into.view(-1, 8, 32), minimum=minimum)


def _q6_k(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `(d scale) (q - 32)`: 16 subgroups with 16 values and a signed byte as scale each."""
    q = _nibbles(groups[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    q.add_(_quarters(groups[:, 128:192].reshape(-1, 2, 32)).view(-1, 8, 32), alpha=16)
    scale = groups[:, 192:208].view(torch.int8) * _half(groups, 104)
    q = q.view(torch.int8).sub_(32).view(-1, 16, 16)
    _scaled(q, scale.unsqueeze(-1), into.view(-1, 16, 16))


def _iq4_xs(groups: torch.Tensor, into: torch.Tensor) -> None:
    """Write `(d (scale - 32)) level[q]`: 8 subgroups with 32 values each.

    The scales' upper bits precede the lower.
    """
    low = groups[:, 4:8].unsqueeze(-1)
    high = groups[:, 2:4].unsqueeze(-1)
    scale = _nibbles(low).view(-1, 8).add_(_quarters(high).view(-1, 8), alpha=16)
    scale = scale.view(torch.int8).sub_(32) * _half(groups, 0)
    q = _nibbles(groups[:, 8:].reshape(-1, 8, 16))
    _scaled(_levels(q).view(-1, 8, 32), scale.unsqueeze(-1), into.view(-1, 8, 32))


def _scaled(
    q: torch.Tensor, scale: torch.Tensor, into: torch.Tensor, *, minimum: torch.Tensor | None = None
) -> None:
    """Write `q * scale`, or `q * scale - minimum`."""
    if into.device.type != "cpu":
        if minimum is None:
            torch.mul(q, scale, out=into)
        else:
            torch.sub(q * scale, minimum, out=into)
        return
    # Convert first: a CPU takes twice as long for a product of two dtypes.
    into.copy_(q).mul_(scale)
    if minimum is not None:
        into.sub_(minimum)


def _half(groups: torch.Tensor, index: int) -> torch.Tensor:
    """Return fp16 number `index` in every group, as fp32 [n, 1]."""
    return groups.view(torch.float16)[:, index : index + 1].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [n, rows, width] into low and high halves [n, rows, 2, width]."""
    return torch.stack((packed & 15, packed >> 4), dim=2)


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [n, rows, width] into four 2-bit numbers, lowest first: [n, rows, 4, width]."""
    if packed.device.type == "cpu":
        # Two thirds of the time there, and twice the launches on a device.
        return torch.stack((packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6), dim=2)
    return _shifted(packed.unsqueeze(2), 2).bitwise_and_(3)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [n, width] into bits, the lowest first: [n, 8, width]."""
    return _shifted(packed.unsqueeze(1), 1).bitwise_and_(1)


def _five_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return 5-bit numbers [n, 32]. Four bytes hold the fifth bits, and 16 bytes the others."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    fifth = (packed[:, :4].unsqueeze(-1) >> shifts).bitwise_and_(1).view(-1, 32)
    return _nibbles(packed[:, 4:].unsqueeze(1)).view(-1, 32).add_(fifth, alpha=16)


def _shifted(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `packed` shifted right by the multiples of `bits` below 8.

    The shifts are in the dimension before the last one.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed >> shifts.unsqueeze(-1)


def _six_bit_scales(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight scales times d and minima times m for Q4_K and Q5_K, each [n, 8, 1].

    Twelve bytes hold sixteen 6-bit numbers. The first four scales and minima take one byte each,
    and the two unused bits in these bytes are the upper bits for the last four.
    """
    upper = groups[:, 4:12].unflatten(1, (2, 4))
    lower = groups[:, 12:16].unsqueeze(1)
    last = _nibbles(lower).squeeze(1).add_(upper >> 6, alpha=16)
    numbers = torch.cat((upper & 63, last), dim=2).transpose(0, 1)
    # Both contiguous: a CPU takes a quarter longer to multiply the values by numbers that are not.
    products = numbers.new_empty(numbers.shape, dtype=torch.float32)
    scale, minimum = torch.mul(numbers, _halves(groups), out=products)
    return scale.unsqueeze(-1), minimum.unsqueeze(-1)


def _halves(groups: torch.Tensor) -> torch.Tensor:
    """Return the first two fp16 numbers in every group, as fp32 [2, n, 1]."""
    return groups.view(torch.float16)[:, :2].t().float().unsqueeze(-1)


def _levels(q: torch.Tensor) -> torch.Tensor:
    """Return the levels for the codes `q` as int8."""
    # Pageable memory on purpose: the host blocks only until the driver has copied the 16 bytes to
    # its staging area.
    levels = torch.tensor(LEVELS, dtype=torch.int8).to(q.device, non_blocking=True)
    return levels.index_select(0, q.view(-1).int())


_DEQUANTISERS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}

assert _DEQUANTISERS.keys() == QUANT_FORMATS.keys()
