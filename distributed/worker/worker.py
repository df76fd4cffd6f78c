"""Worker: keeps experts open and computes its part of runs. Independent of the transport of its messages."""

from __future__ import annotations

import gc
import math
import os
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from ...devices import auto_dtype, available_bytes, compute_device, dtype_name, forget, free_bytes, is_out_of_memory
from ...plan import VRAM_RESERVE
from ...sampling import RunSlice, RunState, StepProgress, denoise
from ...schema import VERSION, CodeFormat, ExpertsRef, Mesh, PathMap
from ...wan import (
    ExpertsRegistry,
    WanVae,
    measured_arithmetic,
    multiplied_formats,
    open_pair,
    open_vae,
)
from ..messages import DecodeCancelled, DecodeTask, RendezvousSpec, RunTask, StepReport, TaskResult, WorkerFacts
from ..transport.path_map import resolve_experts, resolve_path, weight_bytes
from .groups import ProcessGroups
from .parallel_forward import group_forward
from .rendezvous import PeerLostError
from .weights import GroupWeights

LOOPBACK = "127.0.0.1"
NO_RENDEZVOUS = RendezvousSpec(rank=0, mesh=Mesh(), host=LOOPBACK, port=0, generation=0, timeout_s=0.0)
MAX_STOPS = 64
"""Number of recent stop requests to keep: one may arrive before its run. Run ids are unique, so old ones can expire."""


def import_models() -> None:
    """Import the packages of a first run when the worker starts.

    They take several seconds, which other workers that wait within a run would count as a hang.
    """
    import diffusers.loaders.single_file_utils  # noqa: F401
    from diffusers import (  # noqa: F401
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanTransformer3DModel,
    )


def link_speed(address: str) -> int:
    """Return the speed of the network card with that address in bytes per second; 0 if the system reports none."""
    cards, addresses = psutil.net_if_stats(), psutil.net_if_addrs().items()
    names = [name for name, every in addresses if name in cards and address in {each.address for each in every}]
    return int(cards[names[0]].speed) * 125_000 if names else 0


RAM_SHARE = 0.5
"""Fraction of the available RAM for decoders on a CPU; the rest is for the frames of the driver."""


def decode_budget(device: torch.device, releasable_bytes: int) -> int:
    """Return the bytes of `device` that a decode may use; `releasable_bytes` are freed for it if it runs out."""
    free = free_bytes(device)
    if free is None:
        return int(RAM_SHARE * available_bytes())
    return max(0, free + releasable_bytes - VRAM_RESERVE)


class TileDecoder:
    """Decoder of one tile at a time on one device. Thread-safe; concurrent calls wait for each other."""

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
                self.free()
                self._open = (wanted, open_vae(*wanted))
            return self._open[1].decode_tile(task.latents, device=self._device, check=check)

    def free(self) -> None:
        """Release the weights. Freeing twice is allowed; the next decode reads them again."""
        with self._lock:
            opened, self._open = self._open, None
            if opened is not None:
                opened[1].close()


