"""Wan2.1 and Wan2.2 models: experts, LoRAs, text encoders, image encoder and VAEs.

ComfyUI imports our nodes, and with them this package, at startup. The modules here therefore import
diffusers and transformers inside functions only.
"""

from .experts.engine import ExpertEngine
from .experts.mismatches import (
    GuidedStep,
    expert_mismatches,
    guidance_mismatches,
    is_for_few_steps,
    lora_mismatches,
)
from .experts.open import ARITHMETIC_CHOICES, ExpertsRegistry, open_experts, open_pair
from .experts.pair import ExpertPair
from .experts.storage import STORAGES
from .image_encoder import HEADS, PREFIX, WIDTH, open_image_encoder
from .latents.space import denormalise
from .lora.file import lora_version, open_lora
from .text.encoder import open_text_encoder
from .transformer.block import changed, settings_of
from .transformer.forward import forward_lanes
from .transformer.lane import BlockCache, Lane, SkipDecision
from .transformer.nag import Nag
from .transformer.per_frame_timestep import frame_timesteps
from .transformer.token_parts import Positions, TokenPart
from .vae import open_vae

__all__ = [
    "ARITHMETIC_CHOICES",
    "HEADS",
    "PREFIX",
    "STORAGES",
    "WIDTH",
    "BlockCache",
    "ExpertEngine",
    "ExpertPair",
    "ExpertsRegistry",
    "GuidedStep",
    "Lane",
    "Nag",
    "Positions",
    "SkipDecision",
    "TokenPart",
    "changed",
    "denormalise",
    "expert_mismatches",
    "forward_lanes",
    "frame_timesteps",
    "guidance_mismatches",
    "is_for_few_steps",
    "lora_mismatches",
    "lora_version",
    "open_experts",
    "open_image_encoder",
    "open_lora",
    "open_pair",
    "open_text_encoder",
    "open_vae",
    "settings_of",
]
