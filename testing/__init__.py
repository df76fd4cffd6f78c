"""Writers of the small test models: real file names and layouts, tiny random weights."""

from __future__ import annotations

from .experts import save_expert_folder
from .folder import TinyModelError
from .model import write_tiny_model
from .weights import TEXT_DIM, TinyShape, make_expert

__all__ = [
    "TEXT_DIM",
    "TinyModelError",
    "TinyShape",
    "make_expert",
    "save_expert_folder",
    "write_tiny_model",
]
