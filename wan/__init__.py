"""Wan2.1 and Wan2.2 models: experts, LoRAs, text encoders, image encoder and VAEs.

ComfyUI imports our nodes, and with them this package, at its start: its modules import diffusers and transformers
inside functions only, and `experts/embedders.py`, which needs diffusers, is imported there too.
"""

from __future__ import annotations

from .checkpoint.files import ModelVersion, model_version
from .checkpoint.key_names import native_transformer_name
from .checkpoint.markers import header_settings, marker_settings, own_layers
from .checkpoint.meta_model import NoInitialValues
from .checkpoint.mismatches import GuidedStep, expert_mismatches, guidance_mismatches, is_for_few_steps, lora_mismatches
from .checkpoint.model_part import OTHER_MODELS_OF_A_CHECKPOINT, WRAPPERS
from .checkpoint.open import is_merged, open_expert, patch_shape
from .checkpoint.quantise_file import write_int8
from .checkpoint.quantised_layers import UnmarkedLayer, unmarked_layers
from .experts.engine import ExpertEngine
from .experts.open import (
    ARITHMETIC_CHOICES,
    ExpertsRegistry,
    arithmetic_of,
    open_experts,
    open_pair,
)
from .experts.pair import ExpertPair
from .experts.storage import STORAGES
from .image_encoder import HEADS, PREFIX, WIDTH, open_image_encoder
from .kernels.attention import ATTENTIONS, INT8_ATTENTION
from .kernels.multiplication import choose_multiplication, multiplied_formats
from .latent_file import LatentFileError, read_latent, write_latent
from .latent_space import SPACES, WAN21, WAN22, LatentSpace, denormalise, normalise, space_of
from .lora.file import lora_version, open_lora
from .measurement.arithmetic import measured_arithmetic, with_resolved_precision
from .measurement.meter import METERED_TOKENS, measure_block, quick_case
from .measurement.probe import BlockVariant, block_pass, probe_block, random_block
from .text.embedding_cache import EmbeddingCache
from .text.encoder import encoder_version, open_text_encoder
from .text.sentence_model import Piece, sentence_model
from .transformer.block import BlockSettings, changed, settings_of
from .transformer.forward import BlockCache, Lane, SkipDecision, forward_lanes
from .transformer.nag import Nag
from .transformer.per_frame_timestep import frame_timesteps
from .transformer.token_parts import Positions, TokenPart
from .vae.memory import GB, HEAP_BYTES, DecodeNeeds, VaeMemoryError, choose_tiling, shared_tiling
from .vae.tiles import TileBlender, Tiling, TilingError, crop, empty_frames
from .vae.tiny import BY_FILE_NAME, LATENT_SCALES, RAW, TinyDecoder, TinyVaeConfig, TinyVaeError
from .vae.vae import (
    VAE_DTYPES,
    DecodeOutOfMemoryError,
    WanVae,
    check_latents,
    describe_tiling,
    open_tiny_vae,
    open_vae,
    retry_with_smaller_tiles,
)
from .vae.weights import family_of

__all__ = [
    "ARITHMETIC_CHOICES",
    "ATTENTIONS",
    "BY_FILE_NAME",
    "GB",
    "HEADS",
    "HEAP_BYTES",
    "INT8_ATTENTION",
    "LATENT_SCALES",
    "METERED_TOKENS",
    "OTHER_MODELS_OF_A_CHECKPOINT",
    "PREFIX",
    "RAW",
    "SPACES",
    "STORAGES",
    "VAE_DTYPES",
    "WAN21",
    "WAN22",
    "WIDTH",
    "WRAPPERS",
    "BlockCache",
    "BlockSettings",
    "BlockVariant",
    "DecodeNeeds",
    "DecodeOutOfMemoryError",
    "EmbeddingCache",
    "ExpertEngine",
    "ExpertPair",
    "ExpertsRegistry",
    "GuidedStep",
    "Lane",
    "LatentFileError",
    "LatentSpace",
    "ModelVersion",
    "Nag",
    "NoInitialValues",
    "Piece",
    "Positions",
    "SkipDecision",
    "TileBlender",
    "Tiling",
    "TilingError",
    "TinyDecoder",
    "TinyVaeConfig",
    "TinyVaeError",
    "TokenPart",
    "UnmarkedLayer",
    "VaeMemoryError",
    "WanVae",
    "arithmetic_of",
    "block_pass",
    "changed",
    "check_latents",
    "choose_multiplication",
    "choose_tiling",
    "crop",
    "denormalise",
    "describe_tiling",
    "empty_frames",
    "encoder_version",
    "expert_mismatches",
    "family_of",
    "forward_lanes",
    "frame_timesteps",
    "guidance_mismatches",
    "header_settings",
    "is_for_few_steps",
    "is_merged",
    "lora_mismatches",
    "lora_version",
    "marker_settings",
    "measure_block",
    "measured_arithmetic",
    "model_version",
    "multiplied_formats",
    "native_transformer_name",
    "normalise",
    "open_expert",
    "open_experts",
    "open_image_encoder",
    "open_lora",
    "open_pair",
    "open_text_encoder",
    "open_tiny_vae",
    "open_vae",
    "own_layers",
    "patch_shape",
    "probe_block",
    "quick_case",
    "random_block",
    "read_latent",
    "retry_with_smaller_tiles",
    "sentence_model",
    "settings_of",
    "shared_tiling",
    "space_of",
    "unmarked_layers",
    "with_resolved_precision",
    "write_int8",
    "write_latent",
]
