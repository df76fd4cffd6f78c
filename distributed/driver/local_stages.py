"""Stages of any model with a step function, each on a thread of this process or in a process of its own.

    with StepProcess(make_step, "cuda:0") as first, StepProcess(make_step, "cuda:1") as second:
        states = run_stages([first, second], initial_states, steps=28)

No model of this package uses it; `docs/examples/svd_stages.py` is an example with SVD's UNet.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from multiprocessing import connection
from typing import Generic, TypeAlias, TypeVar

from ...plan import Assignment, GroupId
from ...sampling import SamplingCancelled
from ..transport.pool import WorkerLostError
from ..transport.threads import run_in_thread
from .stage_run import GroupEnd, GroupEvent, StageRun, StepTaken

S = TypeVar("S")

END_TIMEOUT_S = 10.0
"""Seconds that a process may take to end after SIGTERM, and again after SIGKILL."""

StepFunction: TypeAlias = "Callable[[S, int], S]"
"""(state, step) -> the state after that step, as a new value; the given state is not changed."""


class StepGroup(Generic[S]):
    """Compute jobs by `step` on a thread; implements `StageGroup`.

    A step that raises WorkerLostError is repeated from the state before it, as often as the run permits.
    """

    def __init__(self, step: StepFunction[S]) -> None:
        self._step = step
        self._is_stopped = threading.Event()
        self._inbox: queue.SimpleQueue[GroupEvent[S]] = queue.SimpleQueue()

    def start(self, assignment: Assignment, state: S | None, wake: threading.Event) -> None:
        """See `StageGroup.start`. Raises TypeError for a state of None."""
        state = _checked(state, f"the state of item {assignment.item}")
        self._is_stopped.clear()
        run_in_thread("wanstream-stage", self._compute, assignment, state, wake)

    def poll(self) -> list[GroupEvent[S]]:
        """See `StageGroup.poll`."""
        # Only this thread takes events out, so that as many as were counted can be taken without waiting.
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def stop(self) -> None:
        """See `StageGroup.stop`. The job ends before its next step."""
        self._is_stopped.set()

    def repair(self, wake: threading.Event) -> None:
        """See `StageGroup.repair`. There is nothing to repair: a group has no state between jobs."""
        self._inbox.put(GroupEnd())
        wake.set()

    def _compute(self, assignment: Assignment, state: S, wake: threading.Event) -> None:
        try:
            for step in assignment.steps:
                if self._is_stopped.is_set():
                    raise SamplingCancelled(step, 0)
                state = _checked(self._step(state, step), f"the state of item {assignment.item} after step {step}")
                self._inbox.put(StepTaken(next_step=step + 1, state=state))
                wake.set()
        except BaseException as err:  # noqa: BLE001 - the run raises it
            is_loss = isinstance(err, WorkerLostError)
            self._inbox.put(GroupEnd(error=err, can_resume=is_loss, counts_as_failure=is_loss))
        else:
            self._inbox.put(GroupEnd())
        wake.set()


def _checked(state: S | None, name: str) -> S:
    if state is None:  # to a run of stages, this is an item of which no step was taken
        raise TypeError(f"{name} is None: give an initial state, and return the new one from the step function")
    return state


class StepProcess(AbstractContextManager["StepProcess[S]"], Generic[S]):
    """Step function in a process of this machine, which is made there and kept for all steps.

    Tensors of a state pass between the processes in shared memory. A process that has ended is started again. Leaving
    the context ends the process, also in the middle of a step, and so does the end of this one.

    Each tensor in shared memory holds a file descriptor of this process while it exists: one in the state that was
    given and one in the latest state, so that `ulimit -n` (often 1024) has to exceed twice the tensors of all items.

    Args:
        make_step: makes the step function, in the process; a function that a new Python process can import.
        arguments: hashable arguments of `make_step`.
    """

    def __init__(self, make_step: Callable[..., StepFunction[S]], *arguments: Hashable) -> None:
        self._make_step, self._arguments = make_step, arguments
        self._process, self._is_made = self._start()

    def _start(self) -> tuple[ProcessPoolExecutor, Future[None]]:
        # Not forked: a fork has no threads of torch, and cannot use a GPU that its parent has used.
        context = multiprocessing.get_context("spawn")
        process = ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent)
        # Processes make their functions at the same time, not each with its first step. The steps raise the error.
        return process, process.submit(_make, self._make_step, self._arguments)

    def __call__(self, state: S, step: int) -> S:
        """Return the state after `step`; see `StepFunction`.

        Raises:
            WorkerLostError: the process has ended.
            Exception: an error of `make_step` or of the step function.
        """
        try:
            self._is_made.result()  # first: else the step would make the function again after an error
            return self._process.submit(_take_step, self._make_step, self._arguments, state, step).result()
        except BrokenProcessPool as err:
            self._process.shutdown()
            self._process, self._is_made = self._start()
            raise WorkerLostError(f"the process of {self._make_step.__name__} ended in step {step}", 0) from err

    def __exit__(self, *_: object) -> None:
        # Before `shutdown`, which forgets them. It does not wait: a model that is still being loaded may take minutes.
        processes = list((self._process._processes or {}).values())
        self._process.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
            # Not `join`: the pool's thread joins it too, and only one of them gets the exit code.
            if not connection.wait([process.sentinel], END_TIMEOUT_S):
                process.kill()
                connection.wait([process.sentinel], END_TIMEOUT_S)


def _end_with_parent() -> None:
    """Start a thread that ends this process when its parent has ended, even without a chance to close its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in the process that started the pool"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="wanstream-parent", daemon=True).start()


