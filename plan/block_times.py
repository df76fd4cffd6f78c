"""Measured times of a block in each arithmetic, and the choice of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from ..schema import CodeFormat, ExpertShape

WORTHWHILE = 0.95
"""Products in 8 bits lose digits, so a visit has to take at most this share of one in the compute dtype."""


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of one visit of a block, for one lane, in one arithmetic."""

    visit_s: float
    products_s: float
    """Matrix products alone, their inputs quantised before."""
    attention_s: float
    """Attention alone."""
    parts: Mapping[str, float]
    """Seconds by part within a visit."""
    decode_s: float = 0.0
    """Decoding the matrices of a block to the compute dtype, which a visit in this arithmetic does not need."""

    @property
    def limit_share(self) -> float:
        """Products and attention alone, as a share of the visit."""
        return (self.products_s + self.attention_s) / self.visit_s

    @property
    def words(self) -> str:
        """Time of a visit, the share of the limit, and the milliseconds of each part."""
        parts = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in self.parts.items())
        return f"{1e3 * self.visit_s:.2f} ms a visit, {self.limit_share:.0%} of the device's limit ({parts})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        return {**asdict(self), "limit_share": self.limit_share}


@dataclass(frozen=True, kw_only=True)
class BlockRates:
    """Rates of the parts of a block, the fields of a `Machine` of the same names."""

    product_flops_per_s: Mapping[str, float]
    attention_flops_per_s: float
    linear_speedups: Mapping[str, float]

    @classmethod
    def of(cls, times: Mapping[str, BlockTimes], shape: ExpertShape, tokens: int) -> BlockRates:
        """Return the rates from `times` by format, "" included, of a block of `shape` and one lane of `tokens`."""
        plain = times[""]
        linear_s = plain.visit_s * shape.linear_flops(tokens) / shape.block_flops(tokens)
        # A visit in 8 bits differs in its linear layers only, which take at least as long as their products.
        lasted = {
            name: max(linear_s + each.visit_s - plain.visit_s, each.products_s) for name, each in times.items() if name
        }
        return cls(
            product_flops_per_s={name: shape.linear_flops(tokens) / each.products_s for name, each in times.items()},
            attention_flops_per_s=shape.attention_flops(tokens) / plain.attention_s,
            linear_speedups={name: linear_s / seconds for name, seconds in lasted.items()},
        )


@dataclass(frozen=True, kw_only=True)
class ArithmeticChoice:
    """Formats of codes that are multiplied as they are stored, and the reason."""

    multiplied: tuple[CodeFormat, ...]
    words: str


def choose_arithmetic(times: Mapping[str, BlockTimes]) -> ArithmeticChoice:
    """Return the formats whose products pay; `times` by format, "" for the compute dtype.

    A visit in 8 bits is compared with one in the compute dtype without decoding: resident blocks are decoded once, and
    lanes share a decoded block.
    """
    plain = times[""]
    others = {name: each for name, each in times.items() if name}
    pay = [name for name, each in others.items() if each.visit_s <= WORTHWHILE * plain.visit_s]
    multiplied = tuple(name for name in get_args(CodeFormat) if name in pay)
    reasons = [
        f"{name} matrices are {'multiplied as they are stored' if name in multiplied else 'decoded'}: a block takes "
        f"{1e3 * each.visit_s:.2f} ms in {name}, {1e3 * plain.visit_s:.2f} ms in the compute dtype and "
        f"{1e3 * each.decode_s:.2f} ms to be decoded"
        for name, each in others.items()
    ]
    return ArithmeticChoice(multiplied=multiplied, words="; ".join(reasons) or "no format multiplies codes here")
