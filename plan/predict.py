"""What one policy costs on one machine, by simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median

from ..schema import OffloadPolicy, Timeline, plan_residency
from .machine import Machine
from .memory import staging_slots
from .offload_job import OffloadJob
from .ram_program import RunPrograms, compile_ram, plan_ram
from .simulator import Hardware, simulate
from .transfer_program import TransferProgram, compile_program

CHUNK_S = 500e-6
"""What one more chunk adds to a block: its launches, and 0.28 GB of feed-forward weights read at some 1 TB/s."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The simulated run of one policy."""

    policy: OffloadPolicy
    timeline: Timeline

    @property
    def total_s(self) -> float:
        """Seconds of the run, to the millisecond: what is nearer than that is the same."""
        return round(self.timeline.wall_s, 3)

    @cached_property
    def switch_s(self) -> float:
        """Seconds by which steps after a change of expert wait longer than a usual step of theirs."""
        steps = self.timeline.steps
        total = 0.0
        for place in range(1, len(steps)):
            if steps[place].expert == steps[place - 1].expert:
                continue
            settled = [
                step.stall_s for before, step in pairwise(steps) if step.expert == before.expert == steps[place].expert
            ]
            # The last stage may have one step only: then what a usual step of the other expert waits is the measure.
            usual = median(settled or [step.stall_s for step in steps[1:] if step is not steps[place]] or [0.0])
            total += max(0.0, steps[place].stall_s - usual)
        return total


def compile_programs(
    job: OffloadJob, machine: Machine, policy: OffloadPolicy, *, device: TransferProgram | None = None
) -> RunPrograms:
    """The programs of a first run, from empty buffers and empty RAM, as the engine makes them.

    `device` is the device program where it is there already: it does not depend on homes in RAM.
    """
    residency, buffers = plan_residency(policy, job.block_counts)
    homes = plan_ram(policy, residency, job.block_counts)
    program = device or compile_program(job.visits, residency, buffers)
    return RunPrograms(device=program, ram=compile_ram(program, homes, staging=staging_slots(job, machine, homes)))


def hardware_of(job: OffloadJob, machine: Machine, chunk_tokens: int | None) -> Hardware:
    """The rates of `machine` for the blocks of `job`."""
    on_gpu = machine.computes_on == "cuda"
    bus = machine.h2d_bytes_per_s if on_gpu else machine.copy_bytes_per_s
    assert bus is not None  # a Machine that computes on cuda has it
    decode_s = job.computed_bytes / machine.decode_bytes_per_s if job.decodes else 0.0
    return Hardware(
        bus_bytes_per_s=bus,
        block_bytes=dict.fromkeys(job.lanes, job.stored_bytes),
        visit_s={expert: visit_seconds(job, machine, expert, chunk_tokens) for expert in job.lanes},
        disk_bytes_per_s=job.file_bytes / read_seconds(job, machine),
        file_bytes=dict.fromkeys(job.lanes, job.file_bytes),
        decode_s=dict.fromkeys(job.lanes, decode_s),
        decode_computes=job.decodes and not on_gpu,
    )


def step_seconds(job: OffloadJob, hardware: Hardware) -> dict[int, float]:
    """What `Hardware.step_visit_s` is to be for the lanes of each step of `job`."""
    lane_s = {expert: seconds / job.lanes[expert] for expert, seconds in hardware.visit_s.items()}
    steps = zip(job.lanes_of_steps, job.experts_of_steps, strict=False)
    return {number: lanes * lane_s[expert] for number, (lanes, expert) in enumerate(steps)}


def visit_seconds(job: OffloadJob, machine: Machine, expert: str, chunk_tokens: int | None) -> float:
    """All lanes in one block. Every chunk but the first reads the feed-forward weights from device memory again."""
    lane_s = job.expert.block_flops(job.tokens) / machine.flops_per_s
    if chunk_tokens is not None:
        lane_s += (math.ceil(job.tokens / chunk_tokens) - 1) * CHUNK_S
    return job.lanes[expert] * lane_s


def read_seconds(job: OffloadJob, machine: Machine) -> float:
    """One block from its file into RAM; threads that quantise read the next rows meanwhile."""
    read_s = job.file_bytes / machine.disk_bytes_per_s
    return max(read_s, job.file_bytes / machine.quantise_bytes_per_s) if job.quantises else read_s


def predict(
    job: OffloadJob,
    machine: Machine,
    policy: OffloadPolicy,
    *,
    programs: RunPrograms | None = None,
    by_step: bool = False,
) -> Prediction:
    """Simulate the run of `job` on `machine` under `policy`, whether it fits or not, from the `programs` of it.

    `by_step`: with the lanes that each step has, where the job tells them, and not with the most of its expert.

    Raises ValueError when the policy does not fit the blocks, ProgramError when it has too few buffers.
    """
    programs = programs or compile_programs(job, machine, policy)
    hardware = hardware_of(job, machine, policy.chunk_tokens)
    if by_step:
        hardware = replace(hardware, step_visit_s=step_seconds(job, hardware))
    return Prediction(policy=policy, timeline=simulate(programs.device, hardware, programs.ram))
