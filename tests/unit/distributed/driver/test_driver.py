"""Driver with workers that fail on request: only time is lost, and every run ends."""

import errno
import logging
import os
import random
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from wanstream.distributed import RestartLimitError, WorkerFailedError
from wanstream.distributed.driver import driver as driver_module
from wanstream.distributed.driver.driver import handover_interval_s
from wanstream.sampling import DenoiseRequest
from wanstream.sampling import steps as sampling
from wanstream.schema import Mesh, MeshError, OffloadPolicy, StateError
from wanstream.tests.support.distributed.fake_pool import FakePool, FakeWorker, Fault, driver_of

STEPS = 6
SWITCH = 3
LAYERWISE = OffloadPolicy.layerwise(1)
CFG = Mesh(cfg=2)
DATA_CFG = Mesh(data=2, cfg=2)
BROKEN = sampling.NonFiniteLatentError("the latent is NaN or infinite after step 3")

Steps = list[sampling.StepProgress]


def next_steps(pool: FakePool) -> list[int]:
    """Return the first step of each sent task."""
    return [task.resume.next_step if task.resume else 0 for _, task in pool.sent]


@pytest.mark.parametrize(
    ("mesh", "batch"),
    [
        *((Mesh(), 1), (Mesh(data=2), 3), (Mesh(stage=2), 3), (CFG, 1), (Mesh(data=2, stage=2), 3)),
        *((Mesh(stage=2, cfg=2), 1), (Mesh(data=2, ulysses=2), 1), (Mesh(cfg=2, ulysses=2), 3)),
    ],
    ids=str,
)
def test_every_mesh_gives_what_one_worker_gives(mesh, batch, run):
    pool = FakePool(mesh.size)
    steps = Steps()
    result = run(driver_of(pool, mesh), batch, on_step=steps.append, preview_s=0.0)
    parts = batch if mesh.stage > 1 else min(batch, mesh.data)
    total = parts * STEPS
    assert [(step.done, step.total) for step in steps] == [(n + 1, total) for n in range(total)]
    for part in range(parts):
        assert [step.index for step in steps if step.part == part] == list(range(STEPS))
    shown = [step.denoised for step in steps if step.part == 0]
    assert torch.equal(shown[-1], result.latents[: -(-batch // parts)])
    assert all(step.denoised is None for step in steps if step.part > 0), "only the first video"
    assert [step.index for step in result.timeline.steps] == list(range(STEPS))
    assert (result.timeline.switch_step, result.sigma) == (SWITCH, 0.0)
    assert (result.restarts, result.timeline.changes) == (0, ())
    computing = {rank for rank, _ in pool.sent}
    assert set(result.timelines) == computing
    busy = min(batch, mesh.data) * mesh.stage * mesh.cell_size
    assert mesh.data > 1 or computing >= set(range(busy))
    if mesh.stage == 2:
        of_ranks = [{step.expert for step in each.steps} for each in result.timelines.values()]
        assert all(len(each) == 1 for each in of_ranks)


def test_samples_are_shared_out_by_data_alone(run, request_of):
    pool = FakePool(2)
    request = request_of(3)
    run(driver_of(pool, CFG), request=request)
    assert [(rank, task.request is request) for rank, task in pool.sent] == [(0, True), (1, True)]
    pool.sent.clear()
    run(driver_of(pool, Mesh(data=2)), 5)
    assert sorted((rank, task.request.batch) for rank, task in pool.sent) == [(0, 3), (1, 2)]


@pytest.mark.parametrize(("dtype", "computed"), [("auto", "float16"), ("bfloat16", "bfloat16")])
def test_all_workers_of_a_run_compute_in_the_same_dtype(dtype, computed, run, experts, caplog):
    dtypes = dict.fromkeys(range(4), "bfloat16") | {1: "float16"}
    pool = FakePool(4, auto_dtypes=dtypes)
    with caplog.at_level(logging.INFO, "wanstream.distributed"):
        run(driver_of(pool, DATA_CFG), 2, experts=replace(experts, compute_dtype=dtype))
    assert [task.experts.compute_dtype for _, task in pool.sent] == [computed] * 4
    assert ("compute in float16 on all workers" in caplog.text) == (dtype == "auto")


@pytest.mark.parametrize(
    ("workers", "computed"),
    [
        ({}, "as stored"),
        ({1: ("int8",)}, "int8"),
        ({0: ("fp8",), 2: ("int8", "fp8")}, "fp8"),
        ({0: ("fp8",), 3: ("int8",)}, "decoded"),
        ({2: ()}, "decoded"),
    ],
    ids=str,
)
def test_all_workers_of_a_run_multiply_in_the_same_formats(workers, computed, run, experts):
    """For example, an fp8 file on an RTX 3090 next to an RTX 4090."""
    for arithmetic in ("as stored", "auto", "decoded"):
        pool = FakePool(4, multiplied=workers)
        run(driver_of(pool, DATA_CFG), 2, experts=replace(experts, arithmetic=arithmetic))
        wanted = "decoded" if arithmetic == "decoded" else computed
        assert {task.experts.arithmetic for _, task in pool.sent} == {wanted}


@pytest.mark.parametrize("trouble", ["dies", "hangs", "fails"])
def test_a_worker_that_cannot_measure_makes_all_decode(trouble, run, experts, monkeypatch, caplog):
    def measured(worker: FakeWorker, experts: Any, maps: Any) -> tuple[str, ...]:
        if worker.rank == 1 and trouble == "dies":
            worker._die()
        if worker.rank == 1 and trouble == "hangs":
            time.sleep(1)
        if worker.rank == 1 and trouble == "fails":
            raise OSError("no such file")
        return ("int8",)

    monkeypatch.setattr(FakeWorker, "_fast_formats", measured)
    monkeypatch.setattr(driver_module, "MEASURE_S", 0.2)
    pool = FakePool(2)
    run(driver_of(pool, Mesh(data=2)), 2, experts=replace(experts, arithmetic="auto"))
    assert {task.experts.arithmetic for _, task in pool.sent} == {"decoded"}
    assert "decoded, because worker 1 cannot measure" in caplog.text


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(stage=2), Mesh(data=2, stage=2), Mesh(cfg=2, ulysses=2)], ids=str
)
@pytest.mark.parametrize("seed", range(2))
def test_workers_that_die_cost_no_step_that_was_reported(mesh, seed, run):
    chance = random.Random(seed)
    steps = Steps()
    pool = FakePool(mesh.size)
    for _ in range(3):
        at = (chance.randrange(mesh.size), chance.randrange(STEPS + 1))
        pool.faults.append(Fault(*at, chance.choice(["dies", "dies after all reports"])))
    result = run(driver_of(pool, mesh), 3, on_step=steps.append)
    died = 3 - len(pool.faults)
    assert result.restarts == len(result.timeline.changes)
    # Two deaths in one step are one loss.
    assert min(died, 1) <= result.restarts <= died
    assert len(pool.replaced) <= died
    # No step is reported twice.
    assert [step.done for step in steps] == list(range(1, steps[-1].total + 1))


@pytest.fixture
def states_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make leaders hand over their state after every step."""
    monkeypatch.setattr(driver_module, "handover_interval_s", lambda nbytes, groups: 0.0)


EVERY_STATE = pytest.mark.usefixtures("states_after_every_step")


@EVERY_STATE
def test_a_loss_is_reported_with_its_worker_and_step(run):
    pool = FakePool(2, [Fault(1, 4, "dies")])
    result = run(driver_of(pool, Mesh(stage=2)))
    assert result.timeline.changes == ("worker 1 is gone; its video goes on from step 4",)
    assert next_steps(pool) == [0, SWITCH, 4]


@pytest.mark.parametrize(("rank", "resumed"), [(0, 0), (1, 4)], ids=["leader", "follower"])
def test_between_handovers_a_lost_leader_costs_its_steps(rank, resumed, run):
    pool = FakePool(2, [Fault(rank, 4, "dies")])
    steps = Steps()
    result = run(driver_of(pool, CFG), on_step=steps.append)
    assert result.timeline.changes[0].endswith(f"its video goes on from step {resumed}")
    assert next_steps(pool) == [0, 0, resumed, resumed]
    # Each step is reported and measured once.
    assert [step.done for step in steps] == list(range(1, STEPS + 1))
    assert [step.index for step in result.timeline.steps] == list(range(STEPS))
    # The other worker took some steps twice.
    taken = [step.index for step in result.timelines[1 - rank].steps]
    assert taken == [*range(4), *range(resumed, STEPS)]


def interrupt_at(number):
    """Return a callback to raise KeyboardInterrupt at that step, as the end of a process does."""

    def on_step(step: sampling.StepProgress) -> None:
        if step.done == number:
            raise KeyboardInterrupt

    return on_step


def test_requests_are_shared_for_the_run_and_tasks_have_the_same(run):
    pool = FakePool(4)
    shared = list[list[DenoiseRequest]]()
    driver = driver_of(pool, DATA_CFG)
    run(driver, 2, on_step=lambda step: shared.append([*pool.shared]))
    (requests,) = {tuple(map(id, each)) for each in shared}
    assert len(requests) == 2
    assert {id(task.request) for _, task in pool.sent} == set(requests)
    assert pool.shared == []
    with pytest.raises(KeyboardInterrupt):
        run(driver, 2, on_step=interrupt_at(1))
    assert pool.shared == [], "also after an error"


@pytest.mark.parametrize(("max_restarts", "handover_s"), [(0, None), (1, 60.0)])
def test_without_restarts_no_state_is_handed_over_before_the_end(max_restarts, handover_s, run):
    pool = FakePool(1)
    run(driver_of(pool, max_restarts=max_restarts))
    ((_, task),) = pool.sent
    assert (task.handover_s, task.preview_s) == (handover_s, None)


@EVERY_STATE
@pytest.mark.parametrize(
    ("mesh", "at"),
    [(Mesh(), 1), (Mesh(stage=2), 13), (Mesh(data=2, stage=2), 4), (CFG, 4)],
    ids=str,
)
def test_an_interrupted_run_continues_from_its_states_on_disk(mesh, at, run, tmp_path):
    states = tmp_path / "states"
    total = STEPS * (3 if mesh.stage > 1 else 1)
    with pytest.raises(KeyboardInterrupt):
        driver = driver_of(FakePool(mesh.size, step_s=0.01), mesh)
        run(driver, 3, on_step=interrupt_at(at), states=states)
    saved = len(list(states.iterdir()))
    steps = Steps()
    assert saved > 0
    result = run(driver_of(FakePool(mesh.size), mesh), 3, on_step=steps.append, states=states)
    assert at < steps[0].done <= at + 1 + mesh.size
    assert [step.done for step in steps] == list(range(steps[0].done, total + 1))
    assert len(result.timeline.changes) == saved
    assert all("of an interrupted run" in change for change in result.timeline.changes)
    if mesh == Mesh():
        assert result.timeline.changes == (f"continued from step {at} of an interrupted run",)
    assert not states.exists(), "the run has ended well"


@EVERY_STATE
def test_only_the_same_video_continues_in_another_layout(
    run, request_of, experts, experts_ref, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        run(driver_of(FakePool(1)), on_step=interrupt_at(4), states=tmp_path)
    requests = [request_of(seed=2), request_of(flow_shift=4.0)]
    refs = [experts_ref(high=2, low=1), replace(experts, compute_dtype="bfloat16")]
    for other in (*({"request": each} for each in requests), *({"experts": each} for each in refs)):
        assert run(driver_of(FakePool(1)), states=tmp_path, **other).timeline.changes == ()
    result = run(driver_of(FakePool(2), CFG), states=tmp_path)
    assert result.timeline.changes == ("continued from step 4 of an interrupted run",)


@EVERY_STATE
@pytest.mark.parametrize(
    ("failure", "error"),
    [(None, sampling.SamplingCancelled), ("dies", RestartLimitError), (BROKEN, WorkerFailedError)],
    ids=["cancelled", "given up", "failed"],
)
def test_states_are_kept_after_an_error_only(failure, error, run, tmp_path):
    pool = FakePool(1, step_s=0.01)
    states = tmp_path / "states"
    steps = Steps()
    if failure is not None:
        pool.faults.append(Fault(0, 3, failure, always=True))
    given = {"should_stop": lambda: failure is None and len(steps) > 2, "states": states}
    with pytest.raises(error):
        run(driver_of(pool, max_restarts=1), on_step=steps.append, **given)
    assert states.exists() == (failure is not None)
    continued = run(driver_of(FakePool(1)), states=states).timeline.changes
    assert continued == ("continued from step 3 of an interrupted run",) * (failure is not None)


@EVERY_STATE
def test_a_full_disk_is_reported_once_and_the_run_goes_on(run, tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    (change,) = run(driver_of(FakePool(1)), states=tmp_path / "s").timeline.changes
    refused = f"a state of this run cannot be saved in {tmp_path / 's'} (No space left on device)"
    goes_on = "the run goes on, and starts from an earlier step if its process ends"
    assert change == f"{refused}: {goes_on}"
    assert full.call_count == STEPS - 1, "every state is tried: there may be room again"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("megabytes", "groups", "seconds"),
    [(0.1, 1, 60.0), (77.4, 1, 60.0), (77.4, 8, 61.92), (77.4, 64, 495.36)],
)
def test_many_groups_hand_over_less_often(megabytes, groups, seconds):
    """One 1280x720x81 video's state takes 77.4 MB."""
    assert handover_interval_s(round(megabytes * 1e6), groups) == pytest.approx(seconds)


def test_other_groups_go_on_undisturbed(run):
    pool = FakePool(4, [Fault(0, 2, "dies")])
    run(driver_of(pool, DATA_CFG), 2)
    assert [rank for rank, _ in pool.joined].count(2) == 1, "the other group has joined once"
    sent = [(task.resume, task.until) for rank, task in pool.sent if rank == 3]
    assert sent[0] == (None, STEPS)


def test_endless_losses_end_the_run_with_the_log(run):
    pool = FakePool(2, [Fault(1, 2, "dies", always=True)])
    driver = driver_of(pool, CFG, max_restarts=2)
    told = r"(?s)worker 1 is gone.*the log of process 10\d.*2 worker restarts"
    with pytest.raises(RestartLimitError, match=told):
        run(driver)
    assert len(pool.replaced) == 2
    pool.faults.clear()
    run(driver)


@pytest.mark.parametrize("mesh", [Mesh(), CFG], ids=str)
def test_a_worker_that_hangs_is_ended_and_replaced(mesh, run):
    hung = mesh.size - 1
    pool = FakePool(mesh.size, [Fault(hung, 4, "hangs")])
    result = run(driver_of(pool, mesh, timeout_s=0.2))
    assert (pool.killed, pool.replaced, result.restarts) == ([hung], [hung], 1)


def test_oom_retry_uses_a_smaller_policy_in_the_whole_group(run):
    smaller = OffloadPolicy.layerwise(0)
    short = sampling.SmallerPolicyError("out of memory in step 4: 1 MB instead of 2 MB", smaller)
    pool = FakePool(4, [Fault(3, 4, short)])
    driver = driver_of(pool, Mesh(stage=2, cfg=2), max_restarts=0)
    result = run(driver, 2)
    sent = defaultdict[int, list[Any]](list)
    for (rank, task), step in zip(pool.sent, next_steps(pool), strict=True):
        sent[rank].append((task.policy, step))
    # The other group keeps its policy.
    assert sent[0] == sent[1] == [(LAYERWISE, 0), (LAYERWISE, 0)]
    assert sent[2] == sent[3] == [(LAYERWISE, SWITCH), (smaller, 4), (smaller, SWITCH)]
    assert (result.restarts, pool.replaced) == (0, [])
    (change,) = result.timeline.changes
    assert change.startswith("worker 3 (node-3, cpu): out of memory in step 4")
    # Another run begins with the requested policy.
    pool.sent.clear()
    assert run(driver).timeline.changes == ()
    assert {task.policy for _, task in pool.sent} == {LAYERWISE}


def test_error_is_raised_though_another_worker_hangs(run):
    pool = FakePool(2, [Fault(0, 3, BROKEN), Fault(1, 3, "hangs")])
    with pytest.raises(WorkerFailedError, match=r"worker 0 .* failed: the latent is NaN"):
        run(driver_of(pool, CFG, timeout_s=0.3))
    assert pool.killed == [1]


@pytest.mark.parametrize("mesh", [Mesh(), CFG, Mesh(data=2)], ids=str)
def test_an_error_of_a_worker_ends_the_run_and_names_it(mesh, run):
    rank = mesh.size - 1
    pool = FakePool(mesh.size, [Fault(rank, 3, BROKEN)])
    driver = driver_of(pool, mesh)
    said = rf"worker {rank} \(node-{rank}, cpu\) failed: the latent is NaN"
    with pytest.raises(WorkerFailedError, match=said) as raised:
        run(driver, 2)
    assert isinstance(raised.value.__cause__, sampling.NonFiniteLatentError)
    run(driver, 2)
    assert pool.killed == []


@pytest.mark.parametrize(
    ("mesh", "error"),
    [(Mesh(data=2, stage=2), sampling.SamplingCancelled), (CFG, KeyboardInterrupt)],
    ids=str,
)
def test_a_run_that_is_stopped_leaves_all_workers_usable(mesh, error, run, request_of):
    pool = FakePool(mesh.size, step_s=0.01)
    driver = driver_of(pool, mesh)
    stop = threading.Event()

    def on_step(step: sampling.StepProgress) -> None:
        if step.done == 2:
            stop.set()
            if error is KeyboardInterrupt:
                raise KeyboardInterrupt

    with pytest.raises(error) as raised:
        run(driver, request=request_of(3, steps=400), on_step=on_step, should_stop=stop.is_set)
    if isinstance(raised.value, sampling.SamplingCancelled):
        assert raised.value.step > 0, "that of a stopped job, and not of a waiting one"
    met = len(pool.joined)
    run(driver, 3)
    assert len(pool.joined) == met, "workers that were stopped together stay together"
    assert (pool.killed, pool.replaced) == ([], [])


def test_what_does_not_fit_is_refused(run, request_of):
    with pytest.raises(ValueError, match="a layout of 4 workers, but there are 2"):
        driver_of(FakePool(2), Mesh(data=4))
    with pytest.raises(MeshError, match="stage 4 for 2 steps"):
        run(driver_of(FakePool(4), Mesh(stage=4)), request=request_of(steps=2, switch_step=1))
    driver = driver_of(FakePool(4))
    with pytest.raises(StateError, match="computes a run"):
        run(driver, on_step=lambda step: run(driver))
