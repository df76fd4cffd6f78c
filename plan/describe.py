"""Words for policies and for the planner's reasons."""

from __future__ import annotations

from itertools import pairwise

from ..schema import OffloadPolicy
from .costs import RunCosts
from .machine import Machine
from .predict import Prediction


def describe_policy(policy: OffloadPolicy, blocks: int) -> str:
    """Describe a policy's device side: `30 of 40 stream, 2 ahead`."""
    if policy.kind == "resident":
        return "both experts resident"
    # A layerwise policy streams all blocks, but has 0 in `blocks_to_swap`.
    streamed = {"layerwise": blocks}.get(policy.kind, policy.blocks_to_swap)
    if not streamed:
        return "one expert resident"
    return f"{streamed} of {blocks} stream, {policy.prefetch_blocks} ahead"


def describe_ram(policy: OffloadPolicy) -> str:
    """Describe where streamed blocks come from: `file`, `12 in RAM` or `all in RAM`."""
    if policy.source == "file":
        return "file"
    if policy.ram_blocks is None:
        return "all in RAM"
    return f"{policy.ram_blocks} in RAM"


def plan_reason(costs: RunCosts, machine: Machine, chosen: Prediction) -> str:
    """Explain why a policy was chosen.

    For example, `32 of 40 blocks stream: 13.1 GB/s needed, the bus delivers 24.6; ...; multiplied
    in bf16`. The last part describes the arithmetic.
    """
    parts = [_streaming(costs, chosen.policy), _reading(machine, chosen)]
    if chosen.policy.chunk_tokens is not None:
        parts.append(f"{costs.at_once}, to fit into memory")
    wall_s = chosen.timeline.wall_s
    parts.append(f"{100 * chosen.timeline.stall_s / wall_s:.1f} % stall predicted")
    if len({step.expert for step in costs.steps}) > 1:
        parts.append(f"switch +{chosen.switch_s:.1f} s")
    parts.append(costs.arithmetic)
    return "; ".join(parts)


def _streaming(costs: RunCosts, policy: OffloadPolicy) -> str:
    if policy.kind == "resident":
        return "both experts are resident on the device"
    residency, _ = costs.blocks.plan_buffers(policy)
    blocks = costs.blocks.blocks
    hardware = costs.hardware
    moved = [each.moved_bytes for each in hardware.fetch_costs(blocks)]
    needed = 0.0
    for expert in {step.expert for step in costs.steps}:
        residents = residency.residents[expert]
        streamed = blocks - len(residents)
        nbytes = sum(each for block, each in enumerate(moved) if block not in residents)
        needed = max(needed, nbytes / (blocks * hardware.visit_s[expert]))
    if not needed:
        return f"all {blocks} blocks of the running expert are resident on the device"
    text = f"{streamed} of {blocks} blocks stream"
    if not costs.has_bus:
        return text
    return (
        f"{text}: {needed / 1e9:.1f} GB/s needed, the bus delivers "
        f"{hardware.bus_bytes_per_s / 1e9:.1f}"
    )


def _reading(machine: Machine, chosen: Prediction) -> str:
    """Compare the disk rate needed in steady steps with the machine's rate."""
    steady = [
        step for before, step in pairwise(chosen.timeline.steps) if before.expert == step.expert
    ]
    # A GPU decodes in parallel with compute. On a CPU decoding adds time, and the disk can read
    # during it.
    between = not machine.has_bus
    needed = max(
        (step.transfers.read_bytes / (step.compute_s + between * step.decode_s) for step in steady),
        default=0.0,
    )
    if not needed:
        return "each block is read from its file once"
    return (
        f"{needed / 1e9:.1f} GB/s needed from files, the disk delivers "
        f"{machine.disk_bytes_per_s / 1e9:.1f}"
    )
