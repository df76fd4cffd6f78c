"""Values that cross packages: policies, timelines, references to models and workers.

Standard library only.
"""

from .addresses import LOOPBACK, is_loopback
from .errors import Cancelled, StateError
from .mesh import Mesh, MeshError, lanes_of_rank, largest_share
from .policy import (
    SMALLEST_BLOCK,
    SMALLEST_LAYER,
    OffloadPolicy,
    PolicyKind,
    Residency,
    SourceKind,
    plan_residency,
    spread_evenly,
)
from .step_strengths import LARGEST_STRENGTH, StepRange, StepStrengths, parse_step_strengths
from .version import VERSION

__all__ = [
    "LARGEST_STRENGTH",
    "LOOPBACK",
    "SMALLEST_BLOCK",
    "SMALLEST_LAYER",
    "VERSION",
    "Cancelled",
    "Mesh",
    "MeshError",
    "OffloadPolicy",
    "PolicyKind",
    "Residency",
    "SourceKind",
    "StateError",
    "StepRange",
    "StepStrengths",
    "is_loopback",
    "lanes_of_rank",
    "largest_share",
    "parse_step_strengths",
    "plan_residency",
    "spread_evenly",
]
