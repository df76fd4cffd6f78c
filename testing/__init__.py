"""Writers of the small test models: real file names and layouts, tiny random weights."""

from __future__ import annotations

from .experts import make_lora, save_expert_file, save_expert_folder, save_lora
from .folder import TinyModelError
from .model import model_names, write_tiny_model
from .number_formats import MixedLayout
from .quantised import Fp8Layout, q4_k_m, save_expert_gguf
from .weights import TEXT_DIM, TinyShape, make_expert

__all__ = [
    "TEXT_DIM",
    "Fp8Layout",
    "MixedLayout",
    "TinyModelError",
    "TinyShape",
    "make_expert",
    "make_lora",
    "model_names",
    "q4_k_m",
    "save_expert_file",
    "save_expert_folder",
    "save_expert_gguf",
    "save_lora",
    "write_tiny_model",
]
