"""Runs on several processes: Ray places workers, torch.distributed carries tensors."""

from .clusters import BUILTIN_CLUSTERS, cluster_named, read_clusters
from .driver.decode import decode_in_shared_tiles, tiles_by_memory
from .driver.driver import Driver
from .driver.rendezvous import format_machines
from .driver.results import DistributedResult
from .driver.stage_run import RestartLimitError
from .driver.worker_group import WorkerFailedError
from .messages import DecodeTask
from .path_map import resolve_path
from .plan.layout import check_layout, choose_layout, describe_layout
from .plan.stages import part_sizes
from .plan.wire import describe_wire, wire_traffic
from .plan.worker_share import worker_share
from .ray.environment import RayMissingError, check_token_file
from .ray.pool import RayPool, RayWorkerHandle
from .ray.services import open_services
from .transport.in_process import InProcessPool
from .transport.pool import Pool, WorkerLostError

__all__ = [
    "BUILTIN_CLUSTERS",
    "DecodeTask",
    "DistributedResult",
    "Driver",
    "InProcessPool",
    "Pool",
    "RayMissingError",
    "RayPool",
    "RayWorkerHandle",
    "RestartLimitError",
    "WorkerFailedError",
    "WorkerLostError",
    "check_layout",
    "check_token_file",
    "choose_layout",
    "cluster_named",
    "decode_in_shared_tiles",
    "describe_layout",
    "describe_wire",
    "format_machines",
    "open_services",
    "part_sizes",
    "read_clusters",
    "resolve_path",
    "tiles_by_memory",
    "wire_traffic",
    "worker_share",
]
