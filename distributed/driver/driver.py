"""The driver: gives runs to the workers of a pool and puts together what they make.

    driver = Driver(pool, ref, Mesh(stage=2))
    ran = driver.denoise(experts, request, policy)

Videos go to different groups, their stages one after the other; the workers of a group compute the same steps together.
The driver keeps the last state of every video, so that nothing but the step that was being taken is lost with a worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TypeAlias

import torch

from ...devices import AUTO, common_dtype, dtype_name
from ...sampling import DenoiseRequest, SamplingCancelled, StepProgress, split_request
from ...schema import ExpertsRef, Mesh, OffloadPolicy, StateError, WorkersRef
from ..messages import StepReport, WorkerFacts
from ..transport.path_map import check_paths, paths_of
from ..transport.pool import Pool, WorkerLostError
from ..transport.threads import on_own_thread
from .partition import MergedProgress, part_sizes, stage_steps
from .rendezvous import Rendezvous
from .results import DistributedResult, TaskLog, make_result
from .schedule import GroupId, JobSchedule
from .stage_run import POLL_S, RestartLimitError, StageRun, StageStepped
from .worker_group import Work, WorkerGroup

logger = logging.getLogger("wanstream.distributed")

ShouldStop: TypeAlias = "Callable[[], bool]"
Show: TypeAlias = "Callable[[int, StepReport], None]"


class DriverState(Enum):
    """Where a driver is; the value completes the sentence "this driver ..."."""

    IDLE = "has nothing to do"
    RUNNING = "computes a run"


class Driver:
    """Has the workers of a pool compute runs, laid out as a mesh. One run at a time; the pool stays the caller's.

    Args:
        pool: at least as many workers as the mesh has.
        ref: how long workers wait for each other, how many losses a run survives, and where their files are.
        follows: had these workers before and computes nothing more; what it still mends is waited for.
    """

    def __init__(self, pool: Pool, ref: WorkersRef, mesh: Mesh, *, follows: Driver | None = None) -> None:
        if mesh.size > len(pool.workers):
            raise ValueError(f"{mesh}: a layout of {mesh.size} workers, but there are {len(pool.workers)}")
        self.mesh = mesh
        self._ref, self._follows = ref, follows
        self._state = DriverState.IDLE
        self._lock = threading.Lock()
        self._rendezvous, layout = Rendezvous(pool, ref), replace(mesh, data=1, stage=1)
        self._groups = {
            GroupId(*place): WorkerGroup(
                GroupId(*place), pool, mesh.worker_group(*place), layout, self._rendezvous, ref.timeout_s
            )
            for place in mesh.worker_groups()
        }

    @property
    def state(self) -> DriverState:
        return self._state

    @property
    def is_running(self) -> bool:
        return self._state is DriverState.RUNNING

    def denoise(
        self,
        experts: ExpertsRef,
        request: DenoiseRequest,
        policy: OffloadPolicy,
        on_step: Callable[[StepProgress], None] | None = None,
        should_stop: ShouldStop | None = None,
    ) -> DistributedResult:
        """Compute one request. Its samples are shared out where the mesh has data or stages; otherwise they are lanes.

        Args:
            on_step: told every step of every part, on this thread; `done` and `total` count those of all parts, and
                `denoised` has all samples, on the CPU; those that have not begun are noise.
            should_stop: asked often, on this thread.

        Raises:
            Cancelled: `should_stop` returned True. The workers can be used again at once, as after any error.
            MissingPathError: a file is not there on the machine of a worker; says which, and where.
            WorkerFailedError: a worker cannot compute it; says which, and what it raised.
            GivenUpError: more was lost than `ref.max_restarts`, with what is known of the last loss.
            MeshError: the mesh has more stages than the request can be cut into.
        """
        parts = split_request(request, part_sizes(request.batch, self.mesh))
        show = None if on_step is None else MergedProgress(parts, on_step).show
        with self._running():
            notes = TaskLog()
            run = self._run(parts, show=show, should_stop=should_stop)
            ended = self._compute(run, self._work(experts, parts, policy, notes), should_stop)
        return make_result(parts, range(len(parts)), ended, notes, restarts=run.schedule.lost)

    def queue(
        self,
        experts: ExpertsRef,
        requests: Sequence[DenoiseRequest],
        policy: OffloadPolicy,
        on_step: Callable[[int, StepProgress], None] | None = None,
        on_ran: Callable[[int, DistributedResult], None] | None = None,
        should_stop: ShouldStop | None = None,
    ) -> list[DistributedResult]:
        """Compute several requests, as many at once as there are groups; the samples of each share its passes.

        Args:
            on_step: told (number of the request, its step) on this thread.
            on_ran: told (number of the request, what came of it) on this thread, as soon as it is done.

        Raises as `denoise`; what was done by then was told.
        """
        made: dict[int, DistributedResult] = {}
        with self._running():
            notes = TaskLog()

            def done(number: int, told: StepReport) -> None:
                made[number] = make_result([requests[number]], [number], [told], notes, restarts=run.schedule.lost)
                if on_ran is not None:
                    on_ran(number, made[number])

            show = None if on_step is None else _shown_apart(requests, on_step)
            run = self._run(requests, show=show, done=done, should_stop=should_stop)
            self._compute(run, self._work(experts, requests, policy, notes), should_stop)
        return [made[number] for number in range(len(requests))]

    def retire(self) -> None:
        """Mend no group any more, as the workers are another driver's; waits for what is being mended now."""
        for group in self._groups.values():
            group.retire()

    def _run(
        self,
        parts: Sequence[DenoiseRequest],
        *,
        show: Show | None,
        done: Show | None = None,
        should_stop: ShouldStop | None,
    ) -> StageRun[StepReport]:
        """A run of these parts, which has not begun."""

        def on_step(step: StageStepped[StepReport]) -> None:
            if show is not None:
                show(step.job.item, step.state)

        steps = [stage_steps(part, self.mesh.stage) for part in parts]
        return StageRun(
            JobSchedule.of(steps, data=self.mesh.data, max_restarts=self._ref.max_restarts),
            self._groups,
            [None] * len(parts),
            on_step=on_step,
            on_done=done,
            should_stop=should_stop,
        )

    def _work(
        self, experts: ExpertsRef, requests: Sequence[DenoiseRequest], policy: OffloadPolicy, notes: TaskLog
    ) -> Work:
        return Work(
            requests=requests,
            experts=experts,
            paths=self._ref.paths,
            policy=policy,
            notes=notes,
        )

    def _compute(self, run: StageRun[StepReport], work: Work, should_stop: ShouldStop | None) -> list[StepReport]:
        """Bring the workers together, and let them compute."""
        facts = self._gather(work, should_stop)
        work = replace(work, experts=_in_one_dtype(work.experts, facts))
        for group in self._groups.values():
            group.take_up(work)
        return run.go()

    def _gather(self, work: Work, should_stop: ShouldStop | None) -> list[WorkerFacts]:
        """Let the workers of each group meet, those that are not together; all groups at once. Returns their facts."""
        paths = [str(path) for path in paths_of(work.experts)]
        groups = self._groups.values()
        rendezvous = [on_own_thread("wanstream-meet", self._gather_group, group, paths) for group in groups]
        while wait(rendezvous, timeout=POLL_S).not_done:
            if should_stop is not None and should_stop():
                raise SamplingCancelled(work.requests[0].start_step, 0)
        every = [facts for each in rendezvous for facts in each.result()]
        check_paths(every, self._ref.paths)
        return every

    def _gather_group(self, group: WorkerGroup, paths: Sequence[str]) -> tuple[WorkerFacts, ...]:
        """As often as losses are made good; these count for no run."""
        former = self._follows
        if former is not None:
            former.retire()
            self._follows = None
        for _ in range(self._ref.max_restarts):
            with suppress(WorkerLostError):
                return group.gather(paths)
        try:
            return group.gather(paths)
        except WorkerLostError as err:
            raise RestartLimitError.after(err, self._ref.max_restarts) from err

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._lock:
            if self._state is not DriverState.IDLE:
                raise StateError(f"this driver {self._state.value}: wait for it, or cancel it")
            self._state = DriverState.RUNNING
        try:
            yield
        finally:
            self._state = DriverState.IDLE


def _in_one_dtype(experts: ExpertsRef, facts: Sequence[WorkerFacts]) -> ExpertsRef:
    """The experts, with a dtype for all workers in place of "auto": their results would differ in different ones."""
    if experts.compute_dtype != AUTO:
        return experts
    dtype = common_dtype([getattr(torch, each.auto_dtype) for each in facts])
    logger.info("compute_dtype auto: the blocks compute in %s on all workers", dtype_name(dtype))
    return replace(experts, compute_dtype=dtype_name(dtype))


def _shown_apart(
    requests: Sequence[DenoiseRequest], on_step: Callable[[int, StepProgress], None]
) -> Callable[[int, StepReport], None]:
    """Each request's steps as those of a run of its own; what is shown of a request is kept until its last step."""
    going: dict[int, MergedProgress] = {}

    def show(number: int, told: StepReport) -> None:
        progress = going.pop(number, None) or MergedProgress([requests[number]], partial(on_step, number))
        if told.done < told.total:
            going[number] = progress
        progress.show(0, told)

    return show
