"""The driver with workers behind Ray, and tiles.

Workers are killed, runs are stopped, and nothing is left behind.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from wanstream.distributed.driver.decode import decode_in_shared_tiles, tiles_by_memory
from wanstream.distributed.driver.driver import Driver
from wanstream.distributed.driver.stage_run import RestartLimitError
from wanstream.distributed.messages import DecodeCancelled, DecodeTask, RunTask
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import SamplingCancelled, StepProgress
from wanstream.schema import Mesh
from wanstream.schema.refs import WorkersRef
from wanstream.tests.support.memory_folder import names_in_shared_memory
from wanstream.tests.support.rounding import ROUNDING
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import open_vae

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

WORKERS = 4
STEPS, SWITCH = 8, 4
MESH = Mesh(stage=2, cfg=2)
STOPS = 5

MakeTask = Callable[..., RunTask]
LocalForward = Callable[[RunTask], torch.Tensor]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ref_of(mesh: Mesh, **changes: Any) -> WorkersRef:
    given = {"count": mesh.size, "threads": 1, "timeout_s": 60.0}
    return WorkersRef(**{**given, **changes})


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    from wanstream.distributed.ray.pool import RayPool

    before = _left_behind()
    with RayPool(ref_of(MESH), store_bytes=200 << 20) as started:
        yield started
    assert not _stays_open(_left_behind, before), "nothing is left of it"


@pytest.fixture(scope="module")
def task(make_task: MakeTask) -> RunTask:
    """Two videos with 8 steps, half of them on each expert."""
    changes = {
        "noise": normal(2, 16, 2, 4, 6, seed=1),
        "steps": STEPS,
        "switch_step": SWITCH,
        "solver": "unipc",
    }
    return make_task(request=changes)


@pytest.fixture(scope="module")
def undisturbed(task: RunTask, alone: LocalForward) -> torch.Tensor:
    return alone(task)


@pytest.fixture(scope="module")
def driver(pool: Any) -> Driver:
    return Driver(pool, ref_of(MESH), MESH)


def pid_of(pool: Any, rank: int) -> int:
    return int(pool.workers[rank].started.facts.pid)


@pytest.mark.parametrize(
    "mesh", [MESH, Mesh(data=2, ulysses=2), Mesh(data=2, stage=2), Mesh(cfg=2, ulysses=2)], ids=str
)
def test_every_mesh_gives_what_one_worker_gives(
    mesh: Mesh, pool: Any, task: RunTask, undisturbed: torch.Tensor
) -> None:
    ran = Driver(pool, ref_of(mesh), mesh).denoise(task.experts, task.request, task.policy)
    if mesh.ulysses == 1:
        assert torch.equal(ran.latents, undisturbed)
    else:
        assert (ran.latents - undisturbed).norm() / undisturbed.norm() <= ROUNDING
    assert len({pid_of(pool, rank) for rank in range(WORKERS)} - {os.getpid()}) == WORKERS
    # The faster one of two rows may take all videos in a stage.
    assert set(ran.timelines) == set(range(WORKERS)) or mesh.data > 1
    assert (ran.gathered_bytes > 0) == (mesh.cell_size > 1)


@pytest.mark.parametrize(
    ("rank", "at", "after_s"),
    [(1, 5, 0.005), (0, 8, 0.04), (3, 13, 0.045)],
    ids=["first stage", "at the handover", "second stage"],
)
def test_a_worker_that_is_killed_costs_no_video(
    rank: int,
    at: int,
    after_s: float,
    pool: Any,
    driver: Driver,
    task: RunTask,
    undisturbed: torch.Tensor,
) -> None:
    killed, steps = pid_of(pool, rank), list[StepProgress]()

    def on_step(step: StepProgress) -> None:
        steps.append(step)
        if step.done == at:
            time.sleep(after_s)
            os.kill(killed, signal.SIGKILL)

    ran = driver.denoise(task.experts, task.request, task.policy, on_step=on_step)
    assert torch.equal(ran.latents, undisturbed)
    assert [step.done for step in steps] == list(range(1, 2 * STEPS + 1)), (
        "no reported step is repeated"
    )
    # A stage with nothing left to do needs no other worker, until the next run.
    assert ran.restarts <= 1
    again = driver.denoise(task.experts, task.request, task.policy)
    assert torch.equal(again.latents, undisturbed)
    assert pid_of(pool, rank) != killed


def test_runs_that_are_stopped_anywhere_leave_workers_and_machine_as_they_were(
    pool: Any, driver: Driver, task: RunTask, undisturbed: torch.Tensor
) -> None:
    driver.denoise(task.experts, task.request, task.policy)
    pids = [pid_of(pool, rank) for rank in range(WORKERS)]
    before = _open_things(pids)
    chance, long = (
        random.Random(0),
        DenoiseRequest(**{**task.request.keywords(), "steps": 1000, "switch_step": 500}),
    )
    for _ in range(STOPS):
        stop, at, after_s = (
            threading.Event(),
            chance.randrange(0, 2 * STEPS - 1),
            chance.uniform(0, 0.1),
        )
        timer = threading.Timer(after_s, stop.set)

        def on_step(step: StepProgress, at: int = at, timer: threading.Timer = timer) -> None:
            if step.done == at:
                timer.start()

        if at == 0:
            timer.start()
        with pytest.raises(SamplingCancelled):
            driver.denoise(
                task.experts, long, task.policy, on_step=on_step, should_stop=stop.is_set
            )
        timer.join()
        assert torch.equal(
            driver.denoise(task.experts, task.request, task.policy).latents, undisturbed
        )
    assert [pid_of(pool, rank) for rank in range(WORKERS)] == pids
    assert not _stays_open(lambda: _open_things(pids), before)


def test_a_worker_that_hangs_is_replaced(
    pool: Any, task: RunTask, undisturbed: torch.Tensor
) -> None:
    frozen = pid_of(pool, 1)

    def on_step(step: StepProgress) -> None:
        if step.done == 3:
            os.kill(frozen, signal.SIGSTOP)

    driver = Driver(pool, ref_of(MESH, timeout_s=10.0), MESH)
    ran = driver.denoise(task.experts, task.request, task.policy, on_step=on_step)
    assert torch.equal(ran.latents, undisturbed)
    assert ran.restarts == 1
    assert pid_of(pool, 1) != frozen
    assert not psutil.pid_exists(frozen)


class TwoOf:
    """A pool's first two workers. Counts the tiles given to each."""

    def __init__(self, pool: Any) -> None:
        self._pool, self.tiles = pool, Counter[int]()

    @property
    def workers(self) -> list[Any]:
        return [Counting(worker, self.tiles) for worker in self._pool.workers[:2]]

    def replace(self, rank: int) -> Any:
        return self._pool.replace(rank)


