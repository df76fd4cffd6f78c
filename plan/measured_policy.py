"""Offload policy of a model of unknown shape, chosen from what its first model call has measured.

A model call is one or more passes over the blocks, one for each condition that is computed by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..schema import OffloadPolicy, StepRecord, Timeline, plan_residency
from .candidates import device_policies, with_ram_blocks
from .memory import STAGING_SLOTS
from .ram_program import compile_ram, plan_ram
from .simulator import Hardware, simulate
from .transfer_program import compile_program
from .visits import step_visits

WORTH = 0.05
"""Share of the time that a policy must save to replace another: predictions are not more accurate than this."""

PASSES = 3
"""Passes that are simulated: after the second one, each takes as long as the one before."""


@dataclass(frozen=True, kw_only=True)
class MeasuredBlocks:
    """Blocks of one stack and the rates at which a model call has used them.

    Raises ValueError for sizes that are not above 0.
    """

    stack: str
    blocks: int
    stored_bytes: int
    """Bytes of the largest block in RAM and in its file."""
    buffer_bytes: int
    outside_bytes: int
    """Bytes on the device that do not stream."""
    decodes: bool
    """True if blocks are decoded on arrival."""
    decoding_bytes: int = 0
    """Bytes on the device for that."""
    has_bus: bool
    """True for a device with memory of its own; False for a CPU."""

    def __post_init__(self) -> None:
        for name in ("blocks", "stored_bytes", "buffer_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be 1 or more")

    def device_bytes(self, policy: OffloadPolicy) -> int:
        """Return the bytes of device memory of the weights under `policy`."""
        _, buffers = plan_residency(policy, {self.stack: self.blocks})
        return buffers * self.buffer_bytes + self.decoding_bytes + self.outside_bytes

    def host_bytes(self, policy: OffloadPolicy) -> int:
        """Return the bytes of RAM of the slots under `policy`."""
        counts = {self.stack: self.blocks}
        slots = plan_ram(policy, plan_residency(policy, counts)[0], counts).slots
        return (slots + self.staging(slots)) * self.stored_bytes

    def staging(self, slots: int) -> int:
        """Return the number of staging slots next to `slots` RAM-resident blocks."""
        direct = not self.has_bus and not self.decodes
        return 0 if direct or slots == self.blocks else STAGING_SLOTS


@dataclass(frozen=True, kw_only=True)
class MeasuredPolicy:
    """Policy that is predicted to be the fastest in the given memory."""

    policy: OffloadPolicy
    timeline: Timeline
    """Prediction of `PASSES` passes."""
    passes: int
    """Passes of a model call."""
    device_bytes: int
    host_bytes: int

    @property
    def call_s(self) -> float:
        """Seconds of a model call after the first ones."""
        return self.passes * self.timeline.steps[-1].wall_s


def choose_measured(
    blocks: MeasuredBlocks,
    measured: StepRecord,
    *,
    passes: int,
    present: OffloadPolicy,
    device_bytes: float,
    host_bytes: float,
    keep_present: bool = True,
) -> MeasuredPolicy | None:
    """Return the policy that is predicted to be the fastest; the present one unless another saves at least `WORTH`.

    None if the call has moved nothing, or without `keep_present` if no policy fits.

    Args:
        blocks: blocks of the model.
        measured: record of a model call.
        passes: passes over the blocks in which a call is computed from now on.
        present: policy of the call.
        device_bytes: limit for the weights on the device.
        host_bytes: limit for blocks in RAM; on a CPU for both together.
        keep_present: True if the present policy may stay without fitting, because it is loaded.
    """
    hardware = _hardware(blocks, measured, passes)
    if hardware is None:
        return None
    now = _predict(blocks, hardware, present, passes)
    host_bytes = max(host_bytes, now.host_bytes)  # the slots of the present policy exist already
    found: list[MeasuredPolicy] = []
    for policy in _candidates(blocks, measured, host_bytes):
        device, host = blocks.device_bytes(policy), blocks.host_bytes(policy)
        limit = host_bytes if blocks.has_bus else host_bytes - device
        if device <= device_bytes and host <= limit:
            found.append(_predict(blocks, hardware, policy, passes))
    fast_enough = 1.01 * min((each.call_s for each in found), default=0.0)
    near = [each for each in found if each.call_s <= fast_enough]
    best = min(near, key=lambda each: (each.device_bytes, each.host_bytes, each.call_s), default=None)
    if not keep_present and now.device_bytes > device_bytes:
        return best
    return best if best is not None and best.call_s < (1 - WORTH) * now.call_s else now


def _candidates(blocks: MeasuredBlocks, measured: StepRecord, host_bytes: float) -> Iterator[OffloadPolicy]:
    """Yield policies that read from the file, and policies with as many blocks in RAM as fit."""
    fitting = min(blocks.blocks, int(host_bytes // blocks.stored_bytes) - STAGING_SLOTS)
    for policy in device_policies(blocks.blocks):
        yield policy
        if measured.copied_bytes and fitting > 0:  # the rate out of RAM is known
            yield with_ram_blocks(policy, fitting)


def _hardware(blocks: MeasuredBlocks, measured: StepRecord, passes: int) -> Hardware | None:
    """Return the measured rates, with all computing in `passes`; None if the call has moved nothing."""
    moved_s = measured.copy_s + measured.read_s
    if not measured.bytes_moved or passes < 1 or moved_s <= 0:
        return None
    fetches = measured.bytes_moved / blocks.stored_bytes
    bus = measured.copied_bytes / measured.copy_s if measured.copy_s > 0 else None
    disk = measured.read_bytes / measured.read_s if measured.read_s > 0 else None
    return Hardware(
        bus_bytes_per_s=bus or disk or 1.0,
        block_bytes=blocks.stored_bytes,
        visit_s={blocks.stack: measured.compute_s / (passes * blocks.blocks)},
        step_overhead_s=max(0.0, measured.wall_s - measured.compute_s - measured.stall_s) / passes,
        disk_bytes_per_s=disk or bus or 1.0,
        file_bytes=blocks.stored_bytes,
        decode_s=measured.decode_s / fetches,
        decode_computes=blocks.decodes and not blocks.has_bus,
    )


def _predict(blocks: MeasuredBlocks, hardware: Hardware, policy: OffloadPolicy, passes: int) -> MeasuredPolicy:
    counts = {blocks.stack: blocks.blocks}
    residency, buffers = plan_residency(policy, counts)
    ram_residency = plan_ram(policy, residency, counts)
    program = compile_program(step_visits([blocks.stack] * PASSES, counts), residency, buffers)
    ram = compile_ram(program, ram_residency, staging=blocks.staging(ram_residency.slots))
    return MeasuredPolicy(
        policy=policy,
        timeline=simulate(program, hardware, ram),
        passes=passes,
        device_bytes=blocks.device_bytes(policy),
        host_bytes=blocks.host_bytes(policy),
    )
