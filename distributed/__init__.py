"""Runs on several processes: Ray places workers, torch.distributed carries tensors."""

from __future__ import annotations

from .driver.decode import decode_in_shared_tiles, tiles_by_memory
from .driver.driver import Driver
from .driver.local_stages import StepFunction, StepProcess, run_stages
from .driver.rendezvous import format_machines
from .driver.results import DistributedResult
from .driver.stage_run import RestartLimitError
from .driver.worker_group import WorkerFailedError
from .messages import DecodeTask
from .ray.environment import RayMissingError, check_token_file
from .ray.pool import RayPool, RayWorkerHandle
from .ray.services import open_services
from .transport.in_process import InProcessPool
from .transport.path_map import MissingPathError, resolve_path
from .transport.pool import Pool, WorkerLostError

__all__ = [
    "DecodeTask",
    "DistributedResult",
    "Driver",
    "InProcessPool",
    "MissingPathError",
    "Pool",
    "RayMissingError",
    "RayPool",
    "RayWorkerHandle",
    "RestartLimitError",
    "StepFunction",
    "StepProcess",
    "WorkerFailedError",
    "WorkerLostError",
    "check_token_file",
    "decode_in_shared_tiles",
    "format_machines",
    "open_services",
    "resolve_path",
    "run_stages",
    "tiles_by_memory",
]
