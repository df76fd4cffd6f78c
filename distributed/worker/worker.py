"""What one worker does, whatever carries its messages: it keeps experts open and computes its part of runs."""

from __future__ import annotations

import gc
import os
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from ...devices import auto_dtype, compute_device, dtype_name, forget, free_bytes, is_out_of_memory
from ...sampling import LOCAL_FORWARD, RunSlice, StepProgress, denoise_part
from ...schema import VERSION, ExpertsRef, PathMap
from ...wan import ExpertsRegistry, open_pair
from ..messages import RendezvousSpec, RunTask, StepReport, TaskResult, WorkerFacts
from ..transport.path_map import located, located_experts, weight_bytes
from ..vae.worker import DecodeTask, TileDecoder, tile_room
from ..weights.weights import GroupWeights, KeptWeights
from .errors import PeerLostError
from .groups import ProcessGroups

LOOPBACK = "127.0.0.1"
STOPS_KEPT = 64
"""Stops are remembered, as one may come before its run; run ids are used once, so that old ones can be forgotten."""

Tell = Callable[[StepReport], None]


def import_models() -> None:
    """Import the packages of a first run before a worker takes part in one.

    They take several seconds. Workers that wait for it within a run would take it for one that hangs.
    """
    import diffusers.loaders.single_file_utils  # noqa: F401
    from diffusers import (  # noqa: F401
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanTransformer3DModel,
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a worker stands while it computes a task."""

    rank: int = 0
    leads: bool = True
    """Whether it tells the latents of its group."""
    gathered_before: int = 0

    @classmethod
    def of(cls, groups: ProcessGroups | None) -> _Place:
        if groups is None:
            return cls()
        return cls(rank=groups.rendezvous.rank, leads=groups.place == 0, gathered_before=groups.gathered_bytes)


class Worker:
    """One worker, which has a process of its own unless there is only one. `run` one task at a time; the rest is free.

    A task that fails or is stopped leaves the worker as usable as before.

    Args:
        device: "cuda:0" or "cpu", as this process sees it. Raises DeviceError if it is not there.
        address: where other workers reach this one.
        machine: identifier of its machine; None: the host name.
        threads: CPU threads to compute with; None leaves this process as it is.
        experts: keeps experts open; None: a registry of its own.
        tiles: makes what decodes tiles on the device.
    """

    def __init__(
        self,
        device: str,
        *,
        address: str = LOOPBACK,
        machine: str | None = None,
        threads: int | None = None,
        experts: ExpertsRegistry | None = None,
        tiles: Callable[[torch.device], TileDecoder] = TileDecoder,
    ) -> None:
        import_models()
        self._device = compute_device(device)
        self._address = address
        self._machine = machine or platform.node()
        if threads is not None:
            torch.set_num_threads(threads)
        self._experts = experts or ExpertsRegistry(partial(open_pair, shared=True))
        self._groups: ProcessGroups | None = None
        self._weights: GroupWeights | None = None
        self._tiles = tiles(self._device)
        self._lock = threading.Lock()
        self._running: str | None = None
        self._stopped: deque[str] = deque(maxlen=STOPS_KEPT)
        self._last: tuple[ExpertsRef, str] | None = None
        self._switches = 0
        self._begun = 0

    def facts(self, paths: Sequence[str] = (), maps: Sequence[PathMap] = ()) -> WorkerFacts:
        """What this worker is, and which of `paths`, as `maps` say where they may lie, are not on its machine.

        Raises OSError for one that is there and cannot be looked at.
        """
        there = {path: located(Path(path), maps) for path in paths}
        on_gpu = self._device.type == "cuda"
        groups = self._groups
        return WorkerFacts(
            pid=os.getpid(),
            node=platform.node(),
            address=self._address,
            device=str(self._device),
            device_name=torch.cuda.get_device_name(self._device) if on_gpu else "CPU",
            free_bytes=free_bytes(self._device),
            wanstream=VERSION,
            torch=torch.__version__,
            diffusers=version("diffusers"),
            python=platform.python_version(),
            missing=tuple(path for path, place in there.items() if not place.exists()),
            sizes=tuple((path, weight_bytes(place)) for path, place in there.items() if place.exists()),
            tile_bytes=tile_room(self._device, self._experts.loaded_bytes),
            generation=None if groups is None else groups.rendezvous.generation,
            auto_dtype=dtype_name(auto_dtype(self._device)),
            machine=self._machine,
        )

    def free_port(self) -> int:
        """A TCP port of this machine that nobody listened on a moment ago."""
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return int(probe.getsockname()[1])

    def join(self, rendezvous: RendezvousSpec) -> None:
        """Take a place in a mesh, instead of a former one; blocks until all of its group are there. Raises as
        `meet`.
        """
        self.leave()
        # Errors of the last rendezvous hold its groups in circles, and those its sockets.
        gc.collect()
        # Known before it has met, so that `leave` can end the waiting.
        groups = self._groups = ProcessGroups(rendezvous, self._device)
        groups.meet()
        self._weights = GroupWeights(groups)

    def leave(self) -> None:
        """Have no place in a mesh any more; from any thread. What waits for others there raises PeerLostError."""
        groups, self._groups = self._groups, None
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.abort()
        if groups is not None:
            groups.leave()

    def run(self, task: RunTask, tell: Tell) -> TaskResult:
        """Compute `task`, and tell every step, on the calling thread.

        Raises as `denoise_part`: Cancelled after `stop` of any worker of its group, HungError or PeerLostError where
        one
        of them does not come, or this one has left; and what opening the experts raises.
        """
        groups, weights, wish = self._groups, self._weights, partial(self._is_stopped, task.run_id)
        with self._running_as(task.run_id):
            _check_rendezvous(task, groups)
            pair = self._experts.get(located_experts(task.experts, task.paths))
            kept = KeptWeights() if weights is None else weights.of(pair, task.request, task.policy)
            pair.shard(kept.sharded)
            place = _Place.of(groups)
            ended = denoise_part(
                pair,
                task.request,
                RunSlice(
                    split=LOCAL_FORWARD if groups is None else groups.split(), resume=task.resume, until=task.until
                ),
                policy=task.policy,
                device=self._device,
                on_step=partial(self._tell_step, task, place, tell),
                should_stop=wish if groups is None else groups.voting(wish),
            ).with_note(kept.reason)
        return TaskResult(
            run_id=task.run_id,
            rank=place.rank,
            timeline=ended.timeline,
            latents=ended.latents if place.leads else None,
            sigma=ended.sigma,
            gathered_bytes=0 if groups is None else groups.gathered_bytes - place.gathered_before,
            expert_switches=self._switches,
        )

    def decode_tile(self, task: DecodeTask) -> torch.Tensor:
        """See `TileDecoder.decode`. Where the device has no room beside them, the experts let go of it, and this worker
        leaves its rendezvous.

        Raises DecodeCancelled after `stop`.
        """
        stopped = partial(self._is_stopped, task.run_id)
        try:
            return self._tiles.decode(task, stopped)
        except RuntimeError as err:
            if self._running is not None or not is_out_of_memory(err):
                raise
            forget(err)
        self._experts.free()
        # The others of its group reckon with what lay in its buffers: they must meet anew.
        self.leave()
        return self._tiles.decode(task, stopped)

    def free_vae(self) -> None:
        """Let go of the VAE's weights."""
        self._tiles.free()

    def stop(self, run_id: str) -> None:
        """Let the run with that id end before its next block, with Cancelled; also one that has not begun yet."""
        self._stopped.append(run_id)

    def pulse(self) -> int:
        """How many blocks, and latent frames of tiles, this worker has begun since it was started."""
        return self._begun

    def close(self) -> None:
        """Leave the others and close experts and VAE. Closing twice is allowed; a closed worker may be used again."""
        self.leave()
        self._experts.free()
        self._tiles.free()

    @contextmanager
    def _running_as(self, run_id: str) -> Iterator[None]:
        with self._lock:
            assert self._running is None, f"run {run_id} was given to a worker that computes run {self._running}"
            self._running = run_id
        try:
            yield
        finally:
            self._running = None

    def _is_stopped(self, run_id: str) -> bool:
        """Asked before every block of a run, and before every frame of a tile."""
        self._begun += 1
        return run_id in self._stopped

    def _tell_step(self, task: RunTask, place: _Place, tell: Tell, step: StepProgress) -> None:
        now = (task.experts, step.record.expert)
        if self._last not in (None, now):
            self._switches += 1
        self._last = now
        tell(
            StepReport(
                run_id=task.run_id,
                rank=place.rank,
                record=step.record,
                done=step.done,
                total=step.total,
                denoised=step.denoised.to("cpu", copy=True) if place.leads else None,
                state=step.state() if place.leads and task.wants_state else None,
            )
        )


def _check_rendezvous(task: RunTask, groups: ProcessGroups | None) -> None:
    """Refuse a task of a rendezvous that this worker is not in any more: alone it would compute what its group
    shares.
    """
    here = None if groups is None else groups.rendezvous.generation
    if task.generation not in (None, here):
        where = "none" if here is None else f"rendezvous {here}"
        raise PeerLostError(f"run {task.run_id} is for rendezvous {task.generation}, but this worker is in {where}")
