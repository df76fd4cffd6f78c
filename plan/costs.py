"""Run costs, the planner's input. A model's shape or a measured call fills them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

from ..schema import OffloadPolicy, Residency
from ..schema.records import StepRecord
from ..schema.refs import Storage
from .machine import Machine
from .programs.buffer_sizes import BufferSizes, plan_buffers
from .programs.simulator import BlockSize, Hardware
from .programs.visits import Visit, step_visits

ROTATED_SHARE = 0.4
"""Quantising rate to int8 ConvRot, relative to fp8 (`benchmarks/quantise_while_filling.py`)."""

SMALL = 0.5
"""Relative block size below which less compute time is assumed, in proportion to bytes.

Blocks at or above this share of the largest differ in the tokens they compute.
"""

PASSES = 3
"""Simulated passes over the blocks when their number is unknown. From the second on, all take
equally long."""


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """Sizes in bytes for the largest block in a run, and for everything next to the blocks.

    Raises ValueError for blocks and sizes below 1, and for `sizes` whose maximum is not the largest
    block.
    """

    stacks: tuple[str, ...]
    """Names of the block stacks, one per expert."""
    blocks: int
    """Blocks per stack."""
    file_bytes: int
    """Bytes read from the file. More than `stored_bytes` if blocks are quantised after reading."""
    stored_bytes: int
    """Bytes in RAM and on the bus."""
    computed_bytes: int
    """Bytes in a buffer, in the form used for compute."""
    decoded_bytes: int = 0
    """Stored bytes for a block to decode on arrival. 0: no block is decoded."""
    quantised_to: Storage = "as stored"
    """Format for quantising blocks between file and RAM."""
    patch_bytes: int = 0
    """Bytes behind a block in its buffer: LoRA factors computed next to the matrices."""
    outside_bytes: int = 0
    """Device bytes held for the whole run, outside the streamed blocks."""
    host_outside_bytes: int = 0
    """RAM for the whole run in addition to the slots: LoRA factors, and an embedder kept off the
    device."""
    sizes: tuple[BlockSize, ...] = ()
    """Block sizes in stack order. Empty: all blocks are as large as the largest."""

    def __post_init__(self) -> None:
        if len(self.sizes) not in (0, self.blocks):
            raise ValueError(f"there are sizes for {len(self.sizes)} of {self.blocks} blocks")
        for name in ("blocks", "stored_bytes", "file_bytes", "computed_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be 1 or more")
        largest = (self.file_bytes, self.stored_bytes, self.computed_bytes)
        found = tuple(max(kind) for kind in zip(*self.each, strict=True))
        if found != largest:
            raise ValueError(f"the largest block has {largest} bytes, the largest size is {found}")

    @property
    def counts(self) -> dict[str, int]:
        """Block count of each stack."""
        return dict.fromkeys(self.stacks, self.blocks)

    @cached_property
    def each(self) -> tuple[BlockSize, ...]:
        """Block sizes in stack order."""
        largest = BlockSize(self.file_bytes, self.stored_bytes, self.computed_bytes)
        return self.sizes or (largest,) * self.blocks

    def plan_buffers(self, policy: OffloadPolicy) -> tuple[Residency, BufferSizes]:
        """Return the residents under `policy`, and the buffer sizes."""
        # RAM and chunk settings do not change buffers. Without them more policies share a cache
        # entry.
        on_device = replace(policy, source="file", ram_blocks=None, chunk_tokens=None)
        return _planned(on_device, self.stacks, tuple(size.computed for size in self.each))

    @property
    def decodes(self) -> bool:
        """True if blocks are decoded on arrival."""
        return self.decoded_bytes > 0

    def reads_directly(self, *, has_bus: bool) -> bool:
        """Return True if a CPU reads undecoded blocks from the file directly into buffers."""
        return not has_bus and not self.decodes

    def hardware(self, machine: Machine, visit_s: Mapping[str, float]) -> Hardware:
        """Return the rates of `machine` for these blocks.

        `visit_s` has the seconds per visit in each stack.
        """
        return Hardware(
            bus_bytes_per_s=machine.load_bytes_per_s,
            block_bytes=self.stored_bytes,
            visit_s=visit_s,
            # This rate includes quantising, because the simulator has no queue for it.
            disk_bytes_per_s=self.file_bytes / self.read_seconds(machine),
            file_bytes=self.file_bytes,
            decode_s=self.decodes * self.computed_bytes / machine.decode_bytes_per_s,
            decode_computes=self.decodes and not machine.has_bus,
            sizes=self.sizes,
        )

    def read_seconds(self, machine: Machine) -> float:
        """Return the seconds to read one block from its file into RAM.

        Quantising runs in parallel with reading, so the slower one counts.
        """
        read_s = self.file_bytes / machine.disk_bytes_per_s
        if self.quantised_to == "as stored":
            return read_s
        share = {"fp8": 1.0, "int8 ConvRot": ROTATED_SHARE}[self.quantised_to]
        return max(read_s, self.file_bytes / (share * machine.quantise_bytes_per_s))


@lru_cache(maxsize=1024)  # a planner needs each for many numbers of RAM-resident blocks
def _planned(
    policy: OffloadPolicy, stacks: tuple[str, ...], computed: tuple[int, ...]
) -> tuple[Residency, BufferSizes]:
    return plan_buffers(policy, dict.fromkeys(stacks, computed))


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs for one step, with one visit to each block in one stack."""

    expert: str
    visit_s: float
    """Compute seconds per block in this step."""
    patch: int = 0
    """See `BlockKey.patch`."""
    is_skipped: bool = False
    """True if a cache is known to skip the step. A skipped step visits no block."""


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """Costs for a run on one machine, with a fixed number of tokens computed at once."""

    blocks: BlockCosts
    steps: tuple[StepCosts, ...]
    hardware: Hardware
    """Rates. `visit_s` has the seconds of each stack's longest step."""
    has_bus: bool
    """True for a device with dedicated memory. False for a CPU."""
    working_bytes: int = 0
    """Activation bytes in the most demanding step."""
    at_once: str = ""
    """Token count computed at once, described for a reader."""
    arithmetic: str = ""
    """Arithmetic, described for a reader."""

    @property
    def visits(self) -> tuple[Visit, ...]:
        """Visits for all steps."""
        return step_visits(
            [step.expert for step in self.steps],
            self.blocks.counts,
            skipped=[number for number, step in enumerate(self.steps) if step.is_skipped],
            patches_of_steps=[step.patch for step in self.steps],
        )

    @property
    def by_step(self) -> RunCosts:
        """The same run with seconds for each step instead of each stack's longest one."""
        visit_s = {number: step.visit_s for number, step in enumerate(self.steps)}
        return replace(self, hardware=replace(self.hardware, step_visit_s=visit_s))


