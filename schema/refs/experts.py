"""References to experts and LoRAs: files, and options for opening them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from ..step_strengths import StepRange, StepStrengths

Storage = Literal["as stored", "fp8", "int8 ConvRot"]
"""Block format in RAM and on the bus."""


CodeFormat = Literal["int8", "fp8"]
"""Format for matrices that can be multiplied as they are stored."""


Arithmetic = Literal["auto", "decoded", "as stored", "int8", "fp8"]
"""Multiplication by matrices stored in int8 and fp8.

They are decoded to the compute dtype, or one format or both are multiplied as stored.
"""


KernelSet = Literal["auto", "triton", "torch", "comfy-kitchen", "exact"]
"""Kernels for norms, residuals and the rotary embedding. "auto": the fastest on the device."""


Attention = Literal["default", "sdpa", "cudnn", "flash", "flash 3", "sage", "int8", "xformers"]
"""Attention backend. "default" is diffusers' choice."""


@dataclass(frozen=True, kw_only=True)
class LoraRef:
    """Reference to one LoRA or a pair: one file per expert, None for an expert without one."""

    high_noise: Path | None = None
    low_noise: Path | None = None
    strength_high: float = 1.0
    strength_low: float = 1.0
    steps: tuple[StepRange, ...] = ()
    """Strengths for both files by step range, in place of the two above. Ranges share no step."""

    @property
    def high(self) -> StepStrengths:
        """Strength of the high-noise file in each step."""
        return StepStrengths(usual=self.strength_high, ranges=self.steps)

    @property
    def low(self) -> StepStrengths:
        """Strength of the low-noise file in each step."""
        return StepStrengths(usual=self.strength_low, ranges=self.steps)

    @property
    def files(self) -> tuple[tuple[Path, StepStrengths], ...]:
        """Files with their strengths by step."""
        pairs = ((self.high_noise, self.high), (self.low_noise, self.low))
        return tuple((file, strengths) for file, strengths in pairs if file is not None)


@dataclass(frozen=True, kw_only=True)
class ExpertsRef:
    """Reference to an expert pair or a single expert, by value: hashable and comparable."""

    high_noise: Path
    """File with the high-noise expert.

    With `low_noise` None it is a diffusers pipeline folder that contains both experts, or, with
    `single`, the only expert.
    """
    low_noise: Path | None = None
    compute_dtype: str = "auto"
    """torch dtype name. "auto" chooses a fast one for the device, the same for all workers in a
    run."""
    storage: Storage = "as stored"
    arithmetic: Arithmetic = "decoded"
    loras: tuple[LoraRef, ...] = ()
    """LoRAs added to the experts' weights, all of them."""
    single: bool = False
    """True for a model with a single expert for all steps."""
    kernels: KernelSet = "auto"
    attention: Attention = "default"
    compile: bool = False
    """True to compile the blocks with `torch.compile`."""

    @property
    def lora_files(self) -> tuple[tuple[Path, StepStrengths], ...]:
        """LoRA files with their strengths by step."""
        return tuple(chain.from_iterable(lora.files for lora in self.loras))

    @property
    def strength_ranges(self) -> tuple[tuple[str, StepRange], ...]:
        """Step ranges with their own LoRA strength, each after the LoRA's file name."""
        files = self.lora_files
        return tuple((file.name, each) for file, strengths in files for each in strengths.ranges)

    @property
    def opened(self) -> ExpertsRef:
        """Copy without the options that may change between runs while the experts stay open."""
        return replace(self, loras=(), kernels="auto", attention="default", compile=False)
