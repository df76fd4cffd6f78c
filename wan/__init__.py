"""L3: knows Wan."""

from __future__ import annotations

from .checkpoint import Expert
from .compute_dtype import auto_dtype
from .expert_engine import ExpertEngine
from .experts import ExpertPair, open_experts, open_one_expert
from .forward import Lane, forward_lanes
from .latent_space import denormalise, normalise
from .lora import LoraFile, open_lora
from .nag import Nag, held_against
from .stored import CheckpointError
from .text_encoder import TextEncoder, open_text_encoder
from .vae import WanVae, open_vae

__all__ = [
    "CheckpointError",
    "Expert",
    "ExpertEngine",
    "ExpertPair",
    "Lane",
    "LoraFile",
    "Nag",
    "TextEncoder",
    "WanVae",
    "auto_dtype",
    "denormalise",
    "forward_lanes",
    "held_against",
    "normalise",
    "open_experts",
    "open_lora",
    "open_one_expert",
    "open_text_encoder",
    "open_vae",
]