class Worker:
    """Worker in a process of its own, or in the driver's process if it is the only one.

    `run` computes one task at a time; other threads may call the other methods during a run. A worker remains usable
    after a task that failed or was stopped.

    Args:
        device: "cuda:0" or "cpu", as seen by this process.
        address: address at which other workers reach this one.
        machine: identifier of its machine; None: the host name.
        threads: CPU threads to compute with; None: torch's setting is not changed.
        experts: registry of open experts; None: a new one.

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
        """Id of the current or last run and its last state, which the driver may lack."""

    def facts(self, paths: Sequence[str] = (), maps: Sequence[PathMap] = ()) -> WorkerFacts:
        """Return facts about this worker, and the sizes of `paths`, mapped by `maps`, on its machine.

        Raises:
            OSError: a path exists and cannot be read.
        """
        mapped = {path: resolve_path(Path(path), maps) for path in paths}
        return WorkerFacts(
            pid=os.getpid(),
            node=platform.node(),
            address=self._address,
            device=str(self._device),
            wanstream=VERSION,
            torch=torch.__version__,
            diffusers=version("diffusers"),
            python=platform.python_version(),
            sizes={path: weight_bytes(local) if local.exists() else None for path, local in mapped.items()},
            tile_bytes=decode_budget(self._device, self._experts.loaded_bytes),
            generation=self._groups.rendezvous.generation,
            auto_dtype=dtype_name(auto_dtype(self._device)),
            multiplied=multiplied_formats(self._device, auto_dtype(self._device)),
            machine=self._machine,
            link_bytes_per_s=link_speed(self._address),
        )

    def fast_formats(self, experts: ExpertsRef, maps: Sequence[PathMap]) -> tuple[CodeFormat, ...]:
        """Return the formats of the matrices of `experts` that are faster here if they are multiplied as stored.

        Raises as `measured_arithmetic`.
        """
        return measured_arithmetic(resolve_experts(experts, maps), self._device).multiplied

    def free_port(self) -> int:
        """Return a TCP port of this machine that was free when it was checked; another process may take it."""
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return int(probe.getsockname()[1])

    def join(self, rendezvous: RendezvousSpec) -> None:
        """Leave the current rendezvous, and join this one. Blocks until the whole group has joined.

        Raises as `ProcessGroups.join`.
        """
        self.leave()
        # Tracebacks of the last rendezvous keep its groups, and so its sockets, in reference cycles.
        gc.collect()
        # Assigned before it has joined, so that `leave` on another thread can end the wait.
        groups = ProcessGroups(rendezvous, self._device)
        self._groups, self._weights = groups, GroupWeights(groups)
        groups.join()

    def leave(self) -> None:
        """Leave the rendezvous (any thread). A collective that waits in it raises PeerLostError."""
        groups = self._groups
        self._groups, self._weights = self._alone()
        groups.leave()

    def run(self, task: RunTask, on_report: Callable[[StepReport], None]) -> TaskResult:
        """Compute `task`, and call `on_report` after every step, on the calling thread.

        The leader keeps its last state for `last_state` until its next run.

        Raises as `denoise` and as opening the experts does, and:
            Cancelled: any worker of the group was stopped.
            WorkerTimeoutError: another worker did not respond in time.
            PeerLostError: another worker is gone, or this one has left the rendezvous.
        """
        groups, weights, is_stopped = self._groups, self._weights, partial(self._is_stopped, task.run_id)
        self._last_state = None
        is_free = self._running.acquire(blocking=False)
        assert is_free, f"run {task.run_id} was assigned to a worker that computes another run"
        try:
            _check_rendezvous(task, groups)
            pair = self._experts.get(resolve_experts(task.experts, task.paths))
            sharded, reason = weights.for_run(pair, task.request, task.policy)
            pair.shard(sharded)
            gathered_before = groups.gathered_bytes
            ended = denoise(
                pair,
                task.request,
                RunSlice(split=group_forward(groups), resume=task.resume, until=task.until),
                policy=task.policy,
                device=self._device,
                on_step=self._reporter(task, on_report, is_leader=groups.rank == 0),
                should_stop=is_stopped,
            ).with_note(reason)
            self._last_state = None  # the driver has it
        finally:
            self._running.release()
        return TaskResult(timeline=ended.timeline, gathered_bytes=groups.gathered_bytes - gathered_before)

    def last_state(self, run_id: str) -> RunState | None:
        """Return the state after the last step of a run that did not end well; None if there is none of that id."""
        kept = self._last_state
        return kept[1] if kept is not None and kept[0] == run_id else None

    def decode_tile(self, task: DecodeTask) -> torch.Tensor:
        """Decode a tile as `TileDecoder.decode` does.

        If the device runs out of memory, the experts release theirs, this worker leaves its rendezvous, and the tile is
        decoded again.

        Raises:
            DecodeCancelled: the decode was stopped.
        """
        is_stopped = partial(self._is_stopped, task.run_id)
        try:
            return self._tiles.decode(task, is_stopped)
        except RuntimeError as err:
            if self._running.locked() or not is_out_of_memory(err):
                raise
            forget(err)
        self._experts.free()
        # The other workers of the group rely on the blocks in its buffers, so the group must join a new rendezvous.
        self.leave()
        return self._tiles.decode(task, is_stopped)

    def free_vae(self) -> None:
        """Release the VAE's weights."""
        self._tiles.free()

    def stop(self, run_id: str) -> None:
        """Stop the run or decode with that id, also if it has not begun yet.

        It stops before its next block or frame; a run on several machines before its next step.
        """
        self._stopped.append(run_id)

    def blocks_begun(self) -> int:
        """Return the number of blocks and latent frames of tiles that this worker has begun since its start."""
        return self._blocks_begun

    def close(self) -> None:
        """Leave the rendezvous, close experts and VAE. Closing twice is allowed; a closed worker can be used again."""
        self.leave()
        self._last_state = None
        self._experts.free()
        self._tiles.free()

    def _reporter(
        self, task: RunTask, on_report: Callable[[StepReport], None], *, is_leader: bool
    ) -> Callable[[StepProgress], None]:
        """Return the callback of a run: it reports every record, and of the leader the tensors that are due."""
        if not is_leader:
            return lambda step: on_report(StepReport(record=step.record))
        end = task.request.step_plan.steps.stop if task.until is None else task.until
        state_due, preview_due = _every(task.handover_s), _every(task.preview_s, first=True)

        def report(step: StepProgress) -> None:
            state = step.state()
            self._last_state = task.run_id, state
            is_due = state_due() or state.next_step == end
            shown = step.denoised if preview_due() else None
            denoised = None if shown is None else shown.to("cpu", copy=True)
            on_report(StepReport(record=step.record, denoised=denoised, state=state if is_due else None))

        return report

    def _alone(self) -> tuple[ProcessGroups, GroupWeights]:
        """Return groups and weights of a worker outside of a rendezvous: those of a group of one."""
        groups = ProcessGroups(NO_RENDEZVOUS, self._device)
        return groups, GroupWeights(groups)

    def _is_stopped(self, run_id: str) -> bool:
        """Return True after `stop`; called before every block of a run, and before every frame of a tile."""
        self._blocks_begun += 1
        return run_id in self._stopped


def _every(seconds: float | None, *, first: bool = False) -> Callable[[], bool]:
    """Return a check that is True every `seconds` (None: never), and in its first call if `first`."""
    last_s = -math.inf if first else time.monotonic()

    def is_due() -> bool:
        nonlocal last_s
        is_over = seconds is not None and time.monotonic() - last_s >= seconds
        last_s = time.monotonic() if is_over else last_s
        return is_over

    return is_due


def _check_rendezvous(task: RunTask, groups: ProcessGroups) -> None:
    """Raise PeerLostError for a task of a rendezvous that this worker has left, as it would compute alone."""
    current = groups.rendezvous.generation
    if task.generation not in (0, current):
        where = f"rendezvous {current}" if current else "none"
        raise PeerLostError(f"run {task.run_id} is for rendezvous {task.generation}, but this worker is in {where}")
