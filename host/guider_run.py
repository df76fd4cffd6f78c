"""One run of one of ComfyUI's samplers through the guider."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..metrics import Recorder
from ..sampling import Passes
from ..sampling.lanes import LaneInputs
from ..sampling.run_policy import RunPolicy
from ..wan import ExpertEngine
from .announced_run import AnnouncedRun


@dataclass(frozen=True, kw_only=True, eq=False)
class GuiderRun:
    """What a run needs in each call of the model, and what it tells at its end."""

    inputs: LaneInputs
    passes: Passes
    engine: ExpertEngine
    outer_bytes: int
    """That the engine had read before the run."""
    policy: RunPolicy
    recorder: Recorder
    watched: AnnouncedRun
    shape: torch.Size
    sampler: str
    """Its name."""
