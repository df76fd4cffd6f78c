"""Shapes of Wan runs, and run costs for the planner. Standard library only."""

from .block_times import ArithmeticChoice, BlockTimes, block_rates, choose_arithmetic
from .context_windows import BLENDS, ContextWindows, Windows
from .expert import (
    BF16_BYTES,
    FEWEST_INT8_TOKENS,
    FP32_BYTES,
    HEAD_DIM,
    IMAGE_TOKENS,
    OUTPUT_TOKENS,
    SHORT_CHUNK,
    T2V_A14B,
    TEXT_TOKENS,
    TI2V_5B,
    ExpertShape,
    KernelNeeds,
    piece_tokens,
)
from .latent_grid import (
    FRAMES_PER_LATENT,
    PATCH,
    PIXELS_PER_LATENT,
    WAN22_PIXELS_PER_LATENT,
    VideoShape,
    patch_grid,
)
from .run import CHUNKS, RunShape, StepShape, chunks_below

__all__ = [
    "BF16_BYTES",
    "BLENDS",
    "CHUNKS",
    "FEWEST_INT8_TOKENS",
    "FP32_BYTES",
    "FRAMES_PER_LATENT",
    "HEAD_DIM",
    "IMAGE_TOKENS",
    "OUTPUT_TOKENS",
    "PATCH",
    "PIXELS_PER_LATENT",
    "SHORT_CHUNK",
    "T2V_A14B",
    "TEXT_TOKENS",
    "TI2V_5B",
    "WAN22_PIXELS_PER_LATENT",
    "ArithmeticChoice",
    "BlockTimes",
    "ContextWindows",
    "ExpertShape",
    "KernelNeeds",
    "RunShape",
    "StepShape",
    "VideoShape",
    "Windows",
    "block_rates",
    "choose_arithmetic",
    "chunks_below",
    "patch_grid",
    "piece_tokens",
]
