"""Storage formats: safetensors, GGUF, fp8, and block layouts in memory."""

from .decode import FP8_DTYPES, decode_tensor, decode_work_bytes
from .gguf_header import read_gguf_fields, read_gguf_header
from .layout import BlockFormat, copy_together, piece_name, pieces_by_parameter, streamed_names
from .one_pass import unavailable as one_pass_unavailable
from .packing import MXFP8, NVFP4, EightBit, Microscaled, Packing, QuantFormat
from .quantise import FP8, NotFiniteError, quantise_int8, quantise_rotated
from .rotation import is_rotation, kronecker_factors, rotated_sums, rotation_factor
from .safetensors_header import (
    CheckpointFileError,
    FileHeader,
    FileTensor,
    FileVersion,
    read_header,
)

__all__ = [
    "FP8",
    "FP8_DTYPES",
    "MXFP8",
    "NVFP4",
    "BlockFormat",
    "CheckpointFileError",
    "EightBit",
    "FileHeader",
    "FileTensor",
    "FileVersion",
    "Microscaled",
    "NotFiniteError",
    "Packing",
    "QuantFormat",
    "copy_together",
    "decode_tensor",
    "decode_work_bytes",
    "is_rotation",
    "kronecker_factors",
    "one_pass_unavailable",
    "piece_name",
    "pieces_by_parameter",
    "quantise_int8",
    "quantise_rotated",
    "read_gguf_fields",
    "read_gguf_header",
    "read_header",
    "rotated_sums",
    "rotation_factor",
    "streamed_names",
]
