"""WanStream's own prediction of a run, from the machine as it was measured before."""

from __future__ import annotations

import json
from pathlib import Path

from wanstream.plan import Machine, OffloadJob, Timeline, simulate, step_visits
from wanstream.plan.predict import hardware_of
from wanstream.wan import ExpertEngine

from .shapes import CaseShape

LANES = 2


def predicted_timeline(machine: Path, engine: ExpertEngine, case: CaseShape) -> Timeline:
    """Simulate the programs that `engine` is about to run for the case, on the machine of that file."""
    experts = case.request().course().experts
    programs = engine.programs(step_visits(experts, engine.block_counts))
    block_bytes = case.widths.streamed_bytes()
    job = OffloadJob(
        expert=case.widths,
        tokens=case.tokens,
        lanes=dict.fromkeys(engine.block_counts, LANES),
        experts_of_steps=experts,
        stored_bytes=block_bytes,
        file_bytes=block_bytes,
        computed_bytes=block_bytes,
        staying_bytes=0,
    )
    figures = Machine.from_dict(json.loads(machine.read_text(encoding="utf-8")))
    return simulate(programs.device, hardware_of(job, figures, None), programs.ram)
