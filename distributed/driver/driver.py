"""Driver: distributes runs over the workers of a pool, and merges their results.

    driver = Driver(pool, ref, Mesh(stage=2))
    result = driver.denoise(experts, request, policy)

Videos go to different groups of workers, their stages one after the other. The workers of a group compute the same
steps together. The driver has a recent state of every video (see `WorkerGroup`), also on disk if it is given a folder.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...devices import AUTO, common_dtype, dtype_name
from ...plan import GroupId, part_sizes, stage_boundaries
from ...sampling import (
    DenoiseRequest,
    RequestError,
    RunState,
    SamplingCancelled,
    SavedRun,
    StepProgress,
    file_versions,
    split_request,
    state_bytes,
)
from ...schema import CodeFormat, ExpertsRef, Mesh, OffloadPolicy, StateError, WorkersRef
from ...wan import arithmetic_of
from ..messages import RunTask, StepReport, WorkerFacts
from ..transport.path_map import check_paths, paths_of
from ..transport.pool import Pool, WorkerLostError
from ..transport.threads import run_in_thread
from .rendezvous import Rendezvous
from .results import DistributedResult, TaskLog
from .stage_run import POLL_S, RestartLimitError, StageRun, StepTaken
from .worker_group import WorkerGroup

logger = logging.getLogger("wanstream.distributed")

ShouldStop: TypeAlias = "Callable[[], bool]"
OnStep: TypeAlias = "Callable[[StepProgress], None]"

MEASURE_S = 120.0
"""Limit for the measurement of a block on all workers."""
HANDOVER_S = 60.0
"""Shortest interval between two states of a group: what the loss of its leader costs, and the start of another one."""
HANDOVER_BYTES_PER_S = 10e6
"""Highest rate of the states of all groups together, a twelfth of a line of 1 Gb/s, and of the driver's disk."""


def handover_interval_s(nbytes: int, groups: int) -> float:
    """Return the interval at which each of `groups` hands over a state of `nbytes`: longer for many groups."""
    return max(HANDOVER_S, nbytes * groups / HANDOVER_BYTES_PER_S)


