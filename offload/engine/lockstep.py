"""Forward passes in lockstep: several calls of one model pass through each block during one visit.

Each call has a thread; one of them runs at a time. A call runs until it needs the next block or ends, then the next
call runs. When all of them wait, the block is visited, and they pass through it one after the other: the same
operations as in separate passes, with the weights fetched once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Generic, TypeVar

import torch

from ...devices import DeviceRuntime, Stream, runtime_for
from .forward_course import ForwardCourse

T = TypeVar("T")


class LaneStopped(BaseException):
    """Ends a call because another one has failed. Not an `Exception`, which code around a block may catch."""


class Lane(Generic[T]):
    """One call in its thread: it runs in `resume`, until it waits for a block or ends.

    Args:
        call: the call.
        device: device whose current stream the call uses.
    """

    def __init__(self, call: Callable[[], T], device: torch.device) -> None:
        self.wanted: int | None = None
        """The block that the call waits for."""
        self.ended = False
        self._call, self._result = call, list[T]()
        self._error: BaseException | None = None
        self._stopping = False
        self._resumed, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        # All of these are per thread.
        self._context: Context = copy_context()
        self._states = _torch_states(device)
        self._thread = threading.Thread(target=self._run, name="wanstream-lane", daemon=True)

    def resume(self) -> None:
        """Run until the call waits for a block or ends; raise its error again."""
        if self._thread.ident is None:
            self._thread.start()
        self._resumed.release()
        self._waits.acquire()
        error, self._error = self._error, None  # its traceback refers to this lane: a cycle that would keep activations
        try:
            if error is not None:
                raise error
        finally:
            del error

    def await_block(self, block: int) -> None:
        """Wait until `block` is visited (the thread of the call)."""
        if self._stopping:  # code around the last block has caught the exception that ends this call
            raise LaneStopped
        self.wanted = block
        self._waits.release()
        self._resumed.acquire()
        self.wanted = None
        if self._stopping:
            raise LaneStopped

    def stop(self) -> None:
        """End the call wherever it waits."""
        if self._thread.ident is None:
            return
        self._stopping = True
        if not self.ended:
            self._resumed.release()
        self._thread.join()
        self._error = None

    def result(self) -> T:
        """Return the result of a call that has ended."""
        return self._result[0]

    def is_current(self) -> bool:
        """Return True in the thread of the call."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._resumed.acquire()
        try:
            with ExitStack() as states:
                for state in self._states:
                    states.enter_context(state())
                self._result.append(self._context.run(self._call))
        except LaneStopped:
            pass  # the error of the other call is raised
        except BaseException as err:  # noqa: BLE001 (`resume` raises it again)
            self._error = err
        finally:
            self.ended = True
            self._waits.release()


def _torch_states(device: torch.device) -> list[Callable[[], AbstractContextManager[object]]]:
    """Return contexts that give another thread the modes and the stream of this one."""
    kind, default, runtime = device.type, torch.get_default_device(), runtime_for(device)
    states: list[Callable[[], AbstractContextManager[object]]] = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    if runtime is not None:
        states.append(partial(_on_stream, runtime, runtime.current_stream()))
    if torch.is_autocast_enabled(kind):
        cached = torch.is_autocast_cache_enabled()
        states.append(partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=cached))
    if default.type != "cpu":
        states.append(lambda: default)
    return states


@contextmanager
def _on_stream(runtime: DeviceRuntime, stream: Stream) -> Iterator[None]:
    runtime.enter_thread()
    with runtime.on_stream(stream):
        yield


class Lockstep:
    """Calls of one model that share every visit of a course.

    Args:
        course: an open course, between two passes.
        device: device whose current stream the calls use.
    """

    def __init__(self, course: ForwardCourse, device: torch.device) -> None:
        self._course, self._device = course, device
        self._lanes: list[Lane[object]] = []

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls as one pass of the course, and return their results.

        Raises the first error of a call; the others end where they wait.
        """
        lanes = [Lane(call, self._device) for call in calls]
        self._lanes = list(lanes)  # type: ignore[arg-type]
        self._course.begin_pass()
        try:
            for lane in lanes:
                lane.resume()
            while waiting := [lane for lane in lanes if not lane.ended]:
                self._visit(waiting)
        finally:
            for lane in lanes:
                lane.stop()
            self._lanes = []
            if self._course.in_block:  # after an error
                self._course.exit()
        self._course.end_pass()
        return [lane.result() for lane in lanes]

    def enter(self, block: int) -> bool:
        """Wait for `block` if this thread is one of the calls; return False in every other thread."""
        for lane in self._lanes:
            if lane.is_current():
                lane.await_block(block)
                return True
        return False

    def has_thread(self) -> bool:
        """Return True in the thread of one of the calls."""
        return any(lane.is_current() for lane in self._lanes)

    def _visit(self, waiting: Sequence[Lane[T]]) -> None:
        # A call may skip blocks that another one needs: the block that is due next is visited first.
        wanted = [lane.wanted for lane in waiting]
        block = self._course.due if self._course.due in wanted else wanted[0]
        assert block is not None, "a call that waits names its block"
        self._course.enter(block)
        for lane in waiting:
            if lane.wanted == block:
                lane.resume()
        self._course.exit()
