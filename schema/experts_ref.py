"""References to experts by value: equal on a graph edge, in a cache and in another process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Storage = Literal["as stored", "fp8"]
"""Form of the blocks in RAM and on the bus."""

Attention = Literal["default", "sdpa", "cudnn", "flash", "flash 3", "sage", "xformers"]
"""Attention backend; "default" is the choice of diffusers."""


@dataclass(frozen=True, kw_only=True)
class LoraRef:
    """Reference to one LoRA or a pair of them: one file per expert, None for an expert without one."""

    high_noise: Path | None = None
    low_noise: Path | None = None
    strength_high: float = 1.0
    strength_low: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertsRef:
    """Reference to a pair of experts, or to a single expert, by value: hashable and comparable."""

    high_noise: Path
    """File of the high-noise expert; with `low_noise` None, a diffusers pipeline folder that contains both experts,
    or, with `single`, the only expert."""
    low_noise: Path | None = None
    compute_dtype: str = "auto"
    """torch's name of a dtype. "auto" chooses a fast one for the device, the same for all workers of a run."""
    storage: Storage = "as stored"
    loras: tuple[LoraRef, ...] = ()
    """LoRAs added to the experts' weights, all of them."""
    single: bool = False
    """True for a model of one expert, which runs every step."""
    attention: Attention = "default"
    compile: bool = False
    """True to compile the blocks with `torch.compile`."""

    @property
    def opened(self) -> ExpertsRef:
        """Copy without the options that may change from run to run while the experts stay open."""
        return replace(self, loras=(), attention="default", compile=False)
