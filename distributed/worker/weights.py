"""Placement of the weights of a group: the choice, the measurement behind it, and the sources that follow.

A worker has whole blocks (full), or 1/N of each block in host memory (sharded) or in device memory (sharded in VRAM)
and gathers the rest. One block is needed per visit, so the placement with the shortest stall is chosen:

* full: one block over the worker's bus while all other workers copy too. If each device has its own link, this is as
  fast as alone; behind a shared uplink, or if RAM or the link between two sockets is the limit, it is slower.
* sharded: 1/N of a block over the bus, then a gather. Two blocks are in flight at once, one on the bus and one between
  the devices, so the slower transfer counts; each is measured during the other. Over NVLink the gather does not use
  the bus. Over PCIe without P2P it goes to host memory and back, which shows as a slow gather.
* sharded in VRAM: only a gather. The shards of all blocks must fit into VRAM in addition to the needs of a run.

Full is chosen unless another placement is faster by more than the error of the measurements, because it needs no
communication.

All workers of the group call it at the same point of the same run. It takes one to two seconds for any block size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...devices import available_bytes, clock_for, free_bytes, runtime_for
from ...offload import GatherBrokenError, LockedBlocks, Sharded, copy_to_device, map_memory, shard_bytes, typical_s
from ...sampling import DenoiseRequest, extra_tokens_of, request_job, working_bytes
from ...schema import (
    ON_DEVICE,
    SHARDED,
    WHOLE_WEIGHTS,
    OffloadPolicy,
    WeightPlacement,
    format_need,
    format_rate,
    format_size,
    largest_share,
)
from ...wan import ExpertPair, probe_block
from .groups import ProcessGroups
from .parallel_forward import group_forward

COMPARED_BYTES = 64


class GroupGather:
    """See `Gather`. Each worker of a group has one shard of every block, by its group rank."""

    def __init__(self, groups: ProcessGroups) -> None:
        # Process groups are looked up for each call: a reference to one would keep its connections open.
        self._groups = groups
        self.rank, self.size = groups.rank, groups.size
        self._is_aborted = False

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        """See `Gather.compare`. Raises WorkerTimeoutError and PeerLostError."""
        assert len(said) <= COMPARED_BYTES, f"{len(said)} bytes to compare, at most {COMPARED_BYTES}"
        own = torch.tensor(list(said.ljust(COMPARED_BYTES, b"\0")), dtype=torch.uint8)
        gathered = self._groups.all_gather_cpu(own, "compared the blocks to be streamed")
        return tuple(bytes(one.tolist())[: len(said)] for one in gathered)

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """See `Gather.all_gather`. Raises WorkerTimeoutError and PeerLostError too."""
        # torch 2.13 renamed it, and warns about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._groups.translate_errors("gathered weights"):
            group = self._groups.group("weights")
            if self._is_aborted:
                raise GatherBrokenError("the gathers of this rendezvous were aborted")
            try:
                gather(into, own, group=group)
            except RuntimeError as err:
                if self._is_aborted:
                    raise GatherBrokenError("the run ended while its weights were gathered") from err
                raise
        self._groups.count_gathered(into.numel() - own.numel())

    def abort(self) -> None:
        """See `Gather.abort`. No worker of the group can use the rendezvous any more."""
        self._is_aborted = True
        self._groups.abort_gathers()


MIN_GAIN = 0.05
"""Fraction of a visit by which a sharded placement must be faster; the probe does not resolve less in two seconds."""


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """Measurements of one worker group, each from its slowest worker; all times are seconds per block and above 0."""

    workers: int
    block_bytes: int
    """Stored bytes of one block, which are copied over the bus."""
    blocks: int
    """Number of blocks of both experts."""
    visit_s: float
    """Compute time of one visit on one worker."""
    h2d_s: float
    """Copy of a whole block from host to device memory, by one worker alone."""
    h2d_concurrent_s: float
    """Copy of a whole block while all workers copy."""
    shard_h2d_s: float
    """Copy of 1/N of a block while all workers copy and gather another block."""
    gather_s: float
    """Gather of a block from shards in device memory, without other transfers."""
    gather_during_h2d_s: float
    """Gather of a block while all workers copy shards of another block."""
    free_bytes: int
    """Device memory left free by a run with full weights."""

    @property
    def shards_bytes(self) -> int:
        """Device memory for the shards of all blocks on one worker."""
        return -(-self.block_bytes * self.blocks // self.workers)


class PlacementChoice(NamedTuple):
    """Chosen placement and the reason."""

    placement: WeightPlacement
    reason: str


def choose_placement(figures: WeightFigures) -> PlacementChoice:
    """Choose the placement with the shortest stall; never "auto"."""
    fetches: dict[WeightPlacement, float] = {
        WHOLE_WEIGHTS: figures.h2d_concurrent_s,
        SHARDED: max(figures.shard_h2d_s, figures.gather_during_h2d_s),
    }
    fits = figures.shards_bytes <= figures.free_bytes
    if fits:
        fetches[ON_DEVICE] = figures.gather_s
    block_s = {placement: max(figures.visit_s, fetch_s) for placement, fetch_s in fetches.items()}
    # Among placements whose fetch is hidden, the one with the shortest fetch.
    best = min(block_s, key=lambda placement: (block_s[placement], fetches[placement]))
    if block_s[WHOLE_WEIGHTS] - block_s[best] <= MIN_GAIN * figures.visit_s:
        best = WHOLE_WEIGHTS
    return PlacementChoice(best, _reason(figures, fetches, best, fits=fits))


def _reason(figures: WeightFigures, fetches: dict[WeightPlacement, float], best: WeightPlacement, *, fits: bool) -> str:
    hidden = "hidden behind compute" if fetches[best] <= figures.visit_s else "not hidden behind compute"
    costs = ", ".join(f"{placement} {_ms(fetch_s)}" for placement, fetch_s in fetches.items())
    alone, at_once = (format_rate(figures.block_bytes / each) for each in (figures.h2d_s, figures.h2d_concurrent_s))
    if figures.h2d_concurrent_s <= 1.1 * figures.h2d_s:
        at_once = "as much"
    bus = f"the bus gives {alone} to one of {figures.workers} workers and {at_once} to each of them at once"
    shards = f"; shards in VRAM need {format_need(figures.shards_bytes)}, {format_need(figures.free_bytes)} are free"
    return (
        f"{best} weights: a block of {format_size(figures.block_bytes)} in {_ms(fetches[best])}, {hidden} "
        f"({_ms(figures.visit_s)} for each); {costs}; {bus}, a gather moves "
        f"{format_rate(figures.block_bytes / figures.gather_s)}{'' if fits else shards}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


PROBE_BYTES, CPU_PROBE_BYTES = 128 * 1024**2, 4 * 1024**2
"""Largest size of the probe's block: large enough that the latency of a copy is negligible."""
REPEATS = 5
"""Number of measurements after a warm-up, of which the median is used."""


