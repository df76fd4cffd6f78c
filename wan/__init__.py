"""L3: knows Wan."""

from __future__ import annotations

from .checkpoint import Expert
from .expert_engine import ExpertEngine
from .experts import ExpertPair, open_experts
from .forward import Lane, forward_lanes
from .stored import CheckpointError

__all__ = ["CheckpointError", "Expert", "ExpertEngine", "ExpertPair", "Lane", "forward_lanes", "open_experts"]
