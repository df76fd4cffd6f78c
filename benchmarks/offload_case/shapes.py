"""Case shapes: expert size, video size, number of steps.

A run's inputs are determined by the shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wanstream.sampling.inputs import DenoiseRequest
from wanstream.shapes import ExpertShape
from wanstream.testing.weights import HEAD_DIM, TEXT_DIM, TinyShape

INPUT_SEED = 7
LATENT_CHANNELS = 16
PATCH = 2
"""Latent rows and columns per token."""


@dataclass(frozen=True, kw_only=True)
class CaseShape:
    """One case.

    Weights and inputs are random with fixed seeds, so they are the same in every process.
    """

    name: str
    expert: TinyShape
    frames: int
    """Latent frames. Height and width are latent rows and columns."""
    height: int
    width: int
    steps: int = 4
    switch_step: int = 2
    guidance: tuple[float, float] = (4.0, 3.0)
    """Guidance for the high and the low expert, not 1, so that every step computes two lanes."""
    text_tokens: int = 512
    shards: int = 3
    """Number of files per expert."""
    one_set: bool = False
    """True if both experts share the same files, so that they fit on a small disk."""

    @property
    def tokens(self) -> int:
        return self.frames * (self.height // PATCH) * (self.width // PATCH)

    @property
    def widths(self) -> ExpertShape:
        """Expert shape for the planner."""
        expert = self.expert
        return ExpertShape(
            width=expert.heads * HEAD_DIM, ffn_width=expert.ffn_dim, blocks=expert.layers
        )

    @property
    def expert_bytes(self) -> int:
        """Stored bytes per expert."""
        widths = self.widths
        in_blocks = widths.blocks * (widths.streamed_parameters + widths.small_parameters)
        return 2 * (widths.non_block_parameters + in_blocks)  # bf16

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a layerwise step copies: all block matrices in one expert."""
        return self.widths.blocks * self.widths.streamed_bytes()

    @property
    def key(self) -> str:
        """Folder name for the weights. Cases with the same experts share files."""
        return f"{self.expert.layers}x{self.expert.heads}x{self.expert.ffn_dim}x{self.shards}"

    def request(self) -> DenoiseRequest:
        """Return the request: seeded noise and texts, and the schedule."""
        generator = torch.Generator().manual_seed(INPUT_SEED)
        noise = torch.randn(
            1, LATENT_CHANNELS, self.frames, self.height, self.width, generator=generator
        )
        positive, negative = (
            torch.randn(2, 1, self.text_tokens, TEXT_DIM, generator=generator).bfloat16().unbind(0)
        )
        return DenoiseRequest(
            noise=noise,
            positive=positive,
            negative=negative,
            steps=self.steps,
            solver="euler",
            schedule="simple",
            flow_shift=5.0,
            switch_step=self.switch_step,
            guidance=self.guidance,
        )


A14B = TinyShape(layers=40, heads=40, ffn_dim=13824)
CPU_EXPERT = TinyShape(layers=30, heads=12, ffn_dim=8960)
SHORT_A14B = TinyShape(layers=8, heads=40, ffn_dim=13824)
QUICK_EXPERT = TinyShape(layers=6, heads=12, ffn_dim=8960)
TINY_EXPERT = TinyShape(layers=4, heads=2, ffn_dim=512)

SHAPES: Mapping[str, CaseShape] = {
    shape.name: shape
    for shape in (
        CaseShape(name="cpu", expert=CPU_EXPERT, frames=5, height=28, width=28),
        CaseShape(name="quick", expert=QUICK_EXPERT, frames=5, height=14, width=14),
        CaseShape(name="tiny", expert=TINY_EXPERT, frames=2, height=8, width=8),
        CaseShape(name="smoke", expert=SHORT_A14B, frames=5, height=60, width=104, shards=4),
        CaseShape(name="480p", expert=SHORT_A14B, frames=21, height=60, width=104, shards=4),
        CaseShape(name="720p", expert=SHORT_A14B, frames=21, height=90, width=160, shards=4),
        CaseShape(
            name="480p-40", expert=A14B, frames=21, height=60, width=104, shards=20, one_set=True
        ),
        CaseShape(
            name="720p-40", expert=A14B, frames=21, height=90, width=160, shards=20, one_set=True
        ),
    )
}