class Driver:
    """Computes runs on the workers of a pool, laid out as a mesh. One run at a time; `close` of the pool is not called.

    Args:
        pool: at least as many workers as the mesh has.
        ref: how long workers wait for each other, how many losses a run survives, and where their files are.
        follows: former driver of these workers, which gets no more runs. A repair that it has not finished is awaited.
    """

    def __init__(self, pool: Pool, ref: WorkersRef, mesh: Mesh, *, follows: Driver | None = None) -> None:
        if mesh.size > len(pool.workers):
            raise ValueError(f"{mesh}: a layout of {mesh.size} workers, but there are {len(pool.workers)}")
        self.ref, self.mesh, self._follows = ref, mesh, follows
        self._running, self._pool = threading.Lock(), pool
        layout = replace(mesh, data=1, stage=1)
        self._groups = {
            GroupId(*place): WorkerGroup(Rendezvous(pool, ref, mesh.worker_group(*place), layout))
            for place in mesh.worker_groups()
        }

    @property
    def is_running(self) -> bool:
        return self._running.locked()

    @property
    def workers(self) -> list[tuple[Sequence[int], tuple[WorkerFacts, ...]]]:
        """Ranks and facts of the workers of each group at their last rendezvous; no facts before the first run."""
        return [(group.rendezvous.ranks, group.rendezvous.facts) for group in self._groups.values()]

    def denoise(
        self,
        experts: ExpertsRef,
        request: DenoiseRequest,
        policy: OffloadPolicy,
        on_step: OnStep | None = None,
        should_stop: ShouldStop | None = None,
        *,
        preview_s: float | None = None,
        states: Path | None = None,
    ) -> DistributedResult:
        """Compute one request. Its samples are distributed if the mesh has data or stages; otherwise they are lanes.

        Args:
            on_step: called on this thread with every step of every part, once. `done` and `total` count the steps of
                all parts.
            should_stop: called often, on this thread.
            preview_s: shortest interval between two values of `denoised`, which the part with the first sample has;
                None: no part has it.
            states: folder for the last state of every part. A run whose process was killed continues from its states
                when it is started again. They are removed at its end and after a cancel, not after errors.

        Raises:
            SamplingCancelled: `should_stop` returned True. The workers can be used again at once, as after any error.
            MissingPathError: a file is missing on the machine of a worker.
            WorkerFailedError: a worker cannot compute the task.
            RestartLimitError: more losses of a group than `ref.max_restarts`; the message has the last one.
            MeshError: the mesh has more stages than the request has steps.
        """
        parts = split_request(request, part_sizes(request.batch, self.mesh))
        with self._exclusive():
            log = TaskLog()
            facts = self._connect(experts, parts[0].start_step, should_stop)
            experts = _in_one_dtype(experts, facts)
            experts = self._in_one_arithmetic(experts, facts, parts[0].start_step, should_stop)
            interval_s = handover_interval_s(max(map(state_bytes, parts)), len(self._groups))
            tasks = [
                RunTask(
                    experts=experts,
                    request=part,
                    policy=policy,
                    paths=self.ref.paths,
                    # Without restarts, a lost worker ends the run whatever the driver has.
                    handover_s=interval_s if self.ref.max_restarts else None,
                    preview_s=None if number else preview_s,
                )
                for number, part in enumerate(parts)
            ]
            # Everything else that determines the result. The layout does not, up to rounding.
            inputs = experts, file_versions(paths_of(experts)), facts[0].sizes, policy.chunk_tokens
            with SavedRun(states, parts, inputs, log.add_change) as saved, self._pool.share(parts):
                begun = saved.load()
                for group in self._groups.values():
                    group.assign(tasks, log)
                steps = [stage_steps(part, self.mesh.stage, state) for part, state in zip(parts, begun, strict=True)]
                run = StageRun(steps, self._groups, begun, max_restarts=self.ref.max_restarts)
                ended = run.run(MergedProgress(request.step_plan.steps, begun, on_step, saved).add, should_stop)
        return log.result(parts[0].step_plan.end_sigma, ended, restarts=run.schedule.lost)

    def disable(self) -> None:
        """Make all later repairs do nothing, because another driver has the workers. Waits for repairs in progress."""
        for group in self._groups.values():
            group.rendezvous.disable()

    def _in_one_arithmetic(
        self, experts: ExpertsRef, facts: Sequence[WorkerFacts], start_step: int, should_stop: ShouldStop | None
    ) -> ExpertsRef:
        """Replace the arithmetic values "as stored" and "auto" by one that suits all workers.

        In different ones their results would differ, and with shards their blocks would have different sizes.
        """
        if experts.arithmetic == "as stored":
            formats = [each.multiplied for each in facts]
        elif experts.arithmetic == AUTO:
            formats = self._fast_formats(experts, start_step, should_stop)
        else:
            return experts
        common = [fmt for fmt in formats[0] if all(fmt in each for each in formats)]
        logger.info("arithmetic %s: %s on all workers", experts.arithmetic, arithmetic_of(common))
        return replace(experts, arithmetic=arithmetic_of(common))

    def _fast_formats(
        self, experts: ExpertsRef, start_step: int, should_stop: ShouldStop | None
    ) -> list[tuple[CodeFormat, ...]]:
        """Measure all workers at once. If one of them fails or is too slow, all workers decode."""
        workers = [worker for group in self._groups.values() for worker in group.rendezvous.workers]
        requests = [worker.call("fast_formats", experts, self.ref.paths) for worker in workers]
        _wait_for(requests, start_step, should_stop, MEASURE_S)
        for worker, request in zip(workers, requests, strict=True):
            error = request.exception() if request.done() else f"no answer within {MEASURE_S:g} s"
            if error is not None:
                # A missing file, say: the run names it.
                logger.warning("arithmetic auto: decoded, because worker %d cannot measure: %s", worker.rank, error)
                return [()]
        return [each.result() for each in requests]

    def _connect(self, experts: ExpertsRef, start_step: int, should_stop: ShouldStop | None) -> list[WorkerFacts]:
        """Connect the workers of all groups at once, those that are not joined yet. Returns their facts."""
        paths = [str(path) for path in paths_of(experts)]
        connecting = [
            run_in_thread("wanstream-connect", self._connect_group, group.rendezvous, paths)
            for group in self._groups.values()
        ]
        _wait_for(connecting, start_step, should_stop)
        facts = [each for future in connecting for each in future.result()]
        check_paths(facts, self.ref.paths)
        return facts

    def _connect_group(self, group: Rendezvous, paths: Sequence[str]) -> tuple[WorkerFacts, ...]:
        """Connect a group, in as many tries as a run may restart workers. Losses here do not count for the run."""
        former = self._follows
        if former is not None:
            former.disable()
            self._follows = None
        for _ in range(self.ref.max_restarts):
            with suppress(WorkerLostError):
                return group.connect(paths)
        try:
            return group.connect(paths)
        except WorkerLostError as err:
            raise RestartLimitError.after(err, self.ref.max_restarts) from err

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise StateError("this driver computes a run: wait for its end, or cancel it")
        try:
            yield
        finally:
            self._running.release()


