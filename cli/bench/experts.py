"""Experts and inputs of a benchmark over workers: real files, or small random experts."""

from __future__ import annotations

from pathlib import Path

import torch

from ...sampling import DenoiseRequest, seeded_noise
from ...schema import FRAMES_PER_LATENT, PIXELS_PER_LATENT, ExpertsRef, VideoShape
from ...testing import TEXT_DIM, TinyShape, make_expert, save_expert_folder
from ...wan import ExpertPair
from .cases import LayoutTraits

SMALL = TinyShape(layers=8, heads=4, ffn_dim=2048)
TEXT_TOKENS = 512
SEED = 42


def small_experts(folder: Path) -> ExpertsRef:
    """Write two random experts of `SMALL` in bf16, 0.08 GB each, and return their reference."""
    for name, seed in (("high", 1), ("low", 2)):
        save_expert_folder(make_expert(SMALL, seed=seed), folder / name, dtype=torch.bfloat16)
    return ExpertsRef(high_noise=folder / "high", low_noise=folder / "low")


def bench_request(video: VideoShape, *, videos: int, guidance: float, in_channels: int) -> DenoiseRequest:
    """Return a UniPC request with the default boundary, and random noise and texts, which cost as much as real ones."""
    shape = (
        videos,
        16,
        (video.frames - 1) // FRAMES_PER_LATENT + 1,
        video.height // PIXELS_PER_LATENT,
        video.width // PIXELS_PER_LATENT,
    )
    generator = torch.Generator().manual_seed(SEED)
    positive, negative = (torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=generator) for _ in range(2))
    condition = None
    if in_channels > 16:
        condition = torch.randn(1, in_channels - 16, *shape[2:], generator=generator)
    return DenoiseRequest(
        seeded_noise(shape, SEED),
        positive,
        negative=None if guidance == 1 else negative,
        image_condition=condition,
        steps=1,
        solver="unipc",
        guidance=(guidance, guidance),
    )


def layout_traits(pair: ExpertPair, video: VideoShape, *, videos: int, guidance: float) -> LayoutTraits:
    """Return the properties of open experts that layouts depend on."""
    config = pair.high.config
    return LayoutTraits(
        heads=config.num_attention_heads,
        blocks=config.num_layers,
        tokens=video.tokens,
        guided=guidance != 1,
        videos=videos,
    )
