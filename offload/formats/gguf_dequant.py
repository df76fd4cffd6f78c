"""GGUF dequantisation: packed quantised values to fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """One way to pack: `values` neighbours take `nbytes` bytes."""

    name: str
    values: int
    nbytes: int

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor of that shape, which is a whole number of packs."""
        packs, left = divmod(math.prod(shape), self.values)
        assert not left, f"{list(shape)} is no whole number of {self.name} packs of {self.values}"
        return packs * self.nbytes


_32 = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18}
_256 = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}

QUANT_FORMATS = {
    name: QuantFormat(name=name, values=values, nbytes=nbytes)
    for values, sizes in ((32, _32), (256, _256))
    for name, nbytes in sizes.items()
}
"""Every packing that can be unpacked, by its name."""


def stored_bytes(shape: tuple[int, ...], dtype: torch.dtype, packing: QuantFormat | None) -> int:
    """Return the bytes that a tensor takes where it is stored."""
    return math.prod(shape) * dtype.itemsize if packing is None else packing.bytes_of(shape)


# The sixteen levels that the integers of IQ4_NL and IQ4_XS stand for.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantise(packs: torch.Tensor, packing: QuantFormat, into: torch.Tensor) -> None:
    """Unpack into fp32.

    Args:
        packs: uint8 [n, packing.nbytes], each pack starting at an even address.
        into: fp32 [n, packing.values], contiguous, on the device of `packs`.
    """
    _DEQUANTISERS[packing.name](packs, into)


