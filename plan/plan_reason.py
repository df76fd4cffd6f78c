"""Why a plan was chosen, in words with numbers."""

from __future__ import annotations

from itertools import pairwise

from .machine import Machine
from .offload_job import OffloadJob
from .predict import Prediction, visit_seconds
from .residency import OffloadPolicy, plan_residency


def plan_reason(job: OffloadJob, machine: Machine, chosen: Prediction) -> str:
    """`32 of 40 blocks stream: 13.1 GB/s needed, the bus gives 24.6; ...; 0.3 % stall predicted; switch +0.0 s`."""
    parts = [_streaming(job, machine, chosen.policy), _reading(machine, chosen)]
    if chosen.policy.chunk_tokens is not None:
        parts.append(f"{chosen.policy.chunk_tokens} of {job.tokens} tokens at once, so that it fits")
    wall_s = chosen.timeline.wall_s
    parts.append(f"{100 * chosen.timeline.stall_s / wall_s:.1f} % stall predicted")
    if len(set(job.experts_of_steps)) > 1:
        parts.append(f"switch +{chosen.switch_s:.1f} s")
    return "; ".join(parts)


def policy_words(policy: OffloadPolicy, blocks: int) -> str:
    """`30 of 40 stream, 2 ahead` and the like: what a policy does on the device."""
    if policy.kind == "resident":
        return "both experts stay"
    streamed = blocks if policy.kind == "layerwise" else policy.blocks_to_swap
    return f"{streamed} of {blocks} stream, {policy.prefetch_blocks} ahead" if streamed else "one expert stays"


def ram_words(policy: OffloadPolicy) -> str:
    """Where what streams comes from."""
    if policy.source == "file":
        return "file"
    if policy.ram_blocks is None:
        return "all in RAM"
    return f"{policy.ram_blocks} in RAM"


def _streaming(job: OffloadJob, machine: Machine, policy: OffloadPolicy) -> str:
    if policy.kind == "resident":
        return "both experts stay on the device"
    residency, _ = plan_residency(policy, job.block_counts)
    blocks = job.expert.blocks
    needed, rate = 0.0, machine.h2d_bytes_per_s
    for expert in set(job.experts_of_steps):
        streamed = blocks - len(residency.residents[expert])
        needed = max(needed, streamed * job.stored_bytes / (blocks * _visit_s(job, machine, expert, policy)))
    if not needed:
        return f"all {blocks} blocks of the expert that runs stay on the device"
    text = f"{streamed} of {blocks} blocks stream"
    return text if rate is None else f"{text}: {needed / 1e9:.1f} GB/s needed, the bus gives {rate / 1e9:.1f}"


def _reading(machine: Machine, chosen: Prediction) -> str:
    """What the files must give in usual steps."""
    usual = [step for before, step in pairwise(chosen.timeline.steps) if before.expert == step.expert]
    # A GPU decodes beside its computing, a CPU between.
    decodes_between = machine.computes_on == "cpu"
    needed = max((s.read_bytes / (s.compute_s + (s.decode_s if decodes_between else 0)) for s in usual), default=0.0)
    if not needed:
        return "each block is read from its file once"
    return f"{needed / 1e9:.1f} GB/s needed from files, the disk gives {machine.disk_bytes_per_s / 1e9:.1f}"


def _visit_s(job: OffloadJob, machine: Machine, expert: str, policy: OffloadPolicy) -> float:
    return visit_seconds(job, machine, expert, policy.chunk_tokens)
