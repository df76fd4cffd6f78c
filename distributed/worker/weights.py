"""Weights of a worker group: the collectives of their shards, the measurement of a group, the placement of a run.

All workers of the group call it at the same point of the same run. It takes one to two seconds for any block size.
"""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist

from ...devices import available_bytes, free_bytes
from ...offload import GatherBrokenError, Sharded, probe_gather
from ...plan import PlacementChoice, WeightFigures, choose_weight_placement
from ...sampling import DenoiseRequest, extra_tokens_of, request_job, working_bytes
from ...schema import ON_DEVICE, WHOLE_WEIGHTS, OffloadPolicy, WeightPlacement, largest_share
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


COMPUTE_PROBE_S = 0.5
"""Duration of the compute measurement; together with `probe_gather` it takes less than two seconds."""

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
                choice = choose_weight_placement(measure(self._groups, pair, request, policy))
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
    times = probe_gather(GroupGather(groups), groups.device, pair.stored_bytes)
    free = free_bytes(groups.device)
    if free is None:
        free = available_bytes()
    free += pair.loaded_bytes - taken_bytes(groups, pair, request, policy)
    # The free bytes are negated, so that their maximum over the workers is the minimum of free memory.
    own = [*times.values(), _visit_s(groups, pair, request), -free]
    *slowest, visit_s, negated = groups.all_reduce_max(own, "compared the times of weights")
    return WeightFigures(
        workers=groups.size,
        block_bytes=pair.stored_bytes,
        blocks=sum(pair.block_counts.values()),
        visit_s=visit_s,
        free_bytes=max(0, int(-negated)),
        **dict(zip(times, slowest, strict=True)),
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