def probe_weights(groups: ProcessGroups, block_bytes: int) -> dict[str, float]:
    """Measure the times of `WeightFigures`, except for `visit_s`, with blocks of `block_bytes` stored bytes.

    Every worker of the group returns the same figures. Raises WorkerTimeoutError and PeerLostError.
    """
    device, gather, runtime = groups.device, GroupGather(groups), runtime_for(groups.device)
    most = CPU_PROBE_BYTES if device.type == "cpu" else PROBE_BYTES
    shard = shard_bytes(min(block_bytes, most), groups.size)
    host = map_memory(shard * groups.size)
    host.zero_()
    copied, gathered = (torch.empty(host.numel(), dtype=torch.uint8, device=device) for _ in range(2))
    own = torch.zeros(shard, dtype=torch.uint8, device=device)
    copy_block = partial(copy_to_device, copied, host)
    copy_shard = partial(copy_to_device, copied[:shard], host[:shard])
    gather_block = partial(gather.all_gather, gathered, own)
    on_copies: Callable[[], AbstractContextManager[object]] = nullcontext

    def aside(work: Callable[[], None]) -> None:  # on a CPU, which has no streams, before what follows
        with on_copies():
            work()

    def measured(work: Callable[[], None], **concurrent: Any) -> float:
        gather.compare(b"probe")  # all workers begin together
        return typical_s(work, device, repeats=REPEATS, **concurrent)

    times = {}
    with ExitStack() as undo:
        if runtime is not None:
            on_copies = partial(runtime.on_stream, runtime.stream())
            locked = LockedBlocks(runtime)
            locked.add(host)
            undo.callback(locked.release)
            undo.callback(aside, clock_for(device).settle)
        for rank in range(groups.size):
            gather.compare(b"probe")
            if rank == groups.rank:
                times["h2d_s"] = typical_s(copy_block, device, repeats=REPEATS)
        times["h2d_concurrent_s"] = measured(copy_block)
        times["gather_s"] = measured(gather_block)
        times["shard_h2d_s"] = measured(copy_shard, on_stream=on_copies, meanwhile=gather_block)
        times["gather_during_h2d_s"] = measured(gather_block, meanwhile=partial(aside, copy_shard))
    scale = block_bytes / host.numel()
    scaled = [scale * max(seconds, 1e-9) for seconds in times.values()]
    return dict(zip(times, groups.all_reduce_max(scaled, "compared the times of weights"), strict=True))


