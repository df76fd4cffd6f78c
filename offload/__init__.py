"""L2: moves weights. Knows no Wan, no sampler, no ComfyUI."""

from __future__ import annotations

from .attach import attach_offload
from .engine import OffloadEngine
from .engine_run import EngineRun
from .file_source import FileSource, read_tensors
from .layout import BlockFormat, FlatLayout, FlatTensor, allocate_flat, flat_layout, streamed_names, tensor_views
from .module_source import ModuleSource
from .patches import BlockPatch, WeightPatch
from .safetensors_header import CheckpointFileError, FileHeader, FileTensor, read_header
from .source import BlockSource, NoRamError, SourceError

__all__ = [
    "BlockFormat",
    "BlockPatch",
    "BlockSource",
    "CheckpointFileError",
    "EngineRun",
    "FileHeader",
    "FileSource",
    "FileTensor",
    "FlatLayout",
    "FlatTensor",
    "ModuleSource",
    "NoRamError",
    "OffloadEngine",
    "SourceError",
    "WeightPatch",
    "allocate_flat",
    "attach_offload",
    "flat_layout",
    "read_header",
    "read_tensors",
    "streamed_names",
    "tensor_views",
]
