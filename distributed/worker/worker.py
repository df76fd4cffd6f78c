"""Worker: keeps experts open and computes parts of runs.

Independent of the message transport.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch

from ...block_kernels import multiplied_formats
from ...devices import auto_dtype, compute_device, dtype_name, forget, free_bytes, is_out_of_memory
from ...devices.machine import available_bytes
from ...plan import VRAM_RESERVE
from ...sampling import denoise_steps
from ...sampling.steps import RunSlice, RunState, StepProgress
from ...schema import LOOPBACK, Mesh
from ...schema.refs import CodeFormat, ExpertsRef, PathMap
from ...wan import ExpertsRegistry, open_pair
from ...wan.measurement import measured_arithmetic
from ...wan.vae import WanVae, open_vae
from ..messages import (
    DecodeCancelled,
    DecodeTask,
    RendezvousSpec,
    RunTask,
    StepReport,
    TaskResult,
    WorkerFacts,
    package_versions,
)
from ..path_map import resolve_experts, resolve_path, weight_bytes
from .groups import ProcessGroups
from .parallel_forward import group_forward
from .rendezvous import PeerLostError
from .weights import GroupWeights

NO_RENDEZVOUS = RendezvousSpec(
    rank=0, mesh=Mesh(), host=LOOPBACK, port=0, generation=0, timeout_s=0.0
)
MAX_STOPS = 64
"""Number of recent stop requests to keep: one may arrive before the run. Run ids are unique, so
old ones can expire."""


def import_models() -> None:
    """Import the packages for a first run when the worker starts.

    Imports take several seconds. During a run, waiting workers would count them as a hang.
    """
    import diffusers.loaders.single_file_utils  # noqa: F401
    from diffusers import (  # noqa: F401
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanTransformer3DModel,
    )


def link_speed(address: str) -> int:
    """Return the speed of the network card with this address in bytes per second.

    0 if the system reports none.
    """
    cards = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in cards and address in {each.address for each in addresses}:
            # psutil reports Mb/s.
            return int(cards[name].speed) * 125_000
    return 0


RAM_SHARE = 0.5
"""Fraction of the available RAM for decoders on a CPU. The rest is for the driver's frames."""


def decode_budget(device: torch.device, releasable_bytes: int) -> int:
    """Return the memory on `device` for a decode, in bytes.

    `releasable_bytes` are freed if it runs out.
    """
    free = free_bytes(device)
    if free is None:
        return int(RAM_SHARE * available_bytes())
    return max(0, free + releasable_bytes - VRAM_RESERVE)


