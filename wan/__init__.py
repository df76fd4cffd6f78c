"""Wan2.1 and Wan2.2 models: experts, LoRAs, text encoders, image encoder and VAEs.

Names are imported on first use: ComfyUI imports our nodes at its start, which shall not import the model libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.key_names import native_transformer_name
    from .checkpoint.meta_model import NoInitialValues
    from .checkpoint.mismatches import expert_mismatches, lora_mismatches
    from .experts.engine import ExpertEngine
    from .experts.open import ExpertsRegistry, open_experts, open_pair
    from .experts.pair import ExpertPair
    from .experts.storage import STORAGES
    from .image_encoder import HEADS, PREFIX, WIDTH, open_image_encoder
    from .latent_space import SPACES, WAN21, WAN22, LatentSpace, denormalise, normalise, space_of
    from .text.embedding_cache import EmbeddingCache
    from .text.encoder import open_text_encoder
    from .transformer.forward import BlockCache, Lane, SkipDecision, forward_lanes
    from .transformer.kernels import ATTENTIONS
    from .transformer.nag import Nag, attach_nag
    from .transformer.per_frame_timestep import frame_timesteps
    from .transformer.probe import block_pass, probe_block, random_block
    from .vae.memory import GB, HEAP_BYTES, DecodeNeeds, VaeMemoryError, choose_tiling, shared_tiling
    from .vae.tiles import TileBlender, Tiling, TilingError, crop, empty_frames
    from .vae.vae import (
        DecodeOutOfMemoryError,
        WanVae,
        check_latents,
        describe_tiling,
        open_vae,
        retry_with_smaller_tiles,
    )
    from .vae.weights import family_of, native_vae_name, native_wan22_vae_name

_MODULES = {
    "ATTENTIONS": ".transformer.kernels",
    "BlockCache": ".transformer.forward",
    "DecodeNeeds": ".vae.memory",
    "DecodeOutOfMemoryError": ".vae.vae",
    "EmbeddingCache": ".text.embedding_cache",
    "ExpertEngine": ".experts.engine",
    "ExpertPair": ".experts.pair",
    "ExpertsRegistry": ".experts.open",
    "GB": ".vae.memory",
    "HEADS": ".image_encoder",
    "HEAP_BYTES": ".vae.memory",
    "Lane": ".transformer.forward",
    "LatentSpace": ".latent_space",
    "Nag": ".transformer.nag",
    "NoInitialValues": ".checkpoint.meta_model",
    "PREFIX": ".image_encoder",
    "SPACES": ".latent_space",
    "STORAGES": ".experts.storage",
    "SkipDecision": ".transformer.forward",
    "TileBlender": ".vae.tiles",
    "Tiling": ".vae.tiles",
    "TilingError": ".vae.tiles",
    "VaeMemoryError": ".vae.memory",
    "WAN21": ".latent_space",
    "WAN22": ".latent_space",
    "WIDTH": ".image_encoder",
    "WanVae": ".vae.vae",
    "attach_nag": ".transformer.nag",
    "block_pass": ".transformer.probe",
    "check_latents": ".vae.vae",
    "choose_tiling": ".vae.memory",
    "crop": ".vae.tiles",
    "denormalise": ".latent_space",
    "describe_tiling": ".vae.vae",
    "empty_frames": ".vae.tiles",
    "expert_mismatches": ".checkpoint.mismatches",
    "family_of": ".vae.weights",
    "forward_lanes": ".transformer.forward",
    "frame_timesteps": ".transformer.per_frame_timestep",
    "lora_mismatches": ".checkpoint.mismatches",
    "native_transformer_name": ".checkpoint.key_names",
    "native_vae_name": ".vae.weights",
    "native_wan22_vae_name": ".vae.weights",
    "normalise": ".latent_space",
    "open_experts": ".experts.open",
    "open_image_encoder": ".image_encoder",
    "open_pair": ".experts.open",
    "open_text_encoder": ".text.encoder",
    "open_vae": ".vae.vae",
    "probe_block": ".transformer.probe",
    "random_block": ".transformer.probe",
    "retry_with_smaller_tiles": ".vae.vae",
    "shared_tiling": ".vae.memory",
    "space_of": ".latent_space",
}

__all__ = [
    "ATTENTIONS",
    "GB",
    "HEADS",
    "HEAP_BYTES",
    "PREFIX",
    "SPACES",
    "STORAGES",
    "WAN21",
    "WAN22",
    "WIDTH",
    "BlockCache",
    "DecodeNeeds",
    "DecodeOutOfMemoryError",
    "EmbeddingCache",
    "ExpertEngine",
    "ExpertPair",
    "ExpertsRegistry",
    "Lane",
    "LatentSpace",
    "Nag",
    "NoInitialValues",
    "SkipDecision",
    "TileBlender",
    "Tiling",
    "TilingError",
    "VaeMemoryError",
    "WanVae",
    "attach_nag",
    "block_pass",
    "check_latents",
    "choose_tiling",
    "crop",
    "denormalise",
    "describe_tiling",
    "empty_frames",
    "expert_mismatches",
    "family_of",
    "forward_lanes",
    "frame_timesteps",
    "lora_mismatches",
    "native_transformer_name",
    "native_vae_name",
    "native_wan22_vae_name",
    "normalise",
    "open_experts",
    "open_image_encoder",
    "open_pair",
    "open_text_encoder",
    "open_vae",
    "probe_block",
    "random_block",
    "retry_with_smaller_tiles",
    "shared_tiling",
    "space_of",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
