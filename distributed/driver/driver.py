"""Driver: distributes runs over the workers in a pool, and merges their results.

    driver = Driver(pool, ref, Mesh(stage=2))
    result = driver.denoise(experts, request, policy)

Each video goes to one worker group per stage, one stage after the other. The workers in a group
compute the same steps together. The driver keeps a recent state for every video (see
`WorkerGroup`), also on disk if it is given a folder.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from ...block_kernels import arithmetic_of
from ...devices import AUTO, common_dtype, dtype_name
from ...sampling import SavedRun, file_versions, state_bytes
from ...sampling.inputs import DenoiseRequest, split_request
from ...sampling.steps import RequestError, RunState, SamplingCancelled, StepProgress
from ...schema import Mesh, OffloadPolicy, StateError
from ...schema.refs import CodeFormat, ExpertsRef, WorkersRef
from ..messages import RunTask, StepReport, WorkerFacts
from ..path_map import check_paths, paths_of
from ..plan.jobs import GroupId
from ..plan.stages import part_sizes, stage_boundaries
from ..transport.pool import Pool, WorkerLostError
from ..transport.threads import run_in_thread, wait_polling
from .rendezvous import Rendezvous
from .results import DistributedResult, TaskLog
from .stage_run import RestartLimitError, StageRun
from .worker_group import WorkerGroup

logger = logging.getLogger("wanstream.distributed")

OnStep: TypeAlias = "Callable[[StepProgress], None]"

MEASURE_S = 120.0
"""Time limit for measuring a block on all workers."""
HANDOVER_S = 60.0
"""Shortest interval between two group states. Losing the leader costs this much compute, and the
start of another worker."""
HANDOVER_BYTES_PER_S = 10e6
"""Highest rate for states from all groups together, over the network and to the driver's disk: a
twelfth of a 1 Gb/s line."""


def handover_interval_s(nbytes: int, groups: int) -> float:
    """Return the interval at which each of `groups` hands over a state with `nbytes`.

    More groups make it longer.
    """
    return max(HANDOVER_S, nbytes * groups / HANDOVER_BYTES_PER_S)


class Driver:
    """Computes runs on a worker pool, laid out as a mesh.

    One run at a time. The caller closes the pool.

    Args:
        pool: at least as many workers as the mesh has.
        ref: timeout, restarts, path maps and weight placement.
        follows: former driver of these workers; it gets no more runs. This driver waits for a
            repair in progress there.
    """

    def __init__(
        self, pool: Pool, ref: WorkersRef, mesh: Mesh, *, follows: Driver | None = None
    ) -> None:
        if mesh.size > len(pool.workers):
            raise ValueError(
                f"{mesh}: a layout of {mesh.size} workers, but there are {len(pool.workers)}"
            )
        self.ref = ref
        self.mesh = mesh
        self._follows = follows
        self._running = threading.Lock()
        self._pool = pool
        layout = replace(mesh, data=1, stage=1)
        self._groups = {
            GroupId(*place): Rendezvous(pool, ref, mesh.worker_group(*place), layout)
            for place in mesh.worker_groups()
        }

    @property
    def is_running(self) -> bool:
        return self._running.locked()

    @property
    def workers(self) -> list[tuple[Sequence[int], tuple[WorkerFacts, ...]]]:
        """Ranks and facts for each group's workers at the last rendezvous.

        Without facts before the first run.
        """
        return [(group.ranks, group.facts) for group in self._groups.values()]

    def denoise(
        self,
        experts: ExpertsRef,
        request: DenoiseRequest,
        policy: OffloadPolicy,
        on_step: OnStep = lambda step: None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        preview_s: float | None = None,
        states: Path | None = None,
        is_cancel: Callable[[BaseException], bool] = lambda error: False,
    ) -> DistributedResult:
        """Compute one request.

        The samples are distributed if the mesh has data or stages. Otherwise they are lanes.

        Args:
            on_step: called on this thread, once for every step in every part. `done` and `total`
                count the steps in all parts.
            should_stop: called often, on this thread.
            preview_s: shortest interval between two values of `denoised`. Only the part with the
                first sample has them; None: no part.
            states: folder for each part's last state. A run whose process was killed continues from
                them when it is started again. They are removed at the end and after a cancel, not
                after errors.
            is_cancel: True for an `on_step` error that cancels the run.

        Raises:
            SamplingCancelled: `should_stop` returned True. The workers are usable again at once, as
                after any error.
            MissingPathError: a file is missing on a worker's machine.
            WorkerFailedError: a worker cannot compute the task.
            RestartLimitError: a group had more losses than `ref.max_restarts`; the message has the
                last one.
            MeshError: the mesh has more stages than the request has steps.
        """
        parts = split_request(request, part_sizes(request.batch, self.mesh))

        def check() -> None:
            if should_stop():
                raise SamplingCancelled(request.start_step, 0)

        with self._exclusive():
            log = TaskLog()
            facts = self._connect(experts, check)
            # The arithmetic is measured in the compute dtype, so the dtype is chosen first.
            experts = _in_one_dtype(experts, facts)
            experts = self._in_one_arithmetic(experts, facts, check)
            handover_s = None
            # Without restarts, a lost worker ends the run, so nobody would use a state.
            if self.ref.max_restarts:
                handover_s = handover_interval_s(max(map(state_bytes, parts)), len(self._groups))
            task = RunTask(
                experts=experts,
                request=request,
                policy=policy,
                paths=self.ref.paths,
                handover_s=handover_s,
            )
            tasks = [replace(task, request=part) for part in parts]
            tasks[0] = replace(tasks[0], preview_s=preview_s)
            # Everything else that determines the result. The layout changes it only by rounding.
            inputs = experts, file_versions(paths_of(experts)), facts[0].sizes, policy.chunk_tokens
            with (
                SavedRun(states, parts, inputs, log.add_change, is_cancel) as saved,
                self._pool.share(parts),
            ):
                progress = MergedProgress(request.step_plan.steps, saved, on_step)
                groups = {
                    place: WorkerGroup(group, tasks, progress.states, log)
                    for place, group in self._groups.items()
                }
                begun = zip(parts, progress.states, strict=True)
                steps = [stage_steps(part, self.mesh.stage, state) for part, state in begun]
                run = StageRun(steps, groups, max_restarts=self.ref.max_restarts)
                run.run(progress.add, should_stop)
        return log.result(parts[0].step_plan.end_sigma, progress.states, restarts=run.schedule.lost)

    def disable(self) -> None:
        """Turn all later repairs into no-ops, because another driver has the workers.

        Waits for repairs in progress.
        """
        for group in self._groups.values():
            group.disable()

    def _in_one_arithmetic(
        self, experts: ExpertsRef, facts: Sequence[WorkerFacts], check: Callable[[], None]
    ) -> ExpertsRef:
        """Replace the arithmetic values "as stored" and "auto" by one for all workers.

        Workers with different arithmetic would compute different results, and their shards would
        differ in size.
        """
        if experts.arithmetic == "as stored":
            formats = [each.multiplied for each in facts]
        elif experts.arithmetic == AUTO:
            formats = self._fast_formats(experts, check)
        else:
            return experts
        common = [fmt for fmt in formats[0] if all(fmt in each for each in formats)]
        logger.info("arithmetic %s: %s on all workers", experts.arithmetic, arithmetic_of(common))
        return replace(experts, arithmetic=arithmetic_of(common))

    def _fast_formats(
        self, experts: ExpertsRef, check: Callable[[], None]
    ) -> list[tuple[CodeFormat, ...]]:
        """Measure all workers at once. If one fails or is too slow, all workers decode."""
        workers = [worker for group in self._groups.values() for worker in group.workers]
        requests = [worker.call("fast_formats", experts, self.ref.paths) for worker in workers]
        wait_polling(requests, check, MEASURE_S)
        for worker, request in zip(workers, requests, strict=True):
            error: object = f"no answer within {MEASURE_S:g} s"
            if request.done():
                error = request.exception()
            if error is not None:
                # Not an error here. If a file is missing, for example, the run raises an error for
                # it.
                text = "arithmetic auto: decoded, because worker %d cannot measure: %s"
                logger.warning(text, worker.rank, error)
                return [()]
        return [each.result() for each in requests]

    def _connect(self, experts: ExpertsRef, check: Callable[[], None]) -> list[WorkerFacts]:
        """Connect all workers in groups that are not joined yet, all at once.

        Returns facts for all workers.
        """
        paths = [str(path) for path in paths_of(experts)]
        connecting = [
            run_in_thread("wanstream-connect", self._connect_group, group, paths)
            for group in self._groups.values()
        ]
        answers = wait_polling(connecting, check)
        facts = [each for answer in answers for each in answer.result()]
        check_paths(facts, self.ref.paths)
        return facts

    def _connect_group(self, group: Rendezvous, paths: Sequence[str]) -> tuple[WorkerFacts, ...]:
        """Connect a group, in as many tries as a run may restart workers.

        These losses do not count for the run.
        """
        # Groups connect on several threads, and another one may set None after this read.
        former = self._follows
        if former is not None:
            former.disable()
            self._follows = None
        for _ in range(self.ref.max_restarts):
            with suppress(WorkerLostError):
                return group.connect(paths)
        # The last try raises.
        try:
            return group.connect(paths)
        except WorkerLostError as err:
            raise RestartLimitError.after(err, self.ref.max_restarts) from err

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # Does not wait: the other run may take hours, and nothing could cancel this call.
        if not self._running.acquire(blocking=False):
            raise StateError("this driver computes a run: wait for its end, or cancel it")
        try:
            yield
        finally:
            self._running.release()


def _in_one_dtype(experts: ExpertsRef, facts: Sequence[WorkerFacts]) -> ExpertsRef:
    """Replace the compute dtype "auto" by one that all workers support."""
    if experts.compute_dtype != AUTO:
        return experts
    dtype = common_dtype([getattr(torch, each.auto_dtype) for each in facts])
    logger.info("compute_dtype auto: the blocks compute in %s on all workers", dtype_name(dtype))
    return replace(experts, compute_dtype=dtype_name(dtype))


def stage_steps(request: DenoiseRequest, stages: int, begun: RunState | None = None) -> list[range]:
    """Return the steps for each stage, cut at the switch of experts first, then by lanes.

    Excludes steps before the state `begun`. Raises MeshError for more stages than steps.
    """
    step_plan = request.step_plan
    experts = [step_plan.experts[step] for step in step_plan.steps]
    lanes = [float(request.lanes_at(step)) for step in step_plan.steps]
    start = step_plan.start_step
    first = start if begun is None else begun.next_step
    cuts = stage_boundaries(experts, lanes, stages)
    # Cut before `begun` is applied, so that a continued run keeps the same stages.
    return [range(max(start + each.start, first), max(start + each.stop, first)) for each in cuts]


class MergedProgress:
    """Progress of a run in several parts.

    Args:
        saved: states at the start, by part, and the place for new ones.
        on_step: called with the progress after every step, once per step.
    """

    def __init__(self, steps: range, saved: SavedRun, on_step: OnStep) -> None:
        self.states = saved.load()
        """Last state of each part, in sample order."""
        self._steps = steps
        self._saved = saved
        self._on_step = on_step
        self._next = [steps.start if state is None else state.next_step for state in self.states]
        """First unreported step by part. After a loss, another worker repeats the steps after
        the last state."""

    def add(self, part: int, news: StepReport | RunState) -> None:
        """Add a step in one part, reported by the group's leader, or a state without a step."""
        if isinstance(news, RunState):
            self._keep(part, news)
            return
        # Before the check below: a repeated step may bring a state that was lost before.
        if news.state is not None:
            self._keep(part, news.state)
        next_step = news.record.index + 1
        if next_step <= self._next[part]:
            return
        self._next[part] = next_step
        # With several parts, a state holds the samples of one part only, so a step has none.
        parts = len(self._next)
        state = None
        if parts == 1:
            state = news.state
        progress = StepProgress(
            record=news.record,
            done=sum(self._next) - parts * self._steps.start,
            total=parts * len(self._steps),
            denoised=news.denoised,
            state=partial(_state, state),
            part=part,
        )
        self._on_step(progress)

    def _keep(self, part: int, state: RunState) -> None:
        self.states[part] = state
        self._saved.save(part, state)


def _state(state: RunState | None) -> RunState:
    if state is None:
        raise RequestError(
            "a worker keeps the state after this step, or the samples of the run are at different "
            "steps"
        )
    return state