def _take_step(make_step: Callable[..., StepFunction[S]], arguments: tuple[Hashable, ...], state: S, step: int) -> S:
    taken: S = _made(make_step, *arguments)(state, step)
    return taken


def _make(make_step: Callable[..., StepFunction[S]], arguments: tuple[Hashable, ...]) -> None:
    _made(make_step, *arguments)


@cache
def _made(make_step: Callable[..., StepFunction[S]], *arguments: Hashable) -> StepFunction[S]:
    """Return the step function of this process, which is made once."""
    return make_step(*arguments)


def run_stages(
    stages: Sequence[StepFunction[S]],
    states: Sequence[S],
    *,
    steps: int,
    on_step: Callable[[int, S], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    max_restarts: int = 0,
) -> list[S]:
    """Take `steps` steps of every item, divided evenly among `stages`, and return the last state of each.

    Each stage has one item at a time and passes it on, so that as many items are computed at once as there are stages.

    Args:
        stages: step function of each stage, called on a thread of its own.
        states: initial state of each item.
        steps: steps of each item, from 0; at least one for each stage.
        on_step: called on this thread with an item and its new state. Its errors end the run.
        should_stop: see `StageRun.run`.
        max_restarts: losses (WorkerLostError) of a stage within an hour after which a step is taken again.

    Raises:
        ValueError: there are no stages, no items, or fewer steps than stages.
        TypeError: a state is None.
        SamplingCancelled: `should_stop` returned True.
        RestartLimitError: more than `max_restarts` losses; the message has the last one.
    """
    if not 1 <= len(stages) <= steps:
        raise ValueError(f"{steps} steps for {len(stages)} stages: give one stage or more, and a step for each of them")
    states = [_checked(state, f"the state of item {item}") for item, state in enumerate(states)]
    borders = [number * steps // len(stages) for number in range(len(stages) + 1)]
    ranges = [range(first, end) for first, end in pairwise(borders)]
    groups = {GroupId(0, number): StepGroup(step) for number, step in enumerate(stages)}
    run = StageRun([ranges] * len(states), groups, states, max_restarts=max_restarts)
    ended = run.run(
        None if on_step is None else lambda item, step: on_step(item, _checked(step.state, "a state")), should_stop
    )
    return [_checked(state, f"the state of item {item}") for item, state in enumerate(ended)]
