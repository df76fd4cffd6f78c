"""Measured block times in each arithmetic, and the choice between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from ..plan import BlockRates
from ..schema.refs import CodeFormat
from .expert import ExpertShape

WORTHWHILE = 0.95
"""Largest share of a compute dtype visit that an 8-bit visit may take. 8-bit products lose digits,
so they have to pay."""


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds for one visit to a block, for one lane, in one arithmetic."""

    visit_s: float
    products_s: float
    """Matrix products alone, with inputs quantised before."""
    attention_s: float
    """Attention alone."""
    parts: Mapping[str, float]
    """Seconds per part within a visit."""
    decode_s: float = 0.0
    """Decoding a block's matrices to the compute dtype. A visit in this arithmetic does not need
    it."""

    @property
    def limit_share(self) -> float:
        """Products and attention alone, as a share of the visit."""
        return (self.products_s + self.attention_s) / self.visit_s

    @property
    def words(self) -> str:
        """Visit time, share of the limit, and milliseconds per part."""
        parts = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in self.parts.items())
        return (
            f"{1e3 * self.visit_s:.2f} ms a visit, {self.limit_share:.0%} of the device's limit "
            f"({parts})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        return {**asdict(self), "limit_share": self.limit_share}


def block_rates(times: Mapping[str, BlockTimes], shape: ExpertShape, tokens: int) -> BlockRates:
    """Return rates by format, including "", for a block of `shape` and a lane of `tokens`."""
    plain = times[""]
    linear_s = plain.visit_s * shape.linear_flops(tokens) / shape.block_flops(tokens)
    # An 8-bit visit differs only in the linear layers, which take at least as long as their
    # products.
    lasted = {
        name: max(linear_s + each.visit_s - plain.visit_s, each.products_s)
        for name, each in times.items()
        if name
    }
    return BlockRates(
        product_flops_per_s={
            name: shape.linear_flops(tokens) / each.products_s for name, each in times.items()
        },
        attention_flops_per_s=shape.attention_flops(tokens) / plain.attention_s,
        linear_speedups={name: linear_s / seconds for name, seconds in lasted.items()},
    )


@dataclass(frozen=True, kw_only=True)
class ArithmeticChoice:
    """Code formats to multiply as stored, and the reason."""

    multiplied: tuple[CodeFormat, ...]
    words: str


def choose_arithmetic(times: Mapping[str, BlockTimes]) -> ArithmeticChoice:
    """Return the formats whose products pay. `times` is by format, "" for the compute dtype.

    An 8-bit visit is compared with a compute dtype visit without decoding: resident blocks are
    decoded once, and lanes share a decoded block.
    """
    plain = times[""]
    others = {name: each for name, each in times.items() if name}
    pay = [name for name, each in others.items() if each.visit_s <= WORTHWHILE * plain.visit_s]
    # `CodeFormat` gives a fixed order, so equal choices are equal tuples.
    multiplied = tuple(name for name in get_args(CodeFormat) if name in pay)
    reasons = [
        f"{name} matrices are "
        f"{'multiplied as they are stored' if name in multiplied else 'decoded'}: a block takes "
        f"{1e3 * each.visit_s:.2f} ms in {name}, {1e3 * plain.visit_s:.2f} ms in the compute dtype "
        f"and {1e3 * each.decode_s:.2f} ms to be decoded"
        for name, each in others.items()
    ]
    return ArithmeticChoice(
        multiplied=multiplied, words="; ".join(reasons) or "no format multiplies codes here"
    )
