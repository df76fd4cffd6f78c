"""Where the workers of a group keep their weights: as their rendezvous says, or as they find out together."""

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
"""How long a worker tries how fast it computes; with `probe_weights` that stays below two seconds."""

logger = logging.getLogger("wanstream.workers")


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptWeights:
    """What a worker tells its experts before a run."""

    sharded: Sharded | None = None
    """None: whole weights."""
    reason: str = ""
    """Why, with the numbers, where the workers have decided."""


class GroupWeights:
    """The weights of one worker in one rendezvous.

    Where the rendezvous leaves it to them, the workers of a group measure and decide before their first run with
    blocks of
    a size, all of them the same, as they decide from the same figures. On CPUs weights stay whole: their RAM is what
    they compute in, and holds them once for all workers of a machine.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        # One for each home: another object is another rendezvous to the experts.
        self._sharded: dict[WeightPlacement, Sharded] = {}
        self._choices: dict[int, PlacementChoice] = {}

    def of(self, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> KeptWeights:
        """What to keep for a run, which all workers of the group are about to begin.

        Raises HungError and PeerLostError, as everything that workers do together.
        """
        home = self._groups.rendezvous.weights
        if self._groups.size == 1 or home == WHOLE_WEIGHTS:
            return KeptWeights()
        if home != "auto":
            return KeptWeights(sharded=self._in(home))
        if self._groups.device.type == "cpu":
            return KeptWeights()
        choice = self._choices.get(pair.stored_bytes)
        if choice is None:
            choice = choose_placement(measure(self._groups, pair, request, policy))
            self._choices[pair.stored_bytes] = choice
            logger.info("%s", choice.reason)
        return KeptWeights(sharded=self._in(choice.home), reason=choice.reason)

    def abort(self) -> None:
        """Let whoever waits in a gather leave it (any thread)."""
        for sharded in tuple(self._sharded.values()):  # a run that begins may add one
            sharded.gather.abort()

    def _in(self, home: WeightPlacement) -> Sharded | None:
        if home == WHOLE_WEIGHTS:
            return None
        if home not in self._sharded:
            self._sharded[home] = Sharded(gather=GroupGather(self._groups), on_device=home == ON_DEVICE)
        return self._sharded[home]


def measure(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> WeightFigures:
    """The figures of this group for runs like that one; the same for every worker. All of them call it at once.

    Raises HungError and PeerLostError.
    """
    times = probe_weights(groups, pair.stored_bytes)
    visit_s, lacking = _worst(groups, [_visit_s(groups, pair, request), -_free_bytes(groups, pair, request, policy)])
    return WeightFigures(
        workers=groups.size,
        block_bytes=pair.stored_bytes,
        blocks=sum(pair.block_counts.values()),
        visit_s=visit_s,
        free_bytes=max(0, int(-lacking)),
        **asdict(times),
    )


def _visit_s(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest) -> float:
    """Seconds of this worker's share of one block."""
    job = request_job(pair, request, groups.device)
    mesh = groups.mesh
    lanes = math.ceil(max(job.lanes.values()) / mesh.cfg)
    shares = mesh.ring * mesh.ulysses
    tokens = math.ceil(job.tokens / shares)
    rate = probe_block(job.expert, tokens, groups.device, most_s=COMPUTE_PROBE_S).flops_per_s
    return lanes * job.expert.block_flops(job.tokens) / shares / rate


def _free_bytes(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> float:
    """Memory of the device beside what the run takes with whole weights; that of a CPU is RAM."""
    free = free_bytes(groups.device)
    if free is None:
        free = available_bytes()
    return free + pair.loaded_bytes - taken_bytes(groups, pair, request, policy)


def taken_bytes(groups: ProcessGroups, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy) -> int:
    """Memory of the device that this worker takes for its share of a run, with whole weights."""
    shape, share = request.computed_shape, groups.split().share
    chunk, cache = policy.chunk_tokens, request.cache
    working = working_bytes(pair, shape, guided=request.guided, chunk_tokens=chunk, share=share, cache=cache)
    return pair.device_bytes(policy, device=groups.device) + working


def _worst(groups: ProcessGroups, figures: list[float]) -> list[float]:
    """The largest of each figure among the workers of the group."""
    own = torch.tensor(figures, dtype=torch.float64)
    with groups.watched("compared what a run takes"):
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=groups.control)
    return [float(value) for value in own]
