"""Writers for the small test models: real file names and layouts, tiny random weights."""

from .experts import make_lora, save_expert_file, save_expert_folder, save_lora
from .folder import TinyModelError
from .model import model_names, write_tiny_model
from .quantised import q4_k_m, save_expert_gguf, scaled_fp8
from .weights import TEXT_DIM, TinyShape, make_expert

__all__ = [
    "TEXT_DIM",
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
    "scaled_fp8",
    "write_tiny_model",
]
