"""One run of one of ComfyUI's samplers through the guider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..metrics import Recorder
from ..plan import ExpertShape, Machine, OffloadJob, OffloadPolicy, Timeline
from ..sampling import Passes, offload_job
from ..sampling.lanes import LaneInputs
from ..sampling.predicted import predicted_calls
from ..sampling.run_policy import RunPolicy
from ..wan import ExpertEngine, ExpertPair
from .announced_run import AnnouncedRun
from .auto_offload import Choice

Choose: TypeAlias = Callable[[OffloadJob], Choice]
"""Asked before each run, for the policy of that run."""

Known: TypeAlias = Callable[[ExpertShape], "Machine | None"]
"""Gives the kept profile of this machine, None where there is none."""

Watch: TypeAlias = Callable[[Sequence[str], "Timeline | None"], AnnouncedRun]
"""Gives what tells of a run whose calls are of these experts, and of which that was foretold."""


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


def foretold(
    pair: ExpertPair,
    policy: OffloadPolicy,
    sigmas: Sequence[float],
    experts: Sequence[str],
    *,
    known: Known,
    engine: ExpertEngine,
    shape: Sequence[int],
    guided: Mapping[str, bool],
) -> Timeline | None:
    """The simulated run of calls at `sigmas`, each of its expert, on latents of `shape`; None on an unknown machine.

    Also None without calls: what a sampler asks for is not always known.
    """
    if not experts:
        return None
    device = engine.device
    job = offload_job(pair, shape, device, experts_of_steps=experts, guided=guided)
    machine = known(job.expert)
    return None if machine is None else predicted_calls(pair, job, sigmas, policy, machine=machine, device=device)