def measured_costs(
    blocks: BlockCosts, measured: StepRecord, passes: int, *, has_bus: bool
) -> RunCosts | None:
    """Return costs for `PASSES` passes over one stack, at the rates of a measured model call.

    None if the call moved nothing.

    Args:
        blocks: the model's blocks.
        measured: record of the call.
        passes: passes per call from now on.
        has_bus: see `RunCosts`.
    """
    stack = measured.expert
    moved = measured.transfers
    if not moved.bytes_moved or passes < 1 or moved.copy_s + moved.read_s <= 0:
        return None
    bus = moved.copy_bytes_per_s
    disk = moved.read_bytes_per_s
    shares = tuple(min(1.0, size.stored / (SMALL * blocks.stored_bytes)) for size in blocks.each)
    visit_s = measured.compute_s / (passes * sum(shares))
    hardware = Hardware(
        # An unknown rate needs some value. Without a copy `plan_passes` tries no policy with RAM
        # slots.
        bus_bytes_per_s=bus or disk or 1.0,
        block_bytes=blocks.stored_bytes,
        visit_s={stack: visit_s},
        step_overhead_s=max(0.0, measured.wall_s - measured.compute_s - moved.stall_s) / passes,
        disk_bytes_per_s=disk or bus or 1.0,
        file_bytes=blocks.stored_bytes,
        # The divisor is the number of fetches if all blocks were as large as the largest.
        decode_s=measured.decode_s / (moved.bytes_moved / blocks.stored_bytes),
        decode_computes=blocks.decodes and not has_bus,
        sizes=blocks.sizes,
        visit_shares=shares,
    )
    steps = (StepCosts(expert=stack, visit_s=visit_s),) * PASSES
    return RunCosts(blocks=blocks, steps=steps, hardware=hardware, has_bus=has_bus)


class RunModel(Protocol):
    """Run with a known model shape. The costs follow from machine rates."""

    @property
    def chunks(self) -> Sequence[int]:
        """Candidates for `OffloadPolicy.chunk_tokens` in descending order.

        Each takes less memory and more time than the one before it.
        """

    def costs(self, machine: Machine, chunk_tokens: int | None = None) -> RunCosts:
        """Return the costs on `machine` with that many tokens computed at once.

        None: all tokens.
        """

    def of_steps(self, steps: Sequence[int]) -> RunModel:
        """Return the run with these steps alone, given as step indices."""

    def calibrated(self, machine: Machine, visit_s: float, chunk_tokens: int | None) -> Machine:
        """Return `machine` with the compute rate set by a visit in the first step.

        `visit_s` is the measured time in seconds.
        """


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Memory limits for a run, in bytes.

    None: a default share of the machine, see `memory_budget`.

    Raises ValueError for negative budgets.
    """

    vram_bytes: int | None = None
    """Limit for weights plus activations."""
    ram_bytes: int | None = None
    """Limit for weights in RAM. On a CPU it covers everything else too."""

    def __post_init__(self) -> None:
        for name in ("vram_bytes", "ram_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(
                    f"{name} is {value}, it must be 0 or more (None leaves it to the planner)"
                )


@dataclass(frozen=True, kw_only=True)
class AutoOffload:
    """Placeholder for an offload policy.

    `plan_offload` chooses the policy within these budgets when the run is known.
    """

    budgets: Budgets = Budgets()
