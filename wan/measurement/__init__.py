"""Wan block measurements on a device: rate, times by part, and the faster arithmetic."""

from .arithmetic import measured_arithmetic, with_resolved_precision
from .meter import METERED_TOKENS, measure_block, quick_case
from .probe import BlockVariant, block_pass, probe_block, random_block

__all__ = [
    "METERED_TOKENS",
    "BlockVariant",
    "block_pass",
    "measure_block",
    "measured_arithmetic",
    "probe_block",
    "quick_case",
    "random_block",
    "with_resolved_precision",
]
