"""Forward passes in lockstep: several calls of one model pass through each block during one visit.

Each call has a thread, and one thread runs at a time. A call runs until it needs the next block or
ends, then the next call runs. When all calls wait, the block is visited, and they pass through it
one after the other. The operations are the same as in separate passes, with weights fetched once.
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
from .session import SessionState, StreamSession

T = TypeVar("T")


class CallStopped(BaseException):
    """Ends a call because another one has failed.

    Not an `Exception`, which code around a block may catch.
    """


class CallThread(Generic[T]):
    """One call in its own thread. It runs in `resume` until it waits for a block or ends.

    Args:
        call: the call.
        device: device whose current stream the call uses.
    """

    def __init__(self, call: Callable[[], T], device: torch.device) -> None:
        self.wanted: int | None = None
        """Block the call waits for."""
        self.block: int | None = None
        """Block the call is in, until the caller changes it."""
        self.ended = False
        self._call = call
        self._result = list[T]()
        self._error: BaseException | None = None
        self._stopping = False
        self._resumed = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        # All of these are per thread.
        self._context: Context = copy_context()
        self._states = _torch_states(device)
        self._thread = threading.Thread(target=self._run, name="wanstream-lane", daemon=True)

    def resume(self) -> None:
        """Run until the call waits for a block or ends. An error is raised again here."""
        if self._thread.ident is None:
            self._thread.start()
        self._resumed.release()
        self._waits.acquire()
        error = self._error
        self._error = None  # its traceback refers to this lane: a cycle that would keep activations
        try:
            if error is not None:
                raise error
        finally:
            del error

    def await_block(self, block: int) -> None:
        """Wait until `block` is visited (on the call's thread)."""
        if self._stopping:  # code around the last block has caught the exception that ends it
            raise CallStopped
        self.wanted = block
        self._waits.release()
        self._resumed.acquire()
        self.wanted = None
        if self._stopping:
            raise CallStopped
        self.block = block

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
        """Return the result of an ended call."""
        return self._result[0]

    def is_current(self) -> bool:
        """Return True on the call's thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._resumed.acquire()
        try:
            with ExitStack() as states:
                for state in self._states:
                    states.enter_context(state())
                self._result.append(self._context.run(self._call))
        except CallStopped:
            pass  # the error of the other call is raised
        except BaseException as err:  # noqa: BLE001 (`resume` raises it again)
            self._error = err
        finally:
            self.ended = True
            self._waits.release()


def _torch_states(device: torch.device) -> list[Callable[[], AbstractContextManager[object]]]:
    """Return contexts to give another thread this thread's modes and stream."""
    kind = device.type
    default = torch.get_default_device()
    runtime = runtime_for(device)
    states: list[Callable[[], AbstractContextManager[object]]] = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    if runtime is not None:
        states.append(partial(_on_stream, runtime, runtime.current_stream()))
    if torch.is_autocast_enabled(kind):
        cached = torch.is_autocast_cache_enabled()
        dtype = torch.get_autocast_dtype(kind)
        states.append(partial(torch.autocast, kind, dtype=dtype, cache_enabled=cached))
    if default.type != "cpu":
        # As a context, a torch.device is the default device for new tensors.
        states.append(lambda: default)
    return states


@contextmanager
def _on_stream(runtime: DeviceRuntime, stream: Stream) -> Iterator[None]:
    # Otherwise leaving a stream would create a context on device 0, as in `RunThread`.
    runtime.enter_thread()
    with runtime.on_stream(stream):
        yield


class Lockstep:
    """Calls of one model, sharing every visit in a session.

    Args:
        session: an open session, between two passes.
        device: device whose current stream the calls use.
    """

    def __init__(self, session: StreamSession, device: torch.device) -> None:
        self._session = session
        self._device = device
        self._lanes: list[CallThread[object]] = []

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run the calls as one session pass, and return their results.

        Raises the first error in a call. The others end where they wait.
        """
        lanes = [CallThread(call, self._device) for call in calls]
        self._lanes = list(lanes)  # type: ignore[arg-type]
        self._session.begin_pass()
        try:
            for lane in lanes:
                lane.resume()
            while waiting := [lane for lane in lanes if not lane.ended]:
                self._visit(waiting)
        finally:
            for lane in lanes:
                lane.stop()
            self._lanes = []
            if self._session.state is SessionState.VISITING:  # after an error
                self._session.end_visit()
        # This is not reached after an error. Otherwise the session would learn an incomplete order.
        self._session.end_pass()
        return [lane.result() for lane in lanes]

    @property
    def lane(self) -> CallThread[object] | None:
        """The call on this thread. None outside the calls' threads."""
        for lane in self._lanes:
            if lane.is_current():
                return lane
        return None

    def _visit(self, waiting: Sequence[CallThread[T]]) -> None:
        # A call may skip blocks needed by another one, so the block due next is visited first.
        wanted = [lane.wanted for lane in waiting]
        due = self._session.due
        block = due.block if due is not None and due.block in wanted else wanted[0]
        assert block is not None, "a call that waits names its block"
        self._session.visit(block)
        for lane in waiting:
            if lane.wanted == block:
                lane.resume()
        self._session.end_visit()
