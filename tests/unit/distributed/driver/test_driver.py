"""Driver with workers that fail on request: only time is lost, and every run ends."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from wanstream.distributed.driver import driver as driver_module
from wanstream.distributed.driver.driver import Driver, handover_interval_s
from wanstream.distributed.driver.rendezvous import Rendezvous
from wanstream.distributed.driver.results import TaskLog
from wanstream.distributed.driver.stage_run import Inbox, RestartLimitError
from wanstream.distributed.driver.worker_group import WorkerFailedError, WorkerGroup
from wanstream.distributed.messages import RunTask
from wanstream.distributed.path_map import MissingPathError
from wanstream.distributed.transport.pool import WorkerLostError
from wanstream.distributed.transport.threads import run_in_thread
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import (
    NonFiniteLatentError,
    SamplingCancelled,
    SmallerPolicyError,
    StepProgress,
)
from wanstream.schema import Mesh, MeshError, OffloadPolicy, StateError
from wanstream.schema.refs import ExpertsRef, WorkersRef
from wanstream.schema.refs.workers import PathMap
from wanstream.tests.support.distributed.fake_pool import FakePool, FakeWorker, Fault, expected

STEPS, SWITCH = 6, 3
LAYERWISE = OffloadPolicy.layerwise(1)
CFG = Mesh(cfg=2)
DATA_CFG = Mesh(data=2, cfg=2)
BROKEN = NonFiniteLatentError("the latent is NaN or infinite after step 3")

RequestOf = Callable[..., DenoiseRequest]
Steps = list[StepProgress]
Run = Callable[..., Any]


@pytest.fixture
def request_of(make_task: Callable[..., RunTask]) -> RequestOf:
    """`request_of(batch=1, seed=1, **changes)`: a request with 6 steps, 3 high-noise ones."""

    def make(batch: int = 1, *, seed: int = 1, **changes: Any) -> DenoiseRequest:
        noise = torch.randn((batch, 16, 2, 4, 6), generator=torch.Generator().manual_seed(seed))
        request = {"noise": noise, "steps": STEPS, "switch_step": SWITCH, **changes}
        return make_task(request=request).request

    return make


@pytest.fixture
def experts(experts_ref: Callable[..., ExpertsRef]) -> ExpertsRef:
    return experts_ref()


@pytest.fixture
def run(request_of: RequestOf, experts: ExpertsRef) -> Run:
    """`run(driver, batch=1, **options)` computes a request on a driver and checks the latents.

    `request` and `experts` may be others.
    """

    def denoise(driver: Driver, batch: int = 1, **options: Any) -> Any:
        request = options.pop("request", None) or request_of(batch)
        of = options.pop("experts", experts)
        result = driver.denoise(of, request, LAYERWISE, **options)
        assert torch.equal(result.latents, expected(request.noise, range(STEPS)))
        return result

    return denoise


def driver_of(pool: FakePool, mesh: Mesh | None = None, **changes: Any) -> Driver:
    mesh = mesh or Mesh()
    given = {"count": mesh.size, "timeout_s": 20.0, "max_restarts": 3, **changes}
    return Driver(pool, WorkersRef(**given), mesh)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("mesh", [Mesh(cfg=2, ulysses=2), DATA_CFG, Mesh(data=4)], ids=str)
def test_three_of_four_workers_are_replaced_side_by_side(mesh, run, monkeypatch):
    """No replacement ends before all three have begun, in one group or in several."""
    pool = FakePool(4)
    starting = threading.Barrier(3)
    for rank in (1, 2, 3):
        pool.workers[rank].kill()
    replace_worker = pool.replace

    def replace_with_others(rank: int) -> FakeWorker:
        starting.wait(20)
        return replace_worker(rank)

    monkeypatch.setattr(pool, "replace", replace_with_others)
    run(driver_of(pool, mesh), mesh.data)
    assert sorted(pool.replaced) == [1, 2, 3]


def test_group_on_several_machines_votes_once_per_step(run, caplog):
    pool = FakePool(4, machines={3: "other"})
    driver = driver_of(pool, DATA_CFG)
    with caplog.at_level(logging.WARNING, "wanstream.distributed"):
        run(driver, 2)
    apart = "2 on node-2 (127.0.0.1), 3 on node-3 (127.0.0.1)"
    assert caplog.messages == [f"workers that share a video are apart: {apart}"]
    spans = {rank: rendezvous.spans_machines for rank, rendezvous in pool.joined}
    assert spans == {0: False, 1: False, 2: True, 3: True}
    machines = [[each.machine for each in facts] for _, facts in driver.workers]
    assert machines == [["", ""], ["", "other"]]


def test_samples_are_shared_out_by_data_alone(run, request_of):
    pool = FakePool(2)
    request = request_of(3)
    run(driver_of(pool, CFG), request=request)
    assert [(rank, task.request is request) for rank, task in pool.sent] == [(0, True), (1, True)]
    pool.sent.clear()
    run(driver_of(pool, Mesh(data=2)), 5)
    assert sorted((rank, task.request.batch) for rank, task in pool.sent) == [(0, 3), (1, 2)]


@pytest.mark.parametrize(
    ("dtype", "computed"), [("auto", "float16"), ("bfloat16", "bfloat16")], ids=["auto", "chosen"]
)
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


def test_groups_join_separately_and_stay_joined(run):
    pool = FakePool(4)
    driver = driver_of(pool, Mesh(stage=2, cfg=2))
    for _ in range(2):
        run(driver)
    met = sorted((rank, rendezvous.rank, rendezvous.mesh) for rank, rendezvous in pool.joined)
    assert met == [(rank, rank % 2, CFG) for rank in range(4)]
    assert {rendezvous.weights for _, rendezvous in pool.joined} == {"auto"}
    assert len({rendezvous.generation for _, rendezvous in pool.joined}) == 2


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(stage=2), Mesh(data=2, stage=2), Mesh(cfg=2, ulysses=2)], ids=str
)
@pytest.mark.parametrize("seed", range(2))
def test_workers_that_die_cost_no_step_that_was_reported(mesh, seed, run):
    chance = random.Random(seed)
    steps = Steps()
    kinds: Any = ["dies", "dies after all reports"]
    faults = [
        Fault(chance.randrange(mesh.size), chance.randrange(STEPS + 1), chance.choice(kinds))
        for _ in range(3)
    ]
    pool = FakePool(mesh.size, list(faults))
    result = run(driver_of(pool, mesh), 3, on_step=steps.append)
    died = len(faults) - len(pool.faults)
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


def interrupt_at(number: int) -> Callable[[StepProgress], None]:
    """Return a callback to raise KeyboardInterrupt at that step, as the end of a process does."""

    def on_step(step: StepProgress) -> None:
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
    others: list[dict[str, Any]] = [
        {"request": request_of(seed=2)},
        {"request": request_of(flow_shift=4.0)},
        {"experts": experts_ref(high=2, low=1)},
        {"experts": replace(experts, compute_dtype="bfloat16")},
    ]
    for other in others:
        assert run(driver_of(FakePool(1)), states=tmp_path, **other).timeline.changes == ()
    result = run(driver_of(FakePool(2), CFG), states=tmp_path)
    assert result.timeline.changes == ("continued from step 4 of an interrupted run",)


@EVERY_STATE
@pytest.mark.parametrize(
    ("failure", "error"),
    [(None, SamplingCancelled), ("dies", RestartLimitError), (BROKEN, WorkerFailedError)],
    ids=["cancelled", "given up", "failed"],
)
def test_states_are_kept_after_an_error_only(failure, error, run, tmp_path):
    pool = FakePool(1, step_s=0.01)
    states = tmp_path / "states"
    steps = Steps()
    if failure is not None:
        pool.faults.append(Fault(0, 3, failure, always=True))
    with pytest.raises(error):
        run(
            driver_of(pool, max_restarts=1),
            on_step=steps.append,
            should_stop=lambda: failure is None and len(steps) > 2,
            states=states,
        )
    assert states.exists() == (failure is not None)
    continued = run(driver_of(FakePool(1)), states=states).timeline.changes
    assert continued == ("continued from step 3 of an interrupted run",) * (failure is not None)


@EVERY_STATE
def test_a_full_disk_is_reported_once_and_the_run_goes_on(run, tmp_path, monkeypatch):
    tries: list[int] = []

    def full(handle: int) -> None:
        tries.append(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (change,) = run(driver_of(FakePool(1)), states=tmp_path / "s").timeline.changes
    assert change == (
        f"a state of this run cannot be saved in {tmp_path / 's'} (No space left on device): the "
        "run goes on, and starts from an earlier step if its process ends"
    )
    assert len(tries) == STEPS - 1, "every state is tried: there may be room again"
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
    short = SmallerPolicyError("out of memory in step 4: 1 MB instead of 2 MB", smaller)
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


def test_workers_leave_the_last_rendezvous(run):
    short = SmallerPolicyError("out of memory in step 4", OffloadPolicy.layerwise(0))
    pool = FakePool(2, [Fault(0, 4, short)], step_s=0.1, leave_s={0: 0.05})
    run(driver_of(pool, CFG, max_restarts=0))


def test_workers_leave_a_failed_rendezvous_before_the_next_one(run):
    pool = FakePool(2, step_s=0.05, leave_s={0: 0.1}, taken={5000})
    assert run(driver_of(pool, CFG, max_restarts=0)).restarts == 0


def test_error_is_raised_though_another_worker_hangs(run):
    pool = FakePool(2, [Fault(0, 3, BROKEN), Fault(1, 3, "hangs")])
    with pytest.raises(WorkerFailedError, match=r"worker 0 .* failed: the latent is NaN"):
        run(driver_of(pool, CFG, timeout_s=0.3))
    assert pool.killed == [1]


@pytest.mark.parametrize("failing", [2, 9])
def test_workers_that_do_not_start_count_as_lost(failing, run):
    pool = FakePool(2, [Fault(1, 2, "dies")])
    replace_worker = pool.replace
    tries = itertools.count()

    def sometimes(rank: int) -> FakeWorker:
        if next(tries) < failing:
            raise WorkerLostError("it does not start", rank)
        return replace_worker(rank)

    pool.replace = sometimes  # type: ignore[method-assign]
    driver = driver_of(pool, CFG)
    if failing < 3:
        assert run(driver).restarts == 3
        return
    with pytest.raises(RestartLimitError, match="not start\ngiving up after 3 worker restarts"):
        run(driver)
    # Workers that never start end a run before it begins.
    pool.sent.clear()
    with pytest.raises(RestartLimitError, match="it does not start"):
        run(driver)
    assert pool.sent == []


@pytest.mark.parametrize("mesh", [Mesh(), CFG, Mesh(data=2)], ids=str)
def test_an_error_of_a_worker_ends_the_run_and_names_it(mesh, run):
    rank = mesh.size - 1
    pool = FakePool(mesh.size, [Fault(rank, 3, BROKEN)])
    driver = driver_of(pool, mesh)
    said = rf"worker {rank} \(node-{rank}, cpu\) failed: the latent is NaN"
    with pytest.raises(WorkerFailedError, match=said) as raised:
        run(driver, 2)
    assert isinstance(raised.value.__cause__, NonFiniteLatentError)
    run(driver, 2)
    assert pool.killed == []


@pytest.mark.parametrize(
    ("mesh", "error"),
    [
        (Mesh(), KeyboardInterrupt),
        (Mesh(data=2, stage=2), SamplingCancelled),
        (CFG, KeyboardInterrupt),
    ],
    ids=str,
)
def test_a_run_that_is_stopped_leaves_all_workers_usable(mesh, error, run, request_of):
    pool = FakePool(mesh.size, step_s=0.01)
    driver, stop = driver_of(pool, mesh), threading.Event()

    def on_step(step: StepProgress) -> None:
        if step.done == 2:
            stop.set()
            if error is KeyboardInterrupt:
                raise KeyboardInterrupt

    with pytest.raises(error) as raised:
        run(driver, request=request_of(3, steps=400), on_step=on_step, should_stop=stop.is_set)
    if isinstance(raised.value, SamplingCancelled):
        assert raised.value.step > 0, "that of a stopped job, and not of a waiting one"
    met = len(pool.joined)
    run(driver, 3)
    assert len(pool.joined) == met, "workers that were stopped together stay together"
    assert (pool.killed, pool.replaced) == ([], [])


def test_a_run_can_be_stopped_while_workers_join(run):
    pool = FakePool(2)
    pool.workers[1].kill()
    pool.replace = lambda rank: (  # type: ignore[method-assign]
        pytest.fail("late") if threading.Event().wait(1) else FakePool(2).workers[1]
    )
    with pytest.raises(SamplingCancelled):
        run(driver_of(pool, CFG), should_stop=lambda: True)


def test_worker_lost_between_runs_is_replaced(run):
    pool = FakePool(2)
    driver = driver_of(pool, Mesh(data=2), max_restarts=0)
    run(driver, 2)
    pool.workers[1].kill()
    assert (run(driver, 2).restarts, pool.replaced) == (0, [1]), "no loss of this run"


def layouts(pool: FakePool, rank: int) -> list[str]:
    return [str(rendezvous.mesh) for each, rendezvous in pool.joined if each == rank]


def test_workers_that_left_for_another_driver_join_again(run):
    """The host closed them, or another driver joined them in between."""
    pool = FakePool(2)
    first = driver_of(pool, CFG)
    second = driver_of(pool, Mesh(ulysses=2))
    for driver in (first, second, first):
        run(driver)
    for closed in [worker.call("close") for worker in pool.workers]:
        closed.result(10)
    run(first)
    assert layouts(pool, 1) == ["cfg 2", "ulysses 2", "cfg 2", "cfg 2"]
    assert pool.replaced == []


def test_a_repair_of_a_former_driver_is_awaited(run):
    """Otherwise both drivers would replace the same worker and join it to different groups."""
    pool = FakePool(2, [Fault(1, 2, "dies")])
    replace_worker = pool.replace
    repairing = threading.Event()
    go_on = threading.Event()

    def slowly(rank: int) -> FakeWorker:
        repairing.set()
        assert go_on.wait(60)
        return replace_worker(rank)

    pool.replace = slowly  # type: ignore[method-assign]
    first = driver_of(pool, CFG)
    with pytest.raises(SamplingCancelled) as stopped:
        run(first, should_stop=repairing.is_set)
    assert stopped.value.step == 2, "no job was stopped: it is the next step"
    ref = WorkersRef(count=2, timeout_s=20.0, max_restarts=0)
    running = run_in_thread("second", run, Driver(pool, ref, Mesh(ulysses=2), follows=first))
    threading.Timer(0.3, go_on.set).start()
    assert (running.result(60).restarts, pool.replaced) == (0, [1])
    assert layouts(pool, 0) == ["cfg 2", "cfg 2", "ulysses 2"]


def test_a_disabled_group_repairs_nothing():
    pool = FakePool(2)
    ref = WorkersRef(count=2, timeout_s=20.0)
    late, now = (WorkerGroup(Rendezvous(pool, ref, (0, 1), CFG), [], [], TaskLog()) for _ in "12")
    late.rendezvous.disable()
    for group, joined in ((late, 0), (now, 2)):
        inbox: Inbox = queue.SimpleQueue()
        ended = group.repair(inbox).receive(inbox.get(timeout=10)).end
        assert ended is not None
        assert (ended.error, len(pool.joined)) == (None, joined)
    assert sorted(rank for rank, _ in pool.joined) == [0, 1]


@pytest.mark.parametrize("left", [0, 3, 4])
def test_ports_that_are_taken_are_passed_over(left, run):
    driver = driver_of(FakePool(2, taken=set(range(5000, 5000 + left))), CFG)
    if left < 4:
        run(driver)
        return
    with pytest.raises(OSError, match="port 5003") as raised:
        run(driver)
    assert raised.value.errno == errno.EADDRINUSE


def test_files_missing_on_a_machine_are_named(run, experts):
    high = experts.high_noise
    there = str(high.parent).replace("/", "/x", 1)
    pool = FakePool(2, missing={1: (str(high),)})
    maps = (PathMap(here=str(high.parent), there=there),)
    driver = driver_of(pool, Mesh(data=2), paths=maps)
    with pytest.raises(MissingPathError, match=rf"^{there}/.* or {high} does not exist on node-1"):
        run(driver, 2)
    assert pool.sent == []
    pool.missing = {}
    run(driver, 2)
    # Each worker finds its own.
    assert {(task.experts, task.paths) for _, task in pool.sent} == {(experts, maps)}


def test_what_does_not_fit_is_refused(run, request_of):
    with pytest.raises(ValueError, match="a layout of 4 workers, but there are 2"):
        driver_of(FakePool(2), Mesh(data=4))
    with pytest.raises(MeshError, match="stage 4 for 2 steps"):
        run(driver_of(FakePool(4), Mesh(stage=4)), request=request_of(steps=2, switch_step=1))
    driver = driver_of(FakePool(4))
    with pytest.raises(StateError, match="computes a run"):
        run(driver, on_step=lambda step: run(driver))