def _q4_0(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`d (q - 8)`: fp16 d, then 16 bytes of two q each, the first half of the values in the low bits."""
    q = _nibbles(packs[:, 2:].unsqueeze(1))
    _scaled(q.view(torch.int8).sub_(8).view(-1, 32), _half(packs, 0), into)


def _q4_1(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`d q + m`."""
    q = _nibbles(packs[:, 4:].unsqueeze(1))
    _scaled(q.view(-1, 32), _half(packs, 0), into).add_(_half(packs, 1))


def _q5_0(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`d (q - 16)`: 4 bytes between d and the nibbles hold the fifth bits, one for each value."""
    q = _nibbles(packs[:, 6:].unsqueeze(1)).view(-1, 32).bitwise_or_(_fifth_bits(packs[:, 2:6]))
    _scaled(q.view(torch.int8).sub_(16), _half(packs, 0), into)


def _q5_1(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`d q + m`."""
    q = _nibbles(packs[:, 8:].unsqueeze(1)).view(-1, 32).bitwise_or_(_fifth_bits(packs[:, 4:8]))
    _scaled(q, _half(packs, 0), into).add_(_half(packs, 1))


def _q8_0(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`d q` of signed bytes."""
    _scaled(packs[:, 2:].view(torch.int8), _half(packs, 0), into)


def _iq4_nl(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`d level[q]`."""
    q = _nibbles(packs[:, 2:].unsqueeze(1))
    _scaled(_levels(q).view(-1, 32), _half(packs, 0), into)


def _q2_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`(d scale) q - (m minimum)`: sixteen groups of 16 values, scale and minimum of each are the halves of a byte."""
    scales, q = packs[:, :16], _quarters(packs[:, 16:80].reshape(-1, 2, 32))
    scale, minimum = (scales & 15) * _half(packs, 40), (scales >> 4) * _half(packs, 41)
    groups = into.view(-1, 16, 16)
    _scaled(q.view(-1, 16, 16), scale.unsqueeze(-1), groups).sub_(minimum.unsqueeze(-1))


def _q3_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`(d (scale - 32)) (q - 4)`: the third bits of all values come first, as 8 bits of 32 bytes."""
    q = _quarters(packs[:, 32:96].reshape(-1, 2, 32)).view(-1, 8, 32)
    q.bitwise_or_(_bits(packs[:, :32]).bitwise_left_shift_(2))
    low, high = packs[:, 96:104].unsqueeze(1), packs[:, 104:108].unsqueeze(1)
    scale = _nibbles(low).view(-1, 16).bitwise_or_(_quarters(high).view(-1, 16).bitwise_left_shift_(4))
    scale = scale.view(torch.int8).sub_(32) * _half(packs, 54)
    _scaled(q.view(torch.int8).sub_(4).view(-1, 16, 16), scale.unsqueeze(-1), into.view(-1, 16, 16))


def _q4_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`(d scale) q - (m minimum)`: eight groups of 32 values."""
    scale, minimum = _six_bit_scales(packs)
    q = _nibbles(packs[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    _scaled(q, scale, into.view(-1, 8, 32)).sub_(minimum)


def _q5_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """As Q4_K, with the fifth bits of all values before the nibbles, as 8 bits of 32 bytes."""
    scale, minimum = _six_bit_scales(packs)
    q = _nibbles(packs[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    q.bitwise_or_(_bits(packs[:, 16:48]).bitwise_left_shift_(4))
    _scaled(q, scale, into.view(-1, 8, 32)).sub_(minimum)


def _q6_k(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`(d scale) (q - 32)`: sixteen groups of 16 values with a signed byte each as their scale."""
    q = _nibbles(packs[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    q.bitwise_or_(_quarters(packs[:, 128:192].reshape(-1, 2, 32)).view(-1, 8, 32).bitwise_left_shift_(4))
    scale = packs[:, 192:208].view(torch.int8) * _half(packs, 104)
    _scaled(q.view(torch.int8).sub_(32).view(-1, 16, 16), scale.unsqueeze(-1), into.view(-1, 16, 16))


def _iq4_xs(packs: torch.Tensor, into: torch.Tensor) -> None:
    """`(d (scale - 32)) level[q]`: eight groups of 32 values; the scales' upper bits lie before their lower ones."""
    low, high = packs[:, 4:8].unsqueeze(-1), packs[:, 2:4].unsqueeze(-1)
    scale = _nibbles(low).view(-1, 8).bitwise_or_(_quarters(high).view(-1, 8).bitwise_left_shift_(4))
    scale = scale.view(torch.int8).sub_(32) * _half(packs, 0)
    q = _nibbles(packs[:, 8:].reshape(-1, 8, 16))
    _scaled(_levels(q).view(-1, 8, 32), scale.unsqueeze(-1), into.view(-1, 8, 32))


def _scaled(q: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write and return `q * scale`; a CPU takes twice the time for a product of two dtypes."""
    return into.copy_(q).mul_(scale)


def _half(packs: torch.Tensor, index: int) -> torch.Tensor:
    """fp16 number `index` of every pack, as fp32 [n, 1]."""
    return packs.view(torch.float16)[:, index : index + 1].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, groups, width] bytes as their low and high halves, [n, groups, 2, width]."""
    return torch.stack((packed & 15, packed >> 4), dim=2)


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """[n, groups, width] bytes as four numbers of two bits, the lowest first: [n, groups, 4, width]."""
    return torch.stack((packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6), dim=2)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """[n, width] bytes as their bits, the lowest first: [n, 8, width]."""
    return torch.stack([(packed >> bit) & 1 for bit in range(8)], dim=1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Four bytes for each pack as its 32 bits, moved to where a fifth bit is: [n, 32]."""
    return torch.stack([((packed >> bit) & 1) << 4 for bit in range(8)], dim=2).view(-1, 32)


def _six_bit_scales(packs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales times d and minima times m of Q4_K and Q5_K, each [n, 8, 1].

    Twelve bytes hold sixteen numbers of six bits: of the first four scales and minima, each in a byte of its own, two
    bits are left over for the upper bits of the last four.
    """
    first, second, lower = packs[:, 4:8], packs[:, 8:12], packs[:, 12:16]
    scale = torch.cat((first & 63, (lower & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat((second & 63, (lower >> 4) | ((second >> 6) << 4)), dim=1)
    return (scale * _half(packs, 0)).unsqueeze(-1), (minimum * _half(packs, 1)).unsqueeze(-1)


def _levels(q: torch.Tensor) -> torch.Tensor:
    """The levels that `q` stands for, fp32."""
    # From memory that may be paged, so the host is only held up until the driver has taken the 64 bytes.
    levels = torch.tensor(LEVELS, dtype=torch.float32).to(q.device, non_blocking=True)
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
