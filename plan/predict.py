"""Prediction by simulating a run under one policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from ..schema import OffloadPolicy
from ..schema.records import Timeline
from .costs import RunCosts
from .memory import staging_slots
from .programs.ram_program import RunPrograms, compile_ram, plan_ram
from .programs.simulator import simulate
from .programs.transfer_program import TransferProgram, compile_program


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Simulated run under one policy."""

    policy: OffloadPolicy
    timeline: Timeline

    @property
    def total_s(self) -> float:
        """Run time in seconds, rounded to milliseconds. Smaller differences count as none."""
        return round(self.timeline.wall_s, 3)

    @property
    def stall_s(self) -> float:
        """Seconds spent waiting for weights on the device."""
        return self.timeline.stall_s

    @cached_property
    def switch_s(self) -> float:
        """Extra stall in seconds after a change of expert, compared with steady steps."""
        steps = self.timeline.steps
        total = 0.0
        for place in range(1, len(steps)):
            if steps[place].expert == steps[place - 1].expert:
                continue
            steady = [
                step.stall_s
                for before, step in pairwise(steps)
                if step.expert == before.expert == steps[place].expert
            ]
            # A stage may consist of one step. Then the other expert's steps are the reference.
            reference = median(
                steady or [step.stall_s for step in steps[1:] if step is not steps[place]] or [0.0]
            )
            total += max(0.0, steps[place].stall_s - reference)
        return total


def compile_programs(
    costs: RunCosts, policy: OffloadPolicy, *, device: TransferProgram | None = None
) -> RunPrograms:
    """Compile the programs for a first run from empty buffers and empty RAM, as the engine does.

    `device` is the device program if it was compiled before. It does not depend on RAM-resident
    blocks.
    """
    blocks = costs.blocks
    residency, sizes = blocks.plan_buffers(policy)
    ram_residency = plan_ram(policy, residency, blocks.counts)
    program = device or compile_program(
        costs.visits, residency, len(sizes.capacities), sizes=sizes if blocks.sizes else None
    )
    staging = staging_slots(blocks, ram_residency.slots, has_bus=costs.has_bus)
    return RunPrograms(device=program, ram=compile_ram(program, ram_residency, staging=staging))


def predict(
    costs: RunCosts, policy: OffloadPolicy, *, programs: RunPrograms | None = None
) -> Prediction:
    """Simulate the run in `costs` under `policy`, regardless of memory.

    `programs` None: compile them.

    Raises:
        ValueError: if the policy swaps more blocks than a stack has.
        ProgramError: if the policy has too few buffers.
    """
    programs = programs or compile_programs(costs, policy)
    return Prediction(
        policy=policy, timeline=simulate(programs.device, costs.hardware, programs.ram)
    )
