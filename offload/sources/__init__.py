"""Weight sources: checkpoint files, modules, and weights quantised while they are read."""

from .base import BlockSource, InsufficientRamError
from .file import FileSource, read_scales, read_tensors
from .joined import joined_source
from .module import TensorSource
from .quantised import QuantisedSource, quantised_format, quantised_packings
from .stored_file import StoredFile, StoredTensor

__all__ = [
    "BlockSource",
    "FileSource",
    "InsufficientRamError",
    "QuantisedSource",
    "StoredFile",
    "StoredTensor",
    "TensorSource",
    "joined_source",
    "quantised_format",
    "quantised_packings",
    "read_scales",
    "read_tensors",
]
