"""Driver with real workers in real processes, joined over gloo: every mesh, and failures in it."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.distributed import Driver, wire_traffic
from wanstream.distributed.driver import driver as driver_module
from wanstream.sampling import request_run_shape
from wanstream.sampling.inputs import ExtraTokens
from wanstream.sampling.steps import SamplingCancelled, StepProgress
from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.refs import ExpertsRef, WorkersRef
from wanstream.tests.support.distributed.process_pool import ProcessPool
from wanstream.tests.support.distributed.processes import Processes
from wanstream.tests.support.rounding import ROUNDING, distance
from wanstream.tests.support.sampling.runs import changed_request, normal
from wanstream.wan.experts.open import ExpertsRegistry

WORKERS = 4


@pytest.fixture(scope="module")
def pool(processes):
    with ProcessPool(processes, WORKERS) as started:
        yield started


def driver_of(pool, mesh, **settings):
    settings = {"timeout_s": 60.0, "max_restarts": 3, **settings}
    return Driver(pool, WorkersRef(count=mesh.size, **settings), mesh)


def run(driver, task, **more):
    return driver.denoise(task.experts, task.request, task.policy, **more)


def stop_after(driver, task, step):
    """Stop a run after this step, and return the block before which it stopped."""
    stop = threading.Event()

    def on_step(progress: StepProgress) -> None:
        if progress.done == step:
            stop.set()

    with pytest.raises(SamplingCancelled) as cancelled:
        run(driver, task, on_step=on_step, should_stop=stop.is_set)
    return cancelled.value.block


@pytest.fixture
def batch_task(make_task):
    """`batch_task(batch, **request)`: a task with several samples, each with different noise."""
    return lambda batch, **request: make_task(
        request={"noise": normal(batch, 16, 2, 4, 6, seed=10), **request}
    )


@pytest.mark.parametrize(
    "mesh",
    [
        *(Mesh(data=2), Mesh(data=2, stage=2), Mesh(stage=2, cfg=2)),
        *(Mesh(data=2, ulysses=2), Mesh(cfg=2, ulysses=2)),
    ],
    ids=str,
)
def test_every_mesh_gives_what_one_worker_gives(mesh, pool, batch_task, alone):
    task = batch_task(4 if mesh.data * mesh.stage > 1 else 1)
    ran = run(driver_of(pool, mesh), task)
    most = 0 if mesh.ulysses == 1 else ROUNDING
    assert distance(ran.latents, alone(task)) <= most
    assert len({worker.pid for worker in pool.workers[: mesh.size]} - {os.getpid()}) == mesh.size
    # The faster one of two rows may take all videos in a stage.
    assert set(ran.timelines) == set(range(mesh.size)) or mesh.data * mesh.stage == 4
    assert (ran.gathered_bytes > 0) == (mesh.cell_size > 1)
    assert [step.index for step in ran.timeline.steps] == list(range(len(ran.timeline.steps)))


def test_ulysses_shares_out_the_heads_of_the_sample_model(pool, make_task, alone, sample_models):
    file = f"{sample_models}/diffusion_models/wan2.2_t2v_%s_noise_14B_fp8_scaled.safetensors"
    files = {f"{expert}_noise": Path(file % expert) for expert in ("high", "low")}
    task = make_task(experts=ExpertsRef(**files, compute_dtype="float32"))
    ran = run(driver_of(pool, Mesh(ulysses=2)), task)
    assert distance(ran.latents, alone(task)) <= ROUNDING


def test_in_two_stages_no_worker_changes_its_expert(pool, batch_task, alone):
    task = batch_task(8)
    ran = run(driver_of(pool, Mesh(stage=2)), task)
    assert torch.equal(ran.latents, alone(task))
    for rank, expert in enumerate(("high", "low")):
        steps = ran.timelines[rank].steps
        assert {step.expert for step in steps} == {expert}
        indices = [step.index for step in steps]
        assert indices == [2 * rank, 2 * rank + 1] * 8, "one video after the other"
    first, second = (timeline.steps for timeline in ran.timelines.values())
    assert first[-1].start_s > second[0].start_s, "both stages work at once"


def test_next_run_has_another_seed_or_experts(pool, make_task, experts_ref, alone):
    driver = driver_of(pool, Mesh(stage=2))
    swapped = make_task(seed=20, experts=experts_ref(high=2, low=1))
    made = []
    for task in (make_task(), make_task(seed=20), swapped, make_task()):
        made.append(run(driver, task).latents)
        assert torch.equal(made[-1], alone(task))
    assert torch.equal(made[0], made[3])
    assert not torch.equal(made[1], made[2])


@pytest.mark.parametrize(
    ("mesh", "rank", "handover_s"),
    [(Mesh(stage=2), 1, 0.0), (Mesh(cfg=2), 0, 60.0), (Mesh(cfg=2), 0, 0.1)],
    ids=str,
)
def test_a_killed_worker_is_replaced_and_no_bit_changes(
    mesh, rank, handover_s, pool, batch_task, alone, monkeypatch
):
    """Also between two handovers, after which the leader's steps are taken again."""
    interval = "wanstream.distributed.driver.driver.handover_interval_s"
    monkeypatch.setattr(interval, lambda nbytes, groups: handover_s)
    task = batch_task(2, solver="unipc")
    steps = list[StepProgress]()

    def on_step(step: StepProgress) -> None:
        steps.append(step)
        if len(steps) == 2:
            os.kill(pool.workers[rank].pid, signal.SIGKILL)

    ran = run(driver_of(pool, mesh), task, on_step=on_step)
    assert torch.equal(ran.latents, alone(task))
    assert ran.restarts == 1
    assert [step.done for step in steps] == list(range(1, steps[-1].total + 1))