class Counting:
    """A worker that counts the tiles given to it."""

    def __init__(self, worker: Any, tiles: Counter[int]) -> None:
        self._worker, self._tiles = worker, tiles
        self.rank, self.kill = worker.rank, worker.kill

    def call(self, method: str, *args: Any) -> Any:
        self._tiles[self.rank] += method == "decode_tile"
        return self._worker.call(method, *args)


TILING = Tiling(pixels=64, stride=48)


@pytest.fixture(scope="module")
def tiles(tiny_pipeline: Callable[[], Path]) -> DecodeTask:
    """Two videos to be decoded in some tiles."""
    return DecodeTask(latents=3 * normal(2, 16, 2, 13, 14, seed=0), vae=tiny_pipeline())


@pytest.fixture(scope="module")
def frames(tiles: DecodeTask) -> torch.Tensor:
    """Frames decoded from the tiles by a single VAE."""
    with open_vae(tiles.vae) as vae:
        return vae.decode(tiles.latents, device="cpu", tiling=TILING)


def decode(pool: Any, task: DecodeTask, tiling: Tiling = TILING, **given: Any) -> torch.Tensor:
    with open_vae(task.vae) as vae:
        needs = vae.decode_needs(task.latents)
    ref = WorkersRef(count=len(pool.workers), max_restarts=1, timeout_s=60.0)
    return decode_in_shared_tiles(pool, ref, task, tiling, needs, **given)


