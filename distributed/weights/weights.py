"""Placement of the weights of a worker group: set by the rendezvous, or chosen from measurements."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ...devices import available_bytes, free_bytes
from ...offload import Sharded
from ...sampling import DenoiseRequest, request_job, working_bytes
from ...schema import ON_DEVICE, WHOLE_WEIGHTS, OffloadPolicy, WeightPlacement
from ...wan import ExpertPair, probe_block
from ..worker.groups import ProcessGroups
from .gather import GroupGather
from .placement import PlacementChoice, WeightFigures, choose_placement
from .probe import probe_weights

COMPUTE_PROBE_S = 0.5
"""Duration of the compute measurement; together with `probe_weights` it takes less than two seconds."""

logger = logging.getLogger("wanstream.workers")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunWeights:
    """Placement of the weights of one run."""

    sharded: Sharded | None = None
    """Gather and location of the shards; None: whole weights."""
    reason: str = ""
    """Reason of a placement that was chosen from measurements, with the numbers; else empty."""


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

    def for_run(self, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> RunWeights:
        """Return the placement for a run. All workers of the group must call it before the run.

        Raises WorkerTimeoutError and PeerLostError.
        """
        placement = self._groups.rendezvous.weights
        if self._groups.size == 1 or placement == WHOLE_WEIGHTS:
            return RunWeights()
        if placement != "auto":
            return RunWeights(sharded=self._sharded_in(placement))
        if self._groups.device.type == "cpu":
            return RunWeights()
        choice = self._choices.get(pair.stored_bytes)
        if choice is None:
            choice = choose_placement(measure(self._groups, pair, request, policy))
            self._choices[pair.stored_bytes] = choice
            logger.info("%s", choice.reason)
        return RunWeights(sharded=self._sharded_in(choice.placement), reason=choice.reason)

    def abort(self) -> None:
        """Abort gathers that wait (any thread)."""
        for sharded in tuple(self._sharded.values()):  # a run that begins on another thread may add one
            sharded.gather.abort()

    def _sharded_in(self, placement: WeightPlacement) -> Sharded | None:
        if placement == WHOLE_WEIGHTS:
            return None
        if placement not in self._sharded:
            self._sharded[placement] = Sharded(gather=GroupGather(self._groups), on_device=placement == ON_DEVICE)
        return self._sharded[placement]


def measure(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> WeightFigures:
    """Measure the group for runs like this one. All workers must call it; all return the same figures.

    Raises WorkerTimeoutError and PeerLostError.
    """
    times = probe_weights(groups, pair.stored_bytes)
    # The free bytes are negated, so that their maximum over the workers is the minimum of free memory.
    visit_s, negated = _worst(groups, [_visit_s(groups, pair, request), -_free_bytes(groups, pair, request, policy)])
    return WeightFigures(
        workers=groups.size,
        block_bytes=pair.stored_bytes,
        blocks=sum(pair.block_counts.values()),
        visit_s=visit_s,
        free_bytes=max(0, int(-negated)),
        **asdict(times),
    )


def _visit_s(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest) -> float:
    """Measure the seconds of this worker's share of one visit."""
    job = request_job(pair, request, groups.device)
    mesh = groups.mesh
    lanes = math.ceil(max(job.lanes.values()) / mesh.cfg)
    shares = mesh.ring * mesh.ulysses
    tokens = math.ceil(job.tokens / shares)
    rate = probe_block(job.expert, tokens, groups.device, most_s=COMPUTE_PROBE_S).flops_per_s
    return lanes * job.expert.block_flops(job.tokens) / shares / rate


def _free_bytes(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> float:
    """Return the device memory (RAM on a CPU) left free by the run with whole weights, in bytes; may be negative."""
    free = free_bytes(groups.device)
    if free is None:
        free = available_bytes()
    return free + pair.loaded_bytes - taken_bytes(groups, pair, request, policy)


def taken_bytes(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> int:
    """Return the device memory that this worker needs for its share of a run with whole weights, in bytes."""
    shape, share = request.computed_shape, groups.split().share
    chunk, cache = policy.chunk_tokens, request.cache
    working = working_bytes(pair, shape, guided=request.guided, chunk_tokens=chunk, share=share, cache=cache)
    return pair.device_bytes(policy, device=groups.device) + working


def _worst(groups: ProcessGroups, figures: list[float]) -> list[float]:
    """Return the maximum of each figure over the workers of the group."""
    worst = torch.tensor(figures, dtype=torch.float64)
    with groups.translate_errors("compared the needs of a run"):
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=groups.control)
    return [float(value) for value in worst]
