"""Workers that are named by value: started once, and found running by the next queue item."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

from ..distributed import RayMissingError, check_token_file
from ..plan import Machine
from ..schema import GOALS, IN_PROCESS, Mesh, WorkersRef
from .workers_plan import SharedRun, WorkersPlan, WorkersPlanCache

if TYPE_CHECKING:
    import torch

    from ..distributed import Driver, Pool

StartPool: TypeAlias = "Callable[[WorkersRef, torch.device], Pool]"
Drive: TypeAlias = "Callable[[Pool, WorkersRef, Mesh, Driver | None], Driver]"
"""The last one had the workers before."""

REST_S = 60.0
"""How long workers may take to give memory back before they are ended, which gives it back too."""

logger = logging.getLogger("wanstream.workers")


def check_ray(ref: WorkersRef) -> None:
    """Raise RayMissingError where `ref` needs Ray and there is none, RaySetupError for an unusable token file.

    Imports nothing of Ray.
    """
    if ref.address != IN_PROCESS and find_spec("ray") is None:
        raise RayMissingError
    if ref.token_file:
        check_token_file(ref.token_file)


def gpus_of(device: torch.device) -> int | None:
    """How many GPUs workers of this machine may take beside each other; None where `device` is a CPU."""
    import torch

    return torch.cuda.device_count() if device.type == "cuda" else None


def start_pool(ref: WorkersRef, device: torch.device) -> Pool:
    """Start the workers that `ref` names, to compute on devices like `device`; blocks until all of them answer."""
    from ..distributed import InProcessPool, RayPool

    if ref.address == IN_PROCESS:
        return InProcessPool(str(device))
    return RayPool(ref, device.type)


def drive(pool: Pool, ref: WorkersRef, mesh: Mesh, former: Driver | None) -> Driver:
    """What has the workers of `pool` compute runs together, as `former` did before."""
    from ..distributed import Driver

    return Driver(pool, ref, mesh, follows=former)


@dataclass(kw_only=True)
class _Held:
    ref: WorkersRef
    device: torch.device
    pool: Pool
    driver: tuple[WorkersRef, Mesh, Driver] | None = None


class WorkerRegistry:
    """Holds at most one set of workers, by value. Thread-safe. They end with this process, if not before.

    Args:
        start: starts the workers that a reference names.
        drive: lays them out for a run.
        rest_s: how long they may take to give memory back.
    """

    def __init__(self, start: StartPool = start_pool, drive: Drive = drive, *, rest_s: float = REST_S) -> None:
        self._start, self._drive, self._rest_s = start, drive, rest_s
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._planned = WorkersPlanCache()

    def plan(self, run: SharedRun, machine_of: Callable[[], Machine]) -> WorkersPlan:
        """Layout and policy of a run; equal runs get the same ones. See `plan_workers`."""
        with self._lock:
            return self._planned.plan(run, machine_of)

    def get(self, ref: WorkersRef, mesh: Mesh, device: torch.device) -> Driver:
        """The workers that `ref` names, laid out as `mesh`; others are ended first, so that no two share a device.

        The same workers serve references that differ in how a run is shared and in what happens to it alone.

        Raises RayMissingError, and what starting them raises.
        """
        with self._lock:
            held = self._there(ref, device)
            if held.driver is None or held.driver[:2] != (ref, mesh):
                former = None if held.driver is None else held.driver[2]
                held.driver = (ref, mesh, self._drive(held.pool, ref, mesh, former))
            return held.driver[2]

    def pool(self, ref: WorkersRef, device: torch.device) -> Pool:
        """The workers that `ref` names, each for itself; otherwise as `get`."""
        with self._lock:
            return self._there(ref, device).pool

    def rest(self) -> bool:
        """Let them give back the memory that weights take; they stay, and open their experts again when they run.

        One that does not answer is ended, and replaced in the next run. Workers that are running keep their memory;
        returns whether they were not.
        """
        with self._lock:
            held = self._held
            if held is None:
                return True
            if held.driver is not None and held.driver[2].is_running:
                return False
            from ..distributed import WorkerLostError

            asked = {worker.ask("close"): worker for worker in held.pool.workers}
            done, late = wait(asked, timeout=self._rest_s)
            for each in late:
                logger.warning("worker %d kept its memory for %g s and is ended", asked[each].rank, self._rest_s)
                asked[each].kill()
            for each in done:
                with suppress(WorkerLostError):  # who is gone keeps nothing
                    each.result()
            return True

    def close(self) -> None:
        """End the workers, if there are any."""
        with self._lock:
            self._close()

    def _there(self, ref: WorkersRef, device: torch.device) -> _Held:
        check_ray(ref)
        same = _processes_of(ref)
        held = self._held
        if held is not None and (held.ref, held.device) == (same, device) and held.pool.usable:
            return held
        self._close()
        self._held = held = _Held(ref=same, device=device, pool=self._start(ref, device))
        atexit.register(self.close)
        return held

    def _close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            atexit.unregister(self.close)
            held.pool.close()


def _processes_of(ref: WorkersRef) -> WorkersRef:
    """What of a reference makes processes what they are."""
    return replace(ref, mesh=None, goal=GOALS[0], max_restarts=0)
