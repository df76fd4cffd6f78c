"""Candidate policies for the planner, with memory needs and lower bounds on times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..schema import OffloadPolicy
from .costs import BlockCosts, RunCosts
from .memory import MemoryBudget, MemoryNeeds, memory_needs
from .programs.ram_program import STAGING_SLOTS, plan_ram
from .programs.simulator import RAW_SLOTS

# Not 0: without prefetch nothing overlaps.
DEPTHS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Policy and memory needs."""

    policy: OffloadPolicy
    needs: MemoryNeeds
    shortage: str | None
    """Shortage in words. None if the policy fits into memory."""


def device_policies(blocks: int) -> Iterator[OffloadPolicy]:
    """Yield every resident count at every prefetch depth, then one resident expert, then both."""
    for depth in DEPTHS:
        yield OffloadPolicy.layerwise(depth)
    for residents in range(1, blocks):
        for depth in DEPTHS:
            yield OffloadPolicy.block_swap(blocks - residents, depth)
    # One depth: a prefetch adds no buffer where all blocks are resident.
    yield OffloadPolicy.block_swap(0, 1)
    yield OffloadPolicy.resident()


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Policies for a run, by memory need.

    Args:
        costs: run costs when this many tokens are computed at once. None: all tokens.
        chunks: candidates for that token count, in descending order.
        budget: memory for the run.
    """

    costs: Callable[[int | None], RunCosts]
    chunks: Sequence[int] = ()
    budget: MemoryBudget

    @staticmethod
    def first_policy(blocks: BlockCosts, ram_bytes: int) -> OffloadPolicy:
        """Return the policy for a first model call on a device with dedicated memory.

        It keeps as many blocks in RAM as fit into `ram_bytes`. The call reads each block from the
        file in any case, so rates would not change its time. A policy chosen afterwards would have
        to read blocks again to keep them.
        """
        first = OffloadPolicy.layerwise()

        def taken(ram_blocks: int) -> int:
            kept = with_ram_blocks(first, ram_blocks)
            return memory_needs(blocks, kept, has_bus=True).host_bytes

        every = len(blocks.stacks) * blocks.blocks
        if taken(every) <= ram_bytes:  # without slots for reading other blocks
            return with_ram_blocks(first, every)
        # `taken` grows with the number of blocks, so bisection finds the most that fit.
        ram_blocks = bisect_right(range(1, every), ram_bytes, key=taken)
        return with_ram_blocks(first, ram_blocks) if ram_blocks else first

    def fitting(self) -> tuple[list[Fit], list[Fit]]:
        """Return candidates within the budget, and usual policies that exceed it.

        Each device policy is tried with no RAM-resident blocks, with as many as fit, and with all
        blocks in RAM.
        """
        blocks = self.costs(None).blocks.blocks
        fits: list[Fit] = []
        misfits: list[Fit] = []
        for on_device in device_policies(blocks):
            found, refused = self._with_chunks(on_device)
            fits += found
            misfits += [misfit for misfit in refused if is_usual(misfit.policy, blocks)]
        return fits, misfits

    def needs(self, policy: OffloadPolicy) -> MemoryNeeds:
        """Return what `policy` needs in memory."""
        costs = self.costs(policy.chunk_tokens)
        return memory_needs(
            costs.blocks, policy, has_bus=costs.has_bus, working_bytes=costs.working_bytes
        )

    def _with_chunks(self, on_device: OffloadPolicy) -> tuple[list[Fit], list[Fit]]:
        """Return variants that fit, with the most tokens at once, and misfits."""
        found: list[Fit] = []
        refused: list[Fit] = []
        for chunk in (None, *self.chunks):
            from_file = self._fit(replace(on_device, chunk_tokens=chunk))
            if from_file.shortage is not None:
                refused = [from_file]
                continue
            found.append(from_file)
            found += self._with_some_in_ram(from_file)
            all_in_ram = self._fit(replace(from_file.policy, source="pinned"))
            if all_in_ram.shortage is None:
                return [*found, all_in_ram], []
            refused = [all_in_ram]
            # Fewer tokens at once are slower. They help only where device and RAM share memory, by
            # making space for slots.
            if not self.budget.shared:
                break
        return found, refused

    def _with_some_in_ram(self, from_file: Fit) -> Iterator[Fit]:
        """Yield the policy with as many RAM-resident blocks as fit, but not all."""
        blocks = self.costs(None).blocks
        # Stored bytes: a slot holds a block in the stored form, not decoded.
        sizes = [size.stored for size in blocks.each]
        every = len(blocks.stacks) * blocks.blocks
        staging = sum(from_file.needs.ram_slots)
        room = self.budget.free_ram(from_file.needs)

        def lacks_room(ram_blocks: int) -> bool:
            return self._fit(with_ram_blocks(from_file.policy, ram_blocks)).shortage is not None

        # Lower bound: every block as large as the largest. Upper bound: every block as small as the
        # smallest, and no staging slots.
        # `every` first: infinite room gives NaN here, and `min` then returns the first argument.
        least = int(min(every, 1 + room // max(sizes)))
        most = int(min(every, 1 + (room + staging) // min(sizes)))
        ram_blocks = bisect_left(range(every), True, lo=least, hi=most, key=lacks_room) - 1
        if ram_blocks > 0:
            yield self._fit(with_ram_blocks(from_file.policy, ram_blocks))

    def _fit(self, policy: OffloadPolicy) -> Fit:
        needs = self.needs(policy)
        return Fit(policy=policy, needs=needs, shortage=self.budget.shortage(needs))


def is_usual(policy: OffloadPolicy, blocks: int) -> bool:
    """Return True for a typical policy.

    A typical policy fetches at most one block ahead and swaps a multiple of a quarter of the
    blocks.
    """
    quarter = max(1, blocks // 4)
    return policy.prefetch_blocks <= 1 and (
        policy.kind != "block_swap" or policy.blocks_to_swap % quarter == 0
    )


def with_ram_blocks(policy: OffloadPolicy, ram_blocks: int) -> OffloadPolicy:
    """Return `policy` with that many RAM-resident blocks."""
    return replace(policy, source="pinned", ram_blocks=ram_blocks)


def lower_bound_s(costs: RunCosts, policy: OffloadPolicy) -> float:
    """Return a lower bound on the run time under `policy`, in seconds.

    When a step ends, all bytes needed so far have passed the disk and the bus, and later steps are
    still to be computed.
    """
    hardware = costs.hardware
    blocks = range(costs.blocks.blocks)
    residency, _ = costs.blocks.plan_buffers(policy)
    in_ram_residency = plan_ram(policy, residency, costs.blocks.counts).residency
    transfers = hardware.fetch_costs(len(blocks))
    read_s = [each.read_s for each in transfers]
    copy_s = [0.0] * len(blocks)
    late_decode_s = 0.0
    if not hardware.decode_computes:
        copy_s = [each.copy_s for each in transfers]
        late_decode_s = min(each.decode_s for each in transfers)
    # A CPU without decoding reads files directly into buffers. This is one transfer, and both disk
    # and bus count it. Otherwise a block leaves the disk first and the bus last.
    first_hop_s = min(read_s)
    last_hop_s = min(copy_s)
    from_file_s = copy_s
    if costs.blocks.reads_directly(has_bus=costs.has_bus):
        # The bound must be monotonic: more RAM-resident blocks never raise it, even with RAM slower
        # than the disk.
        copy_s = [min(pair) for pair in zip(copy_s, read_s, strict=True)]
        first_hop_s = last_hop_s = 0.0
        from_file_s = read_s
    shares = hardware.visit_shares or (1.0,) * len(blocks)
    disk_s = bus_s = computed_s = 0.0
    # Lower bound on the device's delay so far.
    late_s = min(read_s) + last_hop_s + late_decode_s
    seen = set[str]()
    for stage, expert in pairwise(["", *(step.expert for step in costs.steps)]):
        residents = residency.residents.get(expert, frozenset())
        in_ram = in_ram_residency.residents.get(expert, frozenset())
        # A stage begins with the fetches of residents.
        if expert != stage and not (residency.permanent and expert in seen):
            residents = frozenset()
        fetched = [block for block in blocks if block not in residents]
        from_file = [block for block in fetched if block not in in_ram]
        # RAM-resident blocks are read once, in the first stage with their expert.
        filled = in_ram if expert not in seen else ()
        disk_s += sum(read_s[block] for block in (*from_file, *filled))
        bus_s += sum((copy_s if block in in_ram else from_file_s)[block] for block in fetched)
        computed_s += sum(shares) * hardware.visit_s[expert]
        if hardware.decode_computes:
            computed_s += sum(transfers[block].decode_s for block in fetched)
        if fetched:
            # The bus starts once the first block has left the disk. The last block still has to
            # pass it.
            arrival_s = max(disk_s + last_hop_s, bus_s + first_hop_s) + late_decode_s
            late_s = max(late_s, arrival_s + min(shares) * hardware.visit_s[expert] - computed_s)
        seen.add(expert)
    return late_s + computed_s


def last_step_bound_s(costs: RunCosts, policy: OffloadPolicy) -> float:
    """Return a lower bound on the time of a run's last step under `policy`, in seconds.

    All blocks are computed, and bytes that do not stay are moved. Earlier steps may have moved as
    many blocks ahead as there are buffers and slots for streamed ones.
    """
    hardware = costs.hardware
    blocks = range(costs.blocks.blocks)
    stack = costs.steps[-1].expert
    residency, sizes = costs.blocks.plan_buffers(policy)
    in_ram = plan_ram(policy, residency, costs.blocks.counts).residency.residents.get(stack, ())
    residents = residency.residents.get(stack, ())
    fetched = [block for block in blocks if block not in residents]
    transfers = hardware.fetch_costs(len(blocks))
    shares = hardware.visit_shares or (1.0,) * len(blocks)
    computed_s = sum(shares) * hardware.visit_s[stack] + hardware.step_overhead_s
    copied: list[int] = []
    if hardware.decode_computes:
        computed_s += sum(transfers[block].decode_s for block in fetched)
    elif costs.blocks.reads_directly(has_bus=costs.has_bus):
        copied = [block for block in fetched if block in in_ram]
    else:
        copied = fetched
    ahead = len(sizes.capacities) - len(residents) + RAW_SLOTS * costs.blocks.decodes
    copy_s = _without_largest(ahead, (transfers[block].copy_s for block in copied))
    from_file = [block for block in fetched if block not in in_ram]
    read_s = _without_largest(
        ahead + STAGING_SLOTS, (transfers[block].read_s for block in from_file)
    )
    return max(computed_s, copy_s, read_s)


def _without_largest(count: int, times: Iterable[float]) -> float:
    """Return the sum without the `count` largest numbers."""
    return sum(sorted(times, reverse=True)[count:])
