"""Which experts are meant, named by value: the same on a graph edge, in a cache and in another process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Storage = Literal["as stored", "fp8"]
"""In which form blocks are kept on their way to the model."""

Attention = Literal["default", "sdpa", "cudnn", "flash", "flash 3", "sage", "xformers"]
"""Whose kernel computes attention: "default" leaves it to diffusers."""


@dataclass(frozen=True, kw_only=True)
class LoraRef:
    """Names one LoRA, or a pair of them, by value: a file for each expert, None for an expert that takes none."""

    high_noise: Path | None = None
    low_noise: Path | None = None
    strength_high: float = 1.0
    strength_low: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertsRef:
    """Names a pair of experts by value, so that it can travel along a graph edge and be compared.

    `low_noise` None means that `high_noise` is a diffusers pipeline folder that holds both experts; or, with `single`,
    that `high_noise` is one expert, which runs every step. `loras` are added to the experts' weights, all of them.
    """

    high_noise: Path
    low_noise: Path | None = None
    compute_dtype: str = "auto"
    """torch's name of a dtype; or "auto": what the device is fast in, and the same for all workers of a run."""
    storage: Storage = "as stored"
    loras: tuple[LoraRef, ...] = ()
    single: bool = False
    attention: Attention = "default"
    compile: bool = False
    """Whether the blocks are compiled (`torch.compile`)."""

    @property
    def opened(self) -> ExpertsRef:
        """What of it is opened: the same without all that another run may change while the experts stay open."""
        return replace(self, loras=(), attention="default", compile=False)
