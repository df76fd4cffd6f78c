"""Weights in a worker group: shard collectives, group measurement, placement for a run.

All workers in the group call it at the same point in the same run. It takes one to two seconds for
any block size.
"""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist

from ...devices import free_bytes
from ...devices.machine import available_bytes
from ...offload import GatherBrokenError, Sharded
from ...offload.probes import probe_gather
from ...sampling import request_bytes, request_run_shape
from ...sampling.inputs import DenoiseRequest
from ...schema import OffloadPolicy, largest_share
from ...schema.refs import ON_DEVICE, WHOLE_WEIGHTS, WeightPlacement
from ...wan import ExpertPair
from ...wan.measurement import probe_block
from ..plan.weights import PlacementChoice, WeightFigures, choose_weight_placement
from .groups import ProcessGroups
from .parallel_forward import group_forward

COMPARED_BYTES = 64


class GroupGather:
    """See `Gather`. Each worker in a group has one shard of every block, by group rank."""

    def __init__(self, groups: ProcessGroups) -> None:
        # Process groups are looked up for each call. A reference to one would keep connections
        # open.
        self._groups = groups
        self.rank = groups.rank
        self.size = groups.size
        self._is_aborted = False

    def compare(self, said: bytes) -> tuple[bytes, ...]:
        """See `Gather.compare`. Raises WorkerTimeoutError and PeerLostError."""
        assert len(said) <= COMPARED_BYTES, (
            f"{len(said)} bytes to compare, at most {COMPARED_BYTES}"
        )
        # Padded, because all_gather needs one shape on all workers.
        own = torch.tensor(list(said.ljust(COMPARED_BYTES, b"\0")), dtype=torch.uint8)
        gathered = self._groups.all_gather_cpu(own, "compared the blocks to be streamed")
        return tuple(bytes(one.tolist())[: len(said)] for one in gathered)

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """See `Gather.all_gather`. Raises WorkerTimeoutError and PeerLostError too."""
        # torch 2.13 renamed it, and warns about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._groups.translate_errors("gathered weights"):
            if self._is_aborted:
                raise GatherBrokenError("the gathers of this rendezvous were aborted")
            try:
                self._groups.exchange(gather, into, own, group="weights")
            except RuntimeError as err:
                if self._is_aborted:
                    raise GatherBrokenError(
                        "the run ended while its weights were gathered"
                    ) from err
                raise
        self._groups.count_gathered(into.numel() - own.numel())

    def abort(self) -> None:
        """See `Gather.abort`. No worker in the group can use the rendezvous any more."""
        self._is_aborted = True
        self._groups.abort_gathers()


COMPUTE_PROBE_S = 0.5
"""Duration of the compute measurement. Together with `probe_gather` it takes less than two
seconds."""

logger = logging.getLogger("wanstream.workers")


class GroupWeights:
    """Weight placement for one worker in one rendezvous.

    With "auto", the workers in a group measure before their first run with a block size. They
    choose from the same figures, so all choose the same. On CPUs weights are always whole, because
    all workers on a machine share one copy in RAM and compute from it.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        # One object per placement: the experts treat another object as another rendezvous.
        self._sharded: dict[WeightPlacement, Sharded] = {}
        self._choices: dict[int, PlacementChoice] = {}

    def for_run(
        self, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy
    ) -> tuple[Sharded | None, str]:
        """Return the shards for a run, and the reason for a measured placement (else "").

        Without shards the weights are whole. All workers in the group must call it before the run.
        Raises WorkerTimeoutError and PeerLostError.
        """
        placement = self._groups.rendezvous.weights
        reason = ""
        if self._groups.size == 1 or (placement == "auto" and self._groups.device.type == "cpu"):
            return None, ""
        if placement == "auto":
            if pair.block_bytes.stored not in self._choices:
                choice = choose_weight_placement(measure(self._groups, pair, request, policy))
                self._choices[pair.block_bytes.stored] = choice
                logger.info("%s", choice.reason)
            placement, reason = self._choices[pair.block_bytes.stored]
        if placement == WHOLE_WEIGHTS:
            return None, reason
        if placement not in self._sharded:
            self._sharded[placement] = Sharded(
                gather=GroupGather(self._groups), on_device=placement == ON_DEVICE
            )
        return self._sharded[placement], reason


def measure(
    groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy
) -> WeightFigures:
    """Measure the group for runs like this one.

    All workers must call it, and all return the same figures. Raises WorkerTimeoutError and
    PeerLostError.
    """
    times = probe_gather(GroupGather(groups), groups.device, pair.block_bytes.stored)
    free = free_bytes(groups.device)
    if free is None:
        free = available_bytes()
    # Loaded weights are part of `taken_bytes`, and `free_bytes` does not include them.
    free += pair.loaded_bytes - taken_bytes(groups, pair, request, policy)
    # Negated, so that the maximum over the workers is the smallest free memory.
    own = [*times.values(), _visit_s(groups, pair, request), -free]
    *slowest, visit_s, negated = groups.all_reduce_max(own, "compared the times of weights")
    return WeightFigures(
        workers=groups.size,
        block_bytes=pair.block_bytes.stored,
        blocks=sum(pair.block_counts.values()),
        visit_s=visit_s,
        free_bytes=max(0, int(-negated)),
        **dict(zip(times, slowest, strict=True)),
    )


def _visit_s(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest) -> float:
    """Measure the seconds for this worker's share of one visit."""
    run = request_run_shape(pair, request, groups.device)
    mesh = groups.mesh
    lane_tokens = max(
        (largest_share(run.lane_tokens(expert), mesh.cfg) for expert in run.sides), key=sum
    )
    shares = mesh.ring * mesh.ulysses
    tokens = math.ceil(run.tokens / shares)
    rate = probe_block(run.expert, tokens, groups.device, most_s=COMPUTE_PROBE_S).flops_per_s
    return sum(map(run.expert.block_flops, lane_tokens)) / shares / rate


def taken_bytes(
    groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy
) -> int:
    """Return the device memory for this worker's share of a run with whole weights, in bytes."""
    share = group_forward(groups).share
    working = request_bytes(pair, request, chunk_tokens=policy.chunk_tokens, share=share)
    return pair.device_bytes(policy, device=groups.device) + working
