"""What is run: the size of the two experts, the video, the steps. Inputs follow from a shape alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wanstream import schema
from wanstream.sampling import DenoiseRequest
from wanstream.testing.weights import HEAD_DIM, TEXT_DIM, TinyShape

INPUT_SEED = 7
LATENT_CHANNELS = 16
PATCH = 2  # latent rows and columns that make one token


@dataclass(frozen=True, kw_only=True)
class CaseShape:
    """One case. Weights and inputs are random and the same in every process."""

    name: str
    expert: TinyShape
    frames: int
    """Of the latent, as height and width are."""
    height: int
    width: int
    steps: int = 4
    switch_step: int = 2
    guidance: tuple[float, float] = (4.0, 3.0)
    """Of the high and the low expert; not 1, so that every step computes two lanes."""
    text_tokens: int = 512
    shards: int = 3
    """Files that each expert is stored in."""
    one_set: bool = False
    """Whether both experts are the same files, so that they fit on a small disk."""

    @property
    def tokens(self) -> int:
        return self.frames * (self.height // PATCH) * (self.width // PATCH)

    @property
    def widths(self) -> schema.ExpertShape:
        """The expert as the planner knows it."""
        expert = self.expert
        return schema.ExpertShape(width=expert.heads * HEAD_DIM, ffn_width=expert.ffn_dim, blocks=expert.layers)

    @property
    def expert_bytes(self) -> int:
        """One expert as it is stored."""
        return 2 * self.widths.parameters

    @property
    def streamed_bytes(self) -> int:
        """What a layerwise step has to move: the matrices of all blocks of one expert."""
        return self.widths.blocks * self.widths.streamed_bytes()

    @property
    def key(self) -> str:
        """Names the weights: cases with the same experts share their files."""
        return f"{self.expert.layers}x{self.expert.heads}x{self.expert.ffn_dim}x{self.shards}"

    def request(self) -> DenoiseRequest:
        """Noise, both texts and the schedule, by seed."""
        generator = torch.Generator().manual_seed(INPUT_SEED)
        noise = torch.randn(1, LATENT_CHANNELS, self.frames, self.height, self.width, generator=generator)
        positive, negative = torch.randn(2, 1, self.text_tokens, TEXT_DIM, generator=generator).bfloat16().unbind(0)
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
        CaseShape(name="480p-40", expert=A14B, frames=21, height=60, width=104, shards=20, one_set=True),
        CaseShape(name="720p-40", expert=A14B, frames=21, height=90, width=160, shards=20, one_set=True),
    )
}
