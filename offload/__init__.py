"""Weight streaming for the blocks of any module, independent of models, samplers and ComfyUI."""

from __future__ import annotations

from .engine.engine import OffloadEngine, attach_offload
from .engine.forward_course import ForwardCourse
from .engine.lockstep import Lockstep
from .engine.run import EngineRun
from .formats.decode import CHUNK_VALUES, decode_tensor, decode_work_bytes
from .formats.gguf_header import read_gguf_fields, read_gguf_header
from .formats.layout import BlockFormat, copy_together, flat_layout, host_bytes, piece_name, streamed_names
from .formats.one_pass import unavailable as one_pass_unavailable
from .formats.packing import MXFP8, NVFP4, EightBit, Microscaled, Packing, QuantFormat
from .formats.quantise import FP8, NotFiniteError, quantise_int8, quantise_rotated
from .formats.rotation import is_rotation, kronecker_factors, rotated_sums, rotation_factor, rotation_group
from .formats.safetensors_header import (
    CheckpointFileError,
    FileHeader,
    FileTensor,
    FileVersion,
    file_version,
    read_header,
)
from .host_memory.in_place import LockedTensors
from .host_memory.pages import map_memory
from .host_memory.shared_segment import SharedSegment, sweep
from .patches import BlockPatch
from .probe import BusRates, probe_bus, probe_copy, probe_decode, probe_disk, probe_quantise, wrong_decodings
from .sharding.group import GatherBrokenError, Sharded, StoppedTogether, shard_bytes
from .sharding.probe import probe_gather
from .sources.base import InsufficientRamError
from .sources.file import FileSource, read_scales, read_tensors
from .sources.module import TensorSource
from .sources.quantised import QuantisedSource, quantised_format, quantised_packings
from .sources.stored_file import StoredFile, StoredTensor
from .weight_patch import Hadamard, Kronecker, Product, Rescaled, WeightPatch, patch_work_bytes, write_sum

__all__ = [
    "CHUNK_VALUES",
    "FP8",
    "MXFP8",
    "NVFP4",
    "BlockFormat",
    "BlockPatch",
    "BusRates",
    "CheckpointFileError",
    "EightBit",
    "EngineRun",
    "FileHeader",
    "FileSource",
    "FileTensor",
    "FileVersion",
    "ForwardCourse",
    "GatherBrokenError",
    "Hadamard",
    "InsufficientRamError",
    "Kronecker",
    "LockedTensors",
    "Lockstep",
    "Microscaled",
    "NotFiniteError",
    "OffloadEngine",
    "Packing",
    "Product",
    "QuantFormat",
    "QuantisedSource",
    "Rescaled",
    "Sharded",
    "SharedSegment",
    "StoppedTogether",
    "StoredFile",
    "StoredTensor",
    "TensorSource",
    "WeightPatch",
    "attach_offload",
    "copy_together",
    "decode_tensor",
    "decode_work_bytes",
    "file_version",
    "flat_layout",
    "host_bytes",
    "is_rotation",
    "kronecker_factors",
    "map_memory",
    "one_pass_unavailable",
    "patch_work_bytes",
    "piece_name",
    "probe_bus",
    "probe_copy",
    "probe_decode",
    "probe_disk",
    "probe_gather",
    "probe_quantise",
    "quantise_int8",
    "quantise_rotated",
    "quantised_format",
    "quantised_packings",
    "read_gguf_fields",
    "read_gguf_header",
    "read_header",
    "read_scales",
    "read_tensors",
    "rotated_sums",
    "rotation_factor",
    "rotation_group",
    "shard_bytes",
    "streamed_names",
    "sweep",
    "write_sum",
    "wrong_decodings",
]