def _wait_for(
    requests: Sequence[Future[Any]], start_step: int, should_stop: ShouldStop | None, limit_s: float = math.inf
) -> None:
    """Wait for all requests, for `limit_s` at most. Raises SamplingCancelled if `should_stop` returns True."""
    until = time.monotonic() + limit_s
    while wait(requests, timeout=POLL_S).not_done and time.monotonic() < until:
        if should_stop is not None and should_stop():
            raise SamplingCancelled(start_step, 0)


def _in_one_dtype(experts: ExpertsRef, facts: Sequence[WorkerFacts]) -> ExpertsRef:
    """Replace the compute dtype "auto" by one in which all workers can compute."""
    if experts.compute_dtype != AUTO:
        return experts
    dtype = common_dtype([getattr(torch, each.auto_dtype) for each in facts])
    logger.info("compute_dtype auto: the blocks compute in %s on all workers", dtype_name(dtype))
    return replace(experts, compute_dtype=dtype_name(dtype))


def stage_steps(request: DenoiseRequest, stages: int, begun: RunState | None = None) -> list[range]:
    """Return the steps of each stage, cut at the switch of experts first, then by the number of lanes to compute.

    Steps before the state `begun` are left out. Raises MeshError if there are more stages than steps.
    """
    step_plan = request.step_plan
    experts = [step_plan.experts[step] for step in step_plan.steps]
    lanes = [float(request.lanes_at(step)) for step in step_plan.steps]
    start = step_plan.start_step
    first = start if begun is None else begun.next_step
    cuts = stage_boundaries(experts, lanes, stages)
    return [range(max(start + each.start, first), max(start + each.stop, first)) for each in cuts]


class MergedProgress:
    """Progress of a run that is computed in several parts.

    Args:
        begun: state that each part starts from, in the order of their samples.
        on_step: called with the progress after every step that was not reported before.
        saved: where new states are saved.
    """

    def __init__(self, steps: range, begun: Sequence[RunState | None], on_step: OnStep | None, saved: SavedRun) -> None:
        self._steps, self._on_step, self._saved = steps, on_step, saved
        self._next = [steps.start if state is None else state.next_step for state in begun]
        """First step of each part that was not reported yet. Steps after the last state of a lost worker come again."""

    def add(self, part: int, step: StepTaken[RunState]) -> None:
        """Add a step of one part, reported by the leader of its group, or its state."""
        if step.state is not None:
            self._saved.save(part, step.state)
        report: StepReport | None = step.report
        if report is None or self._on_step is None or step.next_step <= self._next[part]:
            return
        self._next[part] = step.next_step
        parts = len(self._next)
        progress = StepProgress(
            record=report.record,
            done=sum(self._next) - parts * self._steps.start,
            total=parts * len(self._steps),
            denoised=report.denoised,
            state=partial(_state, step.state if parts == 1 else None),
            part=part,
        )
        self._on_step(progress)


def _state(state: RunState | None) -> RunState:
    if state is None:
        raise RequestError("a worker keeps the state after this step, or the samples of the run are at different steps")
    return state