COMPUTE_PROBE_S = 0.5
"""Duration of the compute measurement; together with `probe_weights` it takes less than two seconds."""

logger = logging.getLogger("wanstream.workers")


class GroupWeights:
    """Placement of the weights of one worker in one rendezvous.

    With "auto", the workers of a group measure before their first run with a block size, and choose from the same
    figures, so that all choose the same. On CPUs weights are always whole, because all workers of a machine share one
    copy in RAM, from which they compute.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        # One object per placement: the experts treat another object as another rendezvous.
        self._sharded: dict[WeightPlacement, Sharded] = {}
        self._choices: dict[int, PlacementChoice] = {}

    def for_run(self, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> tuple[Sharded | None, str]:
        """Return the shards of a run, and the reason of a placement that was chosen from measurements (else "").

        Without shards the weights are whole. All workers of the group must call it before the run.

        Raises WorkerTimeoutError and PeerLostError.
        """
        placement, reason = self._groups.rendezvous.weights, ""
        if self._groups.size == 1 or (placement == "auto" and self._groups.device.type == "cpu"):
            return None, ""
        if placement == "auto":
            if pair.stored_bytes not in self._choices:
                choice = choose_placement(measure(self._groups, pair, request, policy))
                self._choices[pair.stored_bytes] = choice
                logger.info("%s", choice.reason)
            placement, reason = self._choices[pair.stored_bytes]
        if placement == WHOLE_WEIGHTS:
            return None, reason
        if placement not in self._sharded:
            self._sharded[placement] = Sharded(gather=GroupGather(self._groups), on_device=placement == ON_DEVICE)
        return self._sharded[placement], reason


def measure(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> WeightFigures:
    """Measure the group for runs like this one. All workers must call it; all return the same figures.

    Raises WorkerTimeoutError and PeerLostError.
    """
    times = probe_weights(groups, pair.stored_bytes)
    free = free_bytes(groups.device)
    if free is None:
        free = available_bytes()
    free += pair.loaded_bytes - taken_bytes(groups, pair, request, policy)
    # The free bytes are negated, so that their maximum over the workers is the minimum of free memory.
    visit_s, negated = groups.all_reduce_max([_visit_s(groups, pair, request), -free], "compared the needs of a run")
    return WeightFigures(
        workers=groups.size,
        block_bytes=pair.stored_bytes,
        blocks=sum(pair.block_counts.values()),
        visit_s=visit_s,
        free_bytes=max(0, int(-negated)),
        **times,
    )


def _visit_s(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest) -> float:
    """Measure the seconds of this worker's share of one visit."""
    job = request_job(pair, request, groups.device)
    mesh = groups.mesh
    lane_tokens = max((largest_share(job.lane_tokens(expert), mesh.cfg) for expert in job.lanes), key=sum)
    shares = mesh.ring * mesh.ulysses
    tokens = math.ceil(job.tokens / shares)
    rate = probe_block(job.expert, tokens, groups.device, most_s=COMPUTE_PROBE_S).flops_per_s
    return sum(map(job.expert.block_flops, lane_tokens)) / shares / rate


def taken_bytes(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> int:
    """Return the device memory that this worker needs for its share of a run with whole weights, in bytes."""
    shape, share = request.computed_shape, group_forward(groups).share
    chunk, cache = policy.chunk_tokens, request.cache
    sides = extra_tokens_of(pair, request)
    working = working_bytes(pair, shape, sides=sides, chunk_tokens=chunk, share=share, cache=cache)
    return pair.device_bytes(policy, device=groups.device) + working