def test_tiles_of_two_workers_are_those_of_one(
    pool: Any, tiles: DecodeTask, frames: torch.Tensor
) -> None:
    two = TwoOf(pool)
    tiles_done: list[tuple[int, int]] = []
    assert torch.equal(decode(two, tiles, on_tile=lambda *done: tiles_done.append(done)), frames)
    assert set(two.tiles) == {0, 1}
    assert sum(two.tiles.values()) == tiles_done[-1][1] == len(tiles_done)


def test_tiles_are_as_large_as_the_memory_of_workers_allows(pool: Any, tiles: DecodeTask) -> None:
    two = TwoOf(pool)
    with open_vae(tiles.vae) as vae:
        needs, weights = vae.decode_needs(tiles.latents), vae.weight_bytes
        by_memory = tiles_by_memory(two, needs, weight_bytes=weights, memory_bytes=0, videos=2)
        whole = vae.decode(tiles.latents, device="cpu")
    assert not by_memory.cuts(13, 14), "a whole video for each"
    assert torch.allclose(decode(two, tiles, by_memory), whole, atol=1e-5)
    assert two.tiles == {0: 1, 1: 1}


def test_a_worker_that_is_killed_at_a_tile_costs_no_frame(
    pool: Any, tiles: DecodeTask, frames: torch.Tensor
) -> None:
    two, killed = TwoOf(pool), pid_of(pool, 1)

    def on_tile(done: int, total: int) -> None:
        if done == 2:
            os.kill(killed, signal.SIGKILL)

    assert torch.equal(decode(two, tiles, on_tile=on_tile), frames)
    assert pid_of(pool, 1) != killed


def test_a_decode_that_is_stopped_leaves_workers_that_decode(
    pool: Any,
    tiles: DecodeTask,
    frames: torch.Tensor,
    task: RunTask,
    driver: Driver,
    undisturbed: torch.Tensor,
) -> None:
    decoded: list[int] = []

    def check() -> None:
        if decoded:
            raise DecodeCancelled("stopped by the test")

    with pytest.raises(DecodeCancelled, match="by the test"):
        decode(pool, tiles, on_tile=lambda done, total: decoded.append(done), check=check)
    assert torch.equal(decode(pool, tiles), frames)
    assert torch.equal(driver.denoise(task.experts, task.request, task.policy).latents, undisturbed)


def test_one_loss_too_many_is_told_with_the_log_of_the_worker(pool: Any, task: RunTask) -> None:
    """The last test with the pool, as it leaves a worker less."""

    def on_step(step: StepProgress) -> None:
        if step.done == 1:
            os.kill(pid_of(pool, 2), signal.SIGKILL)

    with pytest.raises(
        RestartLimitError,
        match=r"(?s)worker 2 \(process \d+ on .*\) is gone.*after 0 worker restarts",
    ):
        driver = Driver(pool, ref_of(MESH, max_restarts=0), MESH)
        driver.denoise(task.experts, task.request, task.policy, on_step=on_step)


def _left_behind() -> set[str]:
    """Return this process and all descendants, their listening ports, and shared memory files."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {
        f"port {each.laddr.port}"
        for process in family
        if process.is_running()
        for each in process.net_connections()
        if each.status == psutil.CONN_LISTEN
    }
    return {f"process {process.pid}" for process in family} | listening | names_in_shared_memory()


def _open_things(pids: list[int]) -> set[str]:
    """Return resources a stopped run could leak: worker sockets, shared memory, processes."""
    processes = {
        f"process number {place}"
        for place, _ in enumerate(psutil.Process().children(recursive=True))
    }
    connections = {
        f"connection number {place} of process {pid}"
        for pid in pids
        for place, _ in enumerate(psutil.Process(pid).net_connections())
    }
    return processes | connections | names_in_shared_memory()


def _stays_open(opened: Callable[[], set[str]], before: set[str]) -> set[str]:
    """Return new resources still there after a minute.

    A leak stays. Ray's connections may end late on a busy machine, and other programs use shared
    memory too.
    """
    deadline = time.monotonic() + 60
    while (after := opened() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return after