def test_a_worker_that_hangs_is_found_by_those_who_wait_for_it(pool, batch_task, alone):
    frozen = pool.workers[1].pid
    # Enough steps to keep the worker busy until this process comes to stop it.
    task = batch_task(1, steps=60, switch_step=30)

    def on_step(step: StepProgress) -> None:
        if step.done == 2:
            os.kill(frozen, signal.SIGSTOP)

    ran = run(driver_of(pool, Mesh(cfg=2), timeout_s=6.0), task, on_step=on_step)
    assert torch.equal(ran.latents, alone(task))
    assert ran.restarts == 1
    assert pool.workers[1].pid != frozen
    assert "waited 6 s" in ran.timeline.changes[0]


@pytest.mark.parametrize("machines", [{}, {1: "other"}])
def test_oom_of_one_rank_shrinks_its_whole_cell(machines, processes, make_task, alone):
    task = make_task(policy=OffloadPolicy.layerwise(3))
    given = {"short_at": {1: 2 * 4 + 1}, "machines": machines}  # 4 blocks a step
    with ProcessPool(processes, 2, first=WORKERS, **given) as pool:
        ran = run(driver_of(pool, Mesh(cfg=2), max_restarts=0), task)
        assert torch.equal(ran.latents, alone(task))
        assert (ran.restarts, pool.replaced) == (0, [])
        (change,) = ran.timeline.changes
        assert change.startswith("worker 1 ")
        assert "out of memory in step 2" in change


def test_stop_between_machines_leaves_workers(processes, make_task, alone):
    task = make_task()
    long = replace(task, request=changed_request(task.request, steps=1000, switch_step=500))
    machines = {2: "other", 3: "other"}
    with ProcessPool(processes, 4, first=WORKERS, machines=machines) as pool:
        pids = [worker.pid for worker in pool.workers]
        for mesh, blocks in ((Mesh(cfg=2, ulysses=2), {0}), (Mesh(data=2, cfg=2), set(range(4)))):
            driver = driver_of(pool, mesh)
            assert {stop_after(driver, long, at) for at in (1, 3, 4)} <= blocks
            assert distance(run(driver, task).latents, alone(task)) <= ROUNDING
        assert [worker.pid for worker in pool.workers] == pids


CONTEXT = {"tokens": ExtraTokens(context=(torch.ones(1, 16, 2, 4, 6),)), "context_guidance": 1.5}
"""Lanes with 24, 12 and 24 tokens."""


@pytest.mark.parametrize(
    ("mesh", "changes"), [(Mesh(cfg=2), CONTEXT), (Mesh(ulysses=2), {})], ids=["cfg", "ulysses"]
)
def test_predicted_traffic_is_what_workers_receive(mesh, changes, processes, make_task):
    task = make_task(request=changes)
    registry = ExpertsRegistry()
    shape = request_run_shape(registry.get(task.experts), task.request, torch.device("cpu"))
    registry.free()
    with ProcessPool(processes, 2, first=WORKERS, machines={1: "other"}) as pool:
        driver = driver_of(pool, mesh)
        ran = run(driver, task)
        ((_, facts),) = driver.workers
    traffic = wire_traffic(mesh, [each.machine for each in facts], shape)
    assert traffic is not None
    # Each worker receives the other one's data. Ulysses gathers the output too, once per lane.
    tokens = sum(shape.lane_tokens("high"))
    shares = 2
    output = tokens // shares * 64 * shape.value_bytes if mesh.ulysses > 1 else 0
    steps = len(ran.timeline.steps)
    assert ran.gathered_bytes == 2 * steps * (traffic.bytes + output)


def job_drive_until_killed(here, task, mesh, states, handover_s, step):
    """Run a task on a driver with own workers, and kill this process in a step."""
    driver_module.handover_interval_s = lambda nbytes, groups: handover_s

    def on_step(progress):
        if progress.done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    with ProcessPool(Processes(), mesh.size) as pool:
        run(driver_of(pool, mesh), task, on_step=on_step, states=states)


NEVER_S = 1e9


@pytest.mark.parametrize(
    ("mesh", "videos", "handover_s", "dies_at", "continued"),
    [
        (Mesh(cfg=2), 1, 0.0, 2, ("continued from step 2 of an interrupted run",)),
        (Mesh(stage=2), 1, NEVER_S, 3, ("continued from step 2 of an interrupted run",)),
        (Mesh(data=2), 3, 0.0, 3, None),
    ],
    ids=["cfg 2", "stage 2, at the end of a stage", "data 2"],
)
def test_run_of_a_killed_driver_continues(
    mesh, videos, handover_s, dies_at, continued, pool, processes, make_task, alone, tmp_path
):
    task = make_task(request={"noise": normal(videos, 16, 2, 4, 6, seed=5), "solver": "unipc"})
    states = tmp_path / "states"
    driver = processes.at_least(WORKERS + 1)[WORKERS]
    killed = driver.start(job_drive_until_killed, task, mesh, states, handover_s, dies_at)
    with pytest.raises(RuntimeError, match="ended in the middle of a job"):
        killed.result()
    processes.replace(WORKERS)
    steps = list[StepProgress]()
    ran = run(driver_of(pool, mesh), task, on_step=steps.append, states=states)
    assert torch.equal(ran.latents, alone(task))
    assert not states.exists()
    done = [step.done for step in steps]
    assert done == list(range(done[0], done[-1] + 1))
    changes = ran.timeline.changes
    if continued is None:
        assert 1 <= len(changes) <= 2
        assert dies_at < done[0] <= dies_at + 3
    else:
        assert changes == continued
        assert done[0] == 3
