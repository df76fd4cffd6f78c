"""Wan checkpoints: file formats, key names, model detection and models on the meta device."""

from .files import ModelVersion, model_version
from .key_names import native_transformer_name
from .markers import header_settings, marker_settings, own_layers
from .meta_model import NoInitialValues
from .model_part import OTHER_MODELS_OF_A_CHECKPOINT, WRAPPERS
from .open import is_merged, open_expert, patch_shape
from .quantise_file import write_int8
from .quantised_layers import UnmarkedLayer, unmarked_layers

__all__ = [
    "OTHER_MODELS_OF_A_CHECKPOINT",
    "WRAPPERS",
    "ModelVersion",
    "NoInitialValues",
    "UnmarkedLayer",
    "header_settings",
    "is_merged",
    "marker_settings",
    "model_version",
    "native_transformer_name",
    "open_expert",
    "own_layers",
    "patch_shape",
    "unmarked_layers",
    "write_int8",
]
