"""Prediction of a run under one policy on one machine, by simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
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

ROTATED_SHARE = 0.4
"""Rate of quantising to int8 ConvRot as a share of that to fp8 (`benchmarks/quantise_while_filling.py`)."""
CHUNK_S = 500e-6
"""Seconds that each further chunk adds to a block: kernel launches, and reading 0.28 GB of weights at about 1 TB/s."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Simulated run of one policy."""

    policy: OffloadPolicy
    timeline: Timeline

    @property
    def total_s(self) -> float:
        """Seconds of the run, rounded to the millisecond: policies that differ by less count as equal."""
        return round(self.timeline.wall_s, 3)

    @cached_property
    def switch_s(self) -> float:
        """Extra stall of the steps after a change of expert, compared with steady steps of that expert, in seconds."""
        steps = self.timeline.steps
        total = 0.0
        for place in range(1, len(steps)):
            if steps[place].expert == steps[place - 1].expert:
                continue
            steady = [
                step.stall_s for before, step in pairwise(steps) if step.expert == before.expert == steps[place].expert
            ]
            # A stage may consist of one step; then steps of the other expert are the reference.
            reference = median(steady or [step.stall_s for step in steps[1:] if step is not steps[place]] or [0.0])
            total += max(0.0, steps[place].stall_s - reference)
        return total


def compile_programs(
    job: OffloadJob, machine: Machine, policy: OffloadPolicy, *, device: TransferProgram | None = None
) -> RunPrograms:
    """Compile the programs of a first run, from empty buffers and empty RAM, as the engine does.

    `device` is the device program if it was compiled before; it does not depend on the RAM-resident blocks.
    """
    residency, buffers = plan_residency(policy, job.block_counts)
    ram_residency = plan_ram(policy, residency, job.block_counts)
    program = device or compile_program(job.visits, residency, buffers)
    staging = staging_slots(job, machine, ram_residency)
    return RunPrograms(device=program, ram=compile_ram(program, ram_residency, staging=staging))


def hardware_of(job: OffloadJob, machine: Machine, chunk_tokens: int | None) -> Hardware:
    """Return the rates of `machine` for the blocks of `job`."""
    on_gpu = machine.computes_on == "cuda"
    bus = machine.h2d_bytes_per_s if on_gpu else machine.copy_bytes_per_s
    assert bus is not None  # a Machine that computes on cuda has it
    return Hardware(
        bus_bytes_per_s=bus,
        block_bytes=job.stored_bytes,
        visit_s={expert: visit_seconds(job, machine, expert, chunk_tokens) for expert in job.lanes},
        disk_bytes_per_s=job.file_bytes / read_seconds(job, machine),
        file_bytes=job.file_bytes,
        decode_s=job.computed_bytes / machine.decode_bytes_per_s if job.decodes else 0.0,
        decode_computes=job.decodes and not on_gpu,
    )


def visit_seconds(job: OffloadJob, machine: Machine, expert: str, chunk_tokens: int | None) -> float:
    """Return the seconds that all lanes spend in one block."""
    return _lanes_seconds(job, machine, job.lane_tokens(expert), chunk_tokens)


def _lanes_seconds(job: OffloadJob, machine: Machine, lane_tokens: Sequence[int], chunk_tokens: int | None) -> float:
    seconds = equivalent_flops(job, machine, lane_tokens) / machine.flops_per_s
    if chunk_tokens is not None:
        # Every chunk but the first reads the feed-forward weights from device memory again.
        seconds += sum(math.ceil(tokens / chunk_tokens) - 1 for tokens in lane_tokens) * CHUNK_S
    return seconds


def equivalent_flops(job: OffloadJob, machine: Machine, lane_tokens: Sequence[int]) -> float:
    """Return the operations in the compute dtype that take as long as those of one block for lanes of these tokens.

    Linear layers in another format count as fewer; attention counts in full.
    """
    speedup = machine.linear_speedup(job.linear_format)
    return sum(
        count * (job.expert.linear_flops(tokens) / speedup + job.expert.attention_flops(tokens))
        for tokens, count in Counter(lane_tokens).items()
    )


def limit_seconds(job: OffloadJob, machine: Machine, lane_tokens: Sequence[int]) -> float | None:
    """Return the seconds that products and attention of one block take alone for lanes of these tokens.

    None if the machine was not measured so, or not in the format of the linear layers.
    """
    products = machine.product_flops_per_s.get(job.linear_format)
    if products is None or machine.attention_flops_per_s is None:
        return None
    linear, attention = (
        sum(map(flops, lane_tokens)) for flops in (job.expert.linear_flops, job.expert.attention_flops)
    )
    return linear / products + attention / machine.attention_flops_per_s


def read_seconds(job: OffloadJob, machine: Machine) -> float:
    """Return the seconds to read one block from its file into RAM; quantising runs in parallel with reading."""
    read_s = job.file_bytes / machine.disk_bytes_per_s
    if not job.quantises:
        return read_s
    share = ROTATED_SHARE if job.quantised_to == "int8 ConvRot" else 1.0
    return max(read_s, job.file_bytes / (share * machine.quantise_bytes_per_s))


def predict(
    job: OffloadJob,
    machine: Machine,
    policy: OffloadPolicy,
    *,
    programs: RunPrograms | None = None,
    by_step: bool = False,
) -> Prediction:
    """Simulate the run of `job` on `machine` under `policy`, regardless of memory.

    Args:
        job: the run.
        machine: memory and rates.
        policy: offload policy of the run.
        programs: compiled programs of the run; None: compile them.
        by_step: use the lanes of each step from `job.lanes_of_steps`, instead of the maximum of its expert.

    Raises:
        ValueError: if the policy swaps more blocks than an expert has.
        ProgramError: if the policy has too few buffers.
    """
    programs = programs or compile_programs(job, machine, policy)
    hardware = hardware_of(job, machine, policy.chunk_tokens)
    if by_step:
        visit_s = {
            number: _lanes_seconds(job, machine, job.lane_tokens_of_step(number), policy.chunk_tokens)
            for number in range(len(job.lanes_of_steps))
        }
        hardware = replace(hardware, step_visit_s=visit_s)
    return Prediction(policy=policy, timeline=simulate(programs.device, hardware, programs.ram))