class TileDecoder:
    """Decoder for one tile at a time on one device.

    Thread-safe; concurrent calls wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._open: tuple[tuple[Path, torch.dtype, str], WanVae] | None = None

    def decode(self, task: DecodeTask, is_stopped: Callable[[], bool]) -> torch.Tensor:
        """Decode one tile -> [3, F, H, W] fp32 on the CPU, the format of `TileBlender`.

        Raises:
            DecodeCancelled: `is_stopped` returned True before a latent frame.
            VaeInputError: the shape of the latents does not fit the VAE.
            CheckpointFileError: the VAE cannot be read.
        """

        def check() -> None:
            if is_stopped():
                raise DecodeCancelled(f"the decode {task.run_id} was stopped")

        wanted = (resolve_path(task.vae, task.paths), task.dtype, task.latent_scale)
        with self._lock:
            if self._open is None or self._open[0] != wanted:
                # Before the new VAE is opened, so that memory never holds two.
                self.free()
                self._open = (wanted, open_vae(*wanted))
            return self._open[1].decode_tile(task.latents, device=self._device, check=check)

    def free(self) -> None:
        """Release the weights. Freeing twice is allowed. The next decode reads them again."""
        with self._lock:
            opened = self._open
            self._open = None
            if opened is not None:
                opened[1].close()


class Worker:
    """Worker in a separate process, or in the driver's process if it is the only one.

    `run` computes one task at a time. Other threads may call the other methods during a run. After
    a failed or stopped task a worker remains usable.

    Args:
        device: "cuda:0" or "cpu", as seen by this process.
        address: address at which other workers reach this one.
        machine: machine identifier; None: the host name.
        threads: CPU threads for compute; None: torch's setting is not changed.
        experts: registry for open experts; None: a new one.

    Raises:
        DeviceError: the device does not exist.
    """

    def __init__(
        self,
        device: str,
        *,
        address: str = LOOPBACK,
        machine: str | None = None,
        threads: int | None = None,
        experts: ExpertsRegistry | None = None,
    ) -> None:
        import_models()
        self._device = compute_device(device)
        self._address = address
        self._machine = machine or platform.node()
        if threads is not None:
            torch.set_num_threads(threads)
        self._experts = experts or ExpertsRegistry(partial(open_pair, shared=True))
        self._groups, self._weights = self._alone()
        self._tiles = TileDecoder(self._device)
        self._running = threading.Lock()
        self._stopped: deque[str] = deque(maxlen=MAX_STOPS)
        self._blocks_begun = 0
        self._last_state: tuple[str, RunState] | None = None
        """Id and last state of the current or last run. The driver may lack the state."""

    def facts(self, paths: Sequence[str] = (), maps: Sequence[PathMap] = ()) -> WorkerFacts:
        """Return facts about this worker, and the local sizes of `paths`, mapped by `maps`.

        Raises:
            OSError: a path exists and cannot be read.
        """
        sizes = {}
        for path in paths:
            local = resolve_path(Path(path), maps)
            sizes[path] = weight_bytes(local) if local.exists() else None
        return WorkerFacts(
            pid=os.getpid(),
            node=platform.node(),
            address=self._address,
            device=str(self._device),
            versions=package_versions(),
            sizes=sizes,
            tile_bytes=decode_budget(self._device, self._experts.loaded_bytes),
            generation=self._groups.rendezvous.generation,
            auto_dtype=dtype_name(auto_dtype(self._device)),
            multiplied=multiplied_formats(self._device, auto_dtype(self._device)),
            machine=self._machine,
            link_bytes_per_s=link_speed(self._address),
        )

    def fast_formats(self, experts: ExpertsRef, maps: Sequence[PathMap]) -> tuple[CodeFormat, ...]:
        """Return the matrix formats in `experts` that are faster here if multiplied as stored.

        Raises as `measured_arithmetic`.
        """
        return measured_arithmetic(resolve_experts(experts, maps), self._device).multiplied

    def free_port(self) -> int:
        """Return a TCP port on this machine that was free when it was checked.

        Another process may take it.
        """
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return int(probe.getsockname()[1])

    def join(self, rendezvous: RendezvousSpec) -> None:
        """Leave the current rendezvous, and join this one. Blocks until the whole group has joined.

        Raises as `ProcessGroups.join`.
        """
        self.leave()
        # Tracebacks from the last rendezvous keep the groups, and so the sockets, in reference
        # cycles.
        gc.collect()
        # Assigned before it has joined, so that `leave` on another thread can end the wait.
        groups = ProcessGroups(rendezvous, self._device)
        self._groups = groups
        self._weights = GroupWeights(groups)
        groups.join()

    def leave(self) -> None:
        """Leave the rendezvous (any thread). A collective that waits there raises PeerLostError."""
        groups = self._groups
        # Before the groups end: the next task must not find them.
        self._groups, self._weights = self._alone()
        groups.leave()

    def run(self, task: RunTask, on_report: Callable[[StepReport], None]) -> TaskResult:
        """Compute `task`, and call `on_report` after every step, on the calling thread.

        Raises as `stream`.
        """
        messages = self.stream(task)
        with closing(messages):
            for message in messages:
                if isinstance(message, TaskResult):
                    return message
                on_report(message)
        raise AssertionError("a task without a result")

    def stream(self, task: RunTask) -> Generator[StepReport | TaskResult, None, None]:
        """Compute `task` on the message thread: a report after every step, then the result.

        The leader keeps the last state for `last_state` until the next run.

        Raises as `denoise` and as opening the experts, and:
            Cancelled: any worker in the group was stopped.
            WorkerTimeoutError: another worker did not respond in time.
            PeerLostError: another worker is gone, or this one has left the rendezvous.
        """
        # Read once: `leave` on another thread replaces both.
        groups = self._groups
        weights = self._weights
        self._last_state = None
        is_free = self._running.acquire(blocking=False)
        assert is_free, f"run {task.run_id} was assigned to a worker that computes another run"
        try:
            _check_rendezvous(task, groups)
            pair = self._experts.get(resolve_experts(task.experts, task.paths))
            sharded, reason = weights.for_run(pair, task.request, task.policy)
            pair.shard(sharded)
            gathered_before = groups.gathered_bytes
            report = self._reporter(task, groups.rank)
            taken = denoise_steps(
                pair,
                task.request,
                RunSlice(split=group_forward(groups), resume=task.resume, until=task.until),
                policy=task.policy,
                device=self._device,
                should_stop=partial(self._is_stopped, task.run_id),
            )
            # Ends the run at once, also if this generator is closed before its end.
            with closing(taken):
                for step in taken:
                    if isinstance(step, StepProgress):
                        yield report(step)
                    else:
                        ended = step.with_notes(reason)
            self._last_state = None  # the driver has it
        finally:
            self._running.release()
        # After the release: the driver may send the next task as soon as it has the result.
        yield TaskResult(
            timeline=ended.timeline, gathered_bytes=groups.gathered_bytes - gathered_before
        )

    def last_state(self, run_id: str) -> RunState | None:
        """Return the state after the last step of a run that did not finish.

        None if no such run has this id.
        """
        kept = self._last_state
        if kept is None or kept[0] != run_id:
            return None
        return kept[1]

    def decode_tile(self, task: DecodeTask) -> torch.Tensor:
        """Decode a tile as `TileDecoder.decode` does.

        If the device runs out of memory, the experts release theirs, this worker leaves the
        rendezvous, and the tile is decoded again.

        Raises:
            DecodeCancelled: the decode was stopped.
        """
        is_stopped = partial(self._is_stopped, task.run_id)
        try:
            return self._tiles.decode(task, is_stopped)
        except RuntimeError as err:
            # A run on another thread needs the experts, so they are not released for a tile.
            if self._running.locked() or not is_out_of_memory(err):
                raise
            # The error's traceback holds tensors from the failed try.
            forget(err)
        self._experts.free()
        # Other workers in the group rely on the blocks in this one's buffers, so the group must
        # join a new rendezvous.
        self.leave()
        return self._tiles.decode(task, is_stopped)

    def free_vae(self) -> None:
        """Release the VAE's weights."""
        self._tiles.free()

    def stop(self, run_id: str) -> None:
        """Stop the run or decode with this id, also if it has not begun yet.

        It stops before the next block or frame, and a run on several machines before the next step.
        """
        self._stopped.append(run_id)

    def blocks_begun(self) -> int:
        """Return how many blocks and latent frames the worker has begun so far."""
        return self._blocks_begun

    def close(self) -> None:
        """Leave the rendezvous, close experts and VAE. Closing twice is allowed.

        A closed worker can be used again.
        """
        self.leave()
        self._last_state = None
        self._experts.free()
        self._tiles.free()

    def _reporter(self, task: RunTask, place: int) -> Callable[[StepProgress], StepReport]:
        """Return the function that makes the report of a step.

        The leader's reports have the tensors that are due.
        """
        if place != 0:
            return lambda step: StepReport(run_id=task.run_id, place=place, record=step.record)
        end = task.request.step_plan.steps.stop if task.until is None else task.until
        state_due = _every(task.handover_s)
        preview_due = _every(task.preview_s, first=True)

        def report(step: StepProgress) -> StepReport:
            state = step.state()
            self._last_state = task.run_id, state
            due = StepReport(run_id=task.run_id, place=0, record=step.record)
            # The state after the last step is the result.
            if state_due() or state.next_step == end:
                due = replace(due, state=state)
            if preview_due() and step.denoised is not None:
                due = replace(due, denoised=step.denoised.to("cpu", copy=True))
            return due

        return report

    def _alone(self) -> tuple[ProcessGroups, GroupWeights]:
        """Return groups and weights for a worker outside a rendezvous, as for a group of one."""
        groups = ProcessGroups(NO_RENDEZVOUS, self._device)
        return groups, GroupWeights(groups)

    def _is_stopped(self, run_id: str) -> bool:
        """Return True after `stop`.

        Called before every block in a run, and before every frame in a tile.
        """
        self._blocks_begun += 1
        return run_id in self._stopped


def _every(seconds: float | None, *, first: bool = False) -> Callable[[], bool]:
    """Return a check that is True every `seconds` (None: never), and at first if `first`."""
    last_s = -math.inf if first else time.monotonic()

    def is_due() -> bool:
        nonlocal last_s
        if seconds is None or time.monotonic() - last_s < seconds:
            return False
        last_s = time.monotonic()
        return True

    return is_due


def _check_rendezvous(task: RunTask, groups: ProcessGroups) -> None:
    """Raise PeerLostError for a task from a rendezvous that this worker has left.

    The worker would compute it alone.
    """
    current = groups.rendezvous.generation
    if task.generation not in (0, current):
        where = f"rendezvous {current}" if current else "none"
        raise PeerLostError(
            f"run {task.run_id} is for rendezvous {task.generation}, but this worker is in {where}"
        )
