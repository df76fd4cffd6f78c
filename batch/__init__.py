"""Crash-safe, resumable batches of one workflow over any ComfyUI.

They run on servers, or on backends from the caller.
"""

from .backend import (
    BatchBackend,
    Ended,
    JobFailed,
    Lost,
    MadeFile,
    OnProgress,
    Outcome,
    UnderWay,
    Unknown,
    check_classes,
    output_files,
    own_nodes,
)
from .errors import (
    BrokenDeviceError,
    NoSuchFileError,
    RefusedError,
    UnreachableError,
    UnsuitableError,
)
from .folder.disk import is_full_disk
from .opening import OpenBatch, open_batch
from .output_store import OutputStore, release_folder, sha256_of
from .rows.lanes import MAX_LANES
from .rows.rows import read_rows
from .running.failures import MAX_LOSSES
from .running.fleet import run_batch
from .running.stop_request import StopRequest
from .servers.servers import server_spec
from .spec import BatchSpec

__all__ = [
    "MAX_LANES",
    "MAX_LOSSES",
    "BatchBackend",
    "BatchSpec",
    "BrokenDeviceError",
    "Ended",
    "JobFailed",
    "Lost",
    "MadeFile",
    "NoSuchFileError",
    "OnProgress",
    "OpenBatch",
    "Outcome",
    "OutputStore",
    "RefusedError",
    "StopRequest",
    "UnderWay",
    "Unknown",
    "UnreachableError",
    "UnsuitableError",
    "check_classes",
    "is_full_disk",
    "open_batch",
    "output_files",
    "own_nodes",
    "read_rows",
    "release_folder",
    "run_batch",
    "server_spec",
    "sha256_of",
]
