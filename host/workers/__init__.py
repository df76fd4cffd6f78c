"""Host workers: the user's clusters, the running workers, and the plan for a run."""

from .clusters import cluster, cluster_names
from .plan import SharedRun, wire_notes
from .registry import StartPool, check_ray, gpus_of, start_pool

__all__ = [
    "SharedRun",
    "StartPool",
    "check_ray",
    "cluster",
    "cluster_names",
    "gpus_of",
    "start_pool",
    "wire_notes",
]
