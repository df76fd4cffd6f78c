"""Writers of the small test models: real file names and layouts, tiny random weights."""

from __future__ import annotations

from .experts import save_expert_folder
from .folder import SampleModelError
from .model import write_sample_model
from .weights import TEXT_DIM, ExpertShape, make_expert

__all__ = [
    "TEXT_DIM",
    "ExpertShape",
    "SampleModelError",
    "make_expert",
    "save_expert_folder",
    "write_sample_model",
]
