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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from wanstream.schema.refs import WorkersRef
from wanstream.schema.refs.workers import PathMap

STEPS, SWITCH = 6, 3
LAYERWISE = OffloadPolicy.layerwise(1)

MakeTask = Callable[..., RunTask]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def request_of(make_task: MakeTask) -> Callable[..., DenoiseRequest]:
    """Return a function for requests with 6 steps, 3 high-noise ones."""

    def make(batch: int = 1, *, seed: int = 1, **changes: Any) -> DenoiseRequest:
        asked = {
            "noise": normal(batch, 16, 2, 4, 6, seed=seed),
            "steps": STEPS,
            "switch_step": SWITCH,
        }
        task = make_task(request={**asked, **changes})
        return task.request

    return make


def driver_of(pool: Any, mesh: Mesh, **changes: Any) -> Driver:
    given = {"count": mesh.size, "timeout_s": 20.0, "max_restarts": 3}
    return Driver(pool, WorkersRef(**{**given, **changes}), mesh)


MESHES = [
    Mesh(),
    Mesh(data=2),
    Mesh(stage=2),
    Mesh(cfg=2),
    Mesh(data=2, stage=2),
    Mesh(stage=2, cfg=2),
    Mesh(data=2, ulysses=2),
    Mesh(cfg=2, ulysses=2),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_mesh_gives_what_one_worker_gives(
    mesh: Mesh, batch: int, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(mesh.size)
    steps: list[StepProgress] = []
    driver = driver_of(pool, mesh)
    result = driver.denoise(
        experts_ref(), request_of(batch), LAYERWISE, on_step=steps.append, preview_s=0.0
    )
    assert torch.equal(result.latents, fakes.expected(request_of(batch).noise, range(STEPS)))
    parts = batch if mesh.stage > 1 else min(batch, mesh.data)
    assert [(step.done, step.total) for step in steps] == [
        (n + 1, parts * STEPS) for n in range(parts * STEPS)
    ]
    shown = [step.denoised for step in steps if step.part == 0]
    assert all(step.denoised is None for step in steps if step.part > 0), (
        "only the first video is shown"
    )
    for part in range(parts):
        assert [step.index for step in steps if step.part == part] == list(range(STEPS))
    assert torch.equal(shown[-1], result.latents[: -(-batch // parts)])
    assert [step.index for step in result.timeline.steps] == list(range(STEPS))
    assert result.timeline.switch_step == SWITCH
    assert result.sigma == 0.0
    assert (result.restarts, result.timeline.changes) == (0, ())
    computing = {rank for rank, _ in pool.sent}
    assert set(result.timelines) == computing
    assert (
        computing >= set(range(min(batch, mesh.data) * mesh.stage * mesh.cell_size))
        or mesh.data > 1
    )
    if mesh.stage == 2:
        assert all(
            len({step.expert for step in each.steps}) == 1 for each in result.timelines.values()
        )


@pytest.mark.parametrize(
    "mesh", [Mesh(cfg=2, ulysses=2), Mesh(data=2, cfg=2), Mesh(data=4)], ids=str
)
def test_three_of_four_workers_are_replaced_side_by_side(
    mesh: Mesh, fakes: Any, request_of: Any, experts_ref: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No replacement ends before all three have begun, in one group or in several."""
    pool, starting = fakes.FakePool(4), threading.Barrier(3)
    for rank in (1, 2, 3):
        pool.workers[rank].kill()
    replace_worker = pool.replace

    def replace_with_others(rank: int) -> Any:
        starting.wait(20)
        return replace_worker(rank)

    monkeypatch.setattr(pool, "replace", replace_with_others)
    request = request_of(mesh.data)
    result = driver_of(pool, mesh).denoise(experts_ref(), request, LAYERWISE)
    assert torch.equal(result.latents, fakes.expected(request.noise, range(STEPS)))
    assert sorted(pool.replaced) == [1, 2, 3]


def test_a_group_on_several_machines_is_logged_and_votes_once_per_step(
    fakes: Any, request_of: Any, experts_ref: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = fakes.FakePool(4, machines={3: "other"})
    driver = driver_of(pool, Mesh(data=2, cfg=2))
    with caplog.at_level(logging.WARNING, "wanstream.distributed"):
        driver.denoise(experts_ref(), request_of(2), LAYERWISE)
    assert [record.getMessage() for record in caplog.records] == [
        "workers that share a video are apart: 2 on node-2 (127.0.0.1), 3 on node-3 (127.0.0.1)"
    ]
    spans = {rank: rendezvous.spans_machines for rank, rendezvous in pool.joined}
    assert spans == {0: False, 1: False, 2: True, 3: True}
    assert [[each.machine for each in facts] for _, facts in driver.workers] == [
        ["", ""],
        ["", "other"],
    ]


def test_without_data_and_stages_a_batch_is_one_task(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool, request = fakes.FakePool(2), request_of(3)
    driver_of(pool, Mesh(cfg=2)).denoise(experts_ref(), request, LAYERWISE)
    assert [(rank, task.request is request) for rank, task in pool.sent] == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("asked", "computed"), [("auto", "float16"), ("bfloat16", "bfloat16")], ids=["auto", "chosen"]
)
def test_all_workers_of_a_run_compute_in_the_same_dtype(
    asked: str,
    computed: str,
    fakes: Any,
    request_of: Any,
    experts_ref: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = fakes.FakePool(
        4, auto_dtypes={0: "bfloat16", 1: "float16", 2: "bfloat16", 3: "bfloat16"}
    )
    with caplog.at_level(logging.INFO, "wanstream.distributed"):
        experts = replace(experts_ref(), compute_dtype=asked)
        driver_of(pool, Mesh(data=2, cfg=2)).denoise(experts, request_of(2), LAYERWISE)
    assert len(pool.sent) == 4
    assert {task.experts.compute_dtype for _, task in pool.sent} == {computed}
    assert ("compute in float16 on all workers" in caplog.text) == (asked == "auto")


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
def test_all_workers_of_a_run_multiply_in_the_same_formats(
    workers: Any, computed: str, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    """For example, an fp8 file on an RTX 3090 next to an RTX 4090."""
    pool = fakes.FakePool(4, multiplied=workers)
    for asked in ("as stored", "auto", "decoded"):
        pool.sent.clear()
        experts = replace(experts_ref(), arithmetic=asked)
        driver_of(pool, Mesh(data=2, cfg=2)).denoise(experts, request_of(2), LAYERWISE)
        assert {task.experts.arithmetic for _, task in pool.sent} == {
            "decoded" if asked == "decoded" else computed
        }


@pytest.mark.parametrize("trouble", ["dies", "hangs", "fails"])
def test_a_worker_that_cannot_measure_makes_all_decode(
    trouble: str,
    fakes: Any,
    request_of: Any,
    experts_ref: Any,
    monkeypatch: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def measured(worker: Any, experts: Any, maps: Any) -> tuple[str, ...]:
        if worker.rank == 1 and trouble == "dies":
            worker._die()
        if worker.rank == 1 and trouble == "hangs":
            time.sleep(1)
        if worker.rank == 1 and trouble == "fails":
            raise OSError("no such file")
        return ("int8",)

    monkeypatch.setattr(fakes.FakeWorker, "_fast_formats", measured)
    monkeypatch.setattr(driver_module, "MEASURE_S", 0.2)
    pool = fakes.FakePool(2)
    driver_of(pool, Mesh(data=2)).denoise(
        replace(experts_ref(), arithmetic="auto"), request_of(2), LAYERWISE
    )
    assert {task.experts.arithmetic for _, task in pool.sent} == {"decoded"}
    assert "decoded, because worker 1 cannot measure" in caplog.text


def test_samples_are_shared_out_evenly(fakes: Any, request_of: Any, experts_ref: Any) -> None:
    pool = fakes.FakePool(2)
    driver_of(pool, Mesh(data=2)).denoise(experts_ref(), request_of(5), LAYERWISE)
    assert sorted((rank, task.request.batch) for rank, task in pool.sent) == [(0, 3), (1, 2)]


def test_groups_join_separately_and_stay_joined(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool, mesh = fakes.FakePool(4), Mesh(stage=2, cfg=2)
    driver = driver_of(pool, mesh)
    for _ in range(2):
        driver.denoise(experts_ref(), request_of(), LAYERWISE)
    met = sorted((rank, rendezvous.rank, rendezvous.mesh) for rank, rendezvous in pool.joined)
    assert met == [(rank, rank % 2, Mesh(cfg=2)) for rank in range(4)]
    assert {rendezvous.weights for _, rendezvous in pool.joined} == {"auto"}
    assert len({rendezvous.generation for _, rendezvous in pool.joined}) == 2


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(stage=2), Mesh(data=2, stage=2), Mesh(cfg=2, ulysses=2)], ids=str
)
@pytest.mark.parametrize("seed", range(4))
def test_workers_that_die_cost_no_step_that_was_reported(
    mesh: Mesh, seed: int, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    chance = random.Random(seed)
    faults = [
        fakes.Fault(
            rank=chance.randrange(mesh.size),
            step=chance.randrange(STEPS + 1),
            failure=chance.choice(["dies", "dies after all reports"]),
        )
        for _ in range(3)
    ]
    pool = fakes.FakePool(mesh.size, list(faults))
    steps: list[StepProgress] = []
    result = driver_of(pool, mesh).denoise(
        experts_ref(), request_of(3), LAYERWISE, on_step=steps.append
    )
    assert torch.equal(result.latents, fakes.expected(request_of(3).noise, range(STEPS)))
    died = len(faults) - len(pool.faults)
    assert result.restarts == len(result.timeline.changes)
    # Two deaths in one step are one loss.
    assert min(died, 1) <= result.restarts <= died
    assert len(pool.replaced) <= died
    assert [step.done for step in steps] == list(range(1, steps[-1].total + 1)), (
        "no step is reported twice"
    )


@pytest.fixture
def states_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make leaders hand over their state after every step."""
    monkeypatch.setattr(
        "wanstream.distributed.driver.driver.handover_interval_s", lambda nbytes, groups: 0.0
    )


@pytest.mark.usefixtures("states_after_every_step")
def test_a_loss_is_reported_with_its_worker_machine_and_step(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2, [fakes.Fault(rank=1, step=4, failure="dies")])
    result = driver_of(pool, Mesh(stage=2)).denoise(experts_ref(), request_of(), LAYERWISE)
    assert result.timeline.changes == ("worker 1 is gone; its video goes on from step 4",)
    again = [
        task.resume.next_step for rank, task in pool.sent if rank == 1 and task.resume is not None
    ]
    assert again == [SWITCH, 4]


@pytest.mark.parametrize(("rank", "resumed"), [(0, 0), (1, 4)], ids=["leader", "follower"])
def test_between_two_handovers_the_loss_of_a_leader_costs_its_steps_and_no_other(
    rank: int, resumed: int, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool, steps = (
        fakes.FakePool(2, [fakes.Fault(rank=rank, step=4, failure="dies")]),
        list[StepProgress](),
    )
    result = driver_of(pool, Mesh(cfg=2)).denoise(
        experts_ref(), request_of(), LAYERWISE, on_step=steps.append
    )
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))
    assert result.timeline.changes[0].endswith(f"its video goes on from step {resumed}")
    assert [task.resume.next_step if task.resume else 0 for _, task in pool.sent] == [
        0,
        0,
        resumed,
        resumed,
    ]
    assert [step.done for step in steps] == list(range(1, STEPS + 1)), "no step is reported twice"
    assert [step.index for step in result.timeline.steps] == list(range(STEPS)), (
        "each step is measured once"
    )
    taken = [step.index for step in result.timelines[1 - rank].steps]
    assert taken == [*range(4), *range(resumed, STEPS)], (
        "a worker that was not lost took some steps twice"
    )


def test_requests_are_shared_for_the_run_and_tasks_have_the_same(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool, shared = fakes.FakePool(4), list[list[DenoiseRequest]]()
    driver = driver_of(pool, Mesh(data=2, cfg=2))
    driver.denoise(
        experts_ref(), request_of(2), LAYERWISE, on_step=lambda step: shared.append([*pool.shared])
    )
    (requests,) = {tuple(map(id, each)) for each in shared}
    assert len(requests) == 2
    assert {id(task.request) for _, task in pool.sent} == set(requests)
    assert pool.shared == []
    with pytest.raises(KeyboardInterrupt):
        driver.denoise(experts_ref(), request_of(2), LAYERWISE, on_step=interrupt_at(1))
    assert pool.shared == [], "also after an error"


def interrupt_at(number: int) -> Callable[[StepProgress], None]:
    """Return a callback to raise KeyboardInterrupt at that step, as the end of a process does."""

    def on_step(step: StepProgress) -> None:
        if step.done == number:
            raise KeyboardInterrupt

    return on_step


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_without_restarts_no_state_is_handed_over_before_the_end(
    max_restarts: int, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(1)
    driver_of(pool, Mesh(), max_restarts=max_restarts).denoise(
        experts_ref(), request_of(), LAYERWISE
    )
    ((_, task),) = pool.sent
    assert (task.handover_s, task.preview_s) == (60.0 if max_restarts else None, None)


@pytest.mark.usefixtures("states_after_every_step")
@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(stage=2), Mesh(data=2, stage=2), Mesh(cfg=2)], ids=str
)
@pytest.mark.parametrize("at", [1, 4, 13])
def test_a_run_that_was_interrupted_continues_from_its_states_on_disk(
    mesh: Mesh, at: int, fakes: Any, request_of: Any, experts_ref: Any, tmp_path: Path
) -> None:
    states, batch = tmp_path / "states", 3
    total = STEPS * (batch if mesh.stage > 1 else 1)
    at = min(at, total - 1)
    with pytest.raises(KeyboardInterrupt):
        driver_of(fakes.FakePool(mesh.size, step_s=0.01), mesh).denoise(
            experts_ref(), request_of(batch), LAYERWISE, on_step=interrupt_at(at), states=states
        )
    saved = len(list(states.iterdir()))
    assert saved > 0
    pool, steps = fakes.FakePool(mesh.size), list[StepProgress]()
    driver = driver_of(pool, mesh)
    result = driver.denoise(
        experts_ref(), request_of(batch), LAYERWISE, on_step=steps.append, states=states
    )
    assert torch.equal(result.latents, fakes.expected(request_of(batch).noise, range(STEPS)))
    assert at < steps[0].done <= at + 1 + mesh.size
    assert [step.done for step in steps] == list(range(steps[0].done, total + 1))
    assert len(result.timeline.changes) == saved
    assert all("of an interrupted run" in change for change in result.timeline.changes)
    if mesh == Mesh():
        assert result.timeline.changes == (f"continued from step {at} of an interrupted run",)
    assert not states.exists(), "the run has ended well"


@pytest.mark.usefixtures("states_after_every_step")
def test_another_layout_continues_the_same_video_and_no_other_does(
    fakes: Any, request_of: Any, experts_ref: Any, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        driver_of(fakes.FakePool(1), Mesh()).denoise(
            experts_ref(), request_of(), LAYERWISE, on_step=interrupt_at(4), states=tmp_path
        )
    others = [
        (experts_ref(), request_of(seed=2)),
        (experts_ref(), request_of(flow_shift=4.0)),
        (experts_ref(high=2, low=1), request_of()),
        (replace(experts_ref(), compute_dtype="bfloat16"), request_of()),
    ]
    for experts, request in others:
        other = driver_of(fakes.FakePool(1), Mesh()).denoise(
            experts, request, LAYERWISE, states=tmp_path
        )
        assert other.timeline.changes == ()
    result = driver_of(fakes.FakePool(2), Mesh(cfg=2)).denoise(
        experts_ref(), request_of(), LAYERWISE, states=tmp_path
    )
    assert result.timeline.changes == ("continued from step 4 of an interrupted run",)
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))


@pytest.mark.usefixtures("states_after_every_step")
@pytest.mark.parametrize("how", ["cancelled", "given up", "failed"])
def test_states_are_removed_after_a_cancel_and_kept_after_an_error(
    how: str, fakes: Any, request_of: Any, experts_ref: Any, tmp_path: Path
) -> None:
    pool, states, steps = fakes.FakePool(1, step_s=0.01), tmp_path / "states", list[StepProgress]()
    if how != "cancelled":
        failure = "dies" if how == "given up" else NonFiniteLatentError("the latent is NaN")
        pool.faults.append(fakes.Fault(rank=0, step=3, failure=failure, always=True))
    errors = {
        "cancelled": SamplingCancelled,
        "given up": RestartLimitError,
        "failed": WorkerFailedError,
    }
    with pytest.raises(errors[how]):
        driver_of(pool, Mesh(), max_restarts=1).denoise(
            experts_ref(),
            request_of(),
            LAYERWISE,
            on_step=steps.append,
            should_stop=lambda: how == "cancelled" and len(steps) > 2,
            states=states,
        )
    assert states.exists() == (how != "cancelled")
    again = driver_of(fakes.FakePool(1), Mesh()).denoise(
        experts_ref(), request_of(), LAYERWISE, states=states
    )
    assert torch.equal(again.latents, fakes.expected(request_of().noise, range(STEPS)))
    continued = ("continued from step 3 of an interrupted run",)
    assert again.timeline.changes == (() if how == "cancelled" else continued)


@pytest.mark.usefixtures("states_after_every_step")
def test_a_full_disk_is_reported_once_and_the_run_goes_on(
    fakes: Any, request_of: Any, experts_ref: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def full(handle: int) -> None:
        tries.append(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = driver_of(fakes.FakePool(1), Mesh()).denoise(
        experts_ref(), request_of(), LAYERWISE, states=tmp_path / "s"
    )
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))
    (change,) = result.timeline.changes
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
def test_many_groups_hand_over_less_often(megabytes: float, groups: int, seconds: float) -> None:
    """One 1280x720x81 video's state takes 77.4 MB."""
    assert handover_interval_s(round(megabytes * 1e6), groups) == pytest.approx(seconds)


def test_other_groups_go_on_undisturbed(fakes: Any, request_of: Any, experts_ref: Any) -> None:
    pool = fakes.FakePool(4, [fakes.Fault(rank=0, step=2, failure="dies")])
    driver_of(pool, Mesh(data=2, cfg=2)).denoise(experts_ref(), request_of(2), LAYERWISE)
    assert [rank for rank, _ in pool.joined].count(2) == 1, "the other group has joined once"
    sent = [(task.resume, task.until) for rank, task in pool.sent if rank == 3]
    assert sent[0] == (None, STEPS)


def test_endless_losses_end_the_run_with_the_log(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2, [fakes.Fault(rank=1, step=2, failure="dies", always=True)])
    driver = driver_of(pool, Mesh(cfg=2), max_restarts=2)
    with pytest.raises(
        RestartLimitError, match=r"(?s)worker 1 is gone.*the log of process 10\d.*2 worker restarts"
    ):
        driver.denoise(experts_ref(), request_of(), LAYERWISE)
    assert len(pool.replaced) == 2
    pool.faults.clear()
    result = driver.denoise(experts_ref(), request_of(), LAYERWISE)
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(cfg=2), Mesh(stage=2)], ids=str)
def test_a_worker_that_hangs_is_ended_and_replaced(
    mesh: Mesh, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    hangs = mesh.size - 1
    pool = fakes.FakePool(mesh.size, [fakes.Fault(rank=hangs, step=4, failure="hangs")])
    result = driver_of(pool, mesh, timeout_s=0.2).denoise(experts_ref(), request_of(), LAYERWISE)
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))
    assert (pool.killed, pool.replaced) == ([hangs], [hangs])
    assert result.restarts == 1


def test_after_oom_the_whole_group_continues_with_a_smaller_policy(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    smaller = OffloadPolicy.layerwise(0)
    short = SmallerPolicyError("out of memory in step 4: 1 MB instead of 2 MB", smaller)
    pool = fakes.FakePool(4, [fakes.Fault(rank=3, step=4, failure=short)])
    driver = driver_of(pool, Mesh(stage=2, cfg=2), max_restarts=0)
    result = driver.denoise(experts_ref(), request_of(2), LAYERWISE)
    assert torch.equal(result.latents, fakes.expected(request_of(2).noise, range(STEPS)))
    sent = {rank: [] for rank in range(4)}
    for rank, task in pool.sent:
        sent[rank].append((task.policy, task.resume.next_step if task.resume else 0))
    assert sent[0] == sent[1] == [(LAYERWISE, 0), (LAYERWISE, 0)], (
        "the other group keeps its policy"
    )
    assert sent[2] == sent[3] == [(LAYERWISE, SWITCH), (smaller, 4), (smaller, SWITCH)]
    assert (result.restarts, pool.replaced) == (0, [])
    (change,) = result.timeline.changes
    assert change.startswith("worker 3 (node-3, cpu): out of memory in step 4")
    pool.sent.clear()
    assert driver.denoise(experts_ref(), request_of(), LAYERWISE).timeline.changes == ()
    assert {task.policy for _, task in pool.sent} == {LAYERWISE}, (
        "another run begins as it was asked to"
    )


def test_no_worker_leaves_the_next_rendezvous_instead_of_the_last(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    short = SmallerPolicyError("out of memory in step 4", OffloadPolicy.layerwise(0))
    pool = fakes.FakePool(
        2, [fakes.Fault(rank=0, step=4, failure=short)], step_s=0.2, leave_s={0: 0.1}
    )
    result = driver_of(pool, Mesh(cfg=2), max_restarts=0).denoise(
        experts_ref(), request_of(), LAYERWISE
    )
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))


def test_an_error_is_raised_even_if_another_worker_must_be_killed_for_it(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    broken = NonFiniteLatentError("the latent is NaN or infinite after step 3")
    faults = [
        fakes.Fault(rank=0, step=3, failure=broken),
        fakes.Fault(rank=1, step=3, failure="hangs"),
    ]
    pool = fakes.FakePool(2, faults)
    with pytest.raises(WorkerFailedError, match=r"worker 0 .* failed: the latent is NaN"):
        driver_of(pool, Mesh(cfg=2), timeout_s=0.3).denoise(experts_ref(), request_of(), LAYERWISE)
    assert pool.killed == [1]


@pytest.mark.parametrize("failing", [2, 9])
def test_workers_that_do_not_start_count_as_lost(
    failing: int, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2, [fakes.Fault(rank=1, step=2, failure="dies")])
    replace, tries = pool.replace, itertools.count()

    def sometimes(rank: int) -> Any:
        if next(tries) < failing:
            raise WorkerLostError("it does not start", rank)
        return replace(rank)

    pool.replace = sometimes
    driver = driver_of(pool, Mesh(cfg=2), max_restarts=3)
    if failing > 3:
        with pytest.raises(
            RestartLimitError, match="it does not start\ngiving up after 3 worker restarts"
        ):
            driver.denoise(experts_ref(), request_of(), LAYERWISE)
        return
    result = driver.denoise(experts_ref(), request_of(), LAYERWISE)
    assert result.restarts == 3
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))


def test_workers_that_never_start_end_a_run_before_it_begins(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2)
    pool.workers[1].kill()

    def never(rank: int) -> Any:
        raise WorkerLostError("it does not start", rank)

    pool.replace = never
    with pytest.raises(RestartLimitError, match="it does not start"):
        driver_of(pool, Mesh(cfg=2)).denoise(experts_ref(), request_of(), LAYERWISE)
    assert pool.sent == []


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(cfg=2), Mesh(data=2)], ids=str)
def test_an_error_of_a_worker_ends_the_run_and_names_it(
    mesh: Mesh, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    rank = mesh.size - 1
    broken = NonFiniteLatentError("the latent is NaN or infinite after step 3")
    pool = fakes.FakePool(mesh.size, [fakes.Fault(rank=rank, step=3, failure=broken)])
    driver = driver_of(pool, mesh)
    with pytest.raises(
        WorkerFailedError, match=rf"worker {rank} \(node-{rank}, cpu\) failed: the latent is NaN"
    ) as raised:
        driver.denoise(experts_ref(), request_of(2), LAYERWISE)
    assert isinstance(raised.value.__cause__, NonFiniteLatentError)
    result = driver.denoise(experts_ref(), request_of(2), LAYERWISE)
    assert torch.equal(result.latents, fakes.expected(request_of(2).noise, range(STEPS)))
    assert pool.killed == []


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, stage=2), Mesh(cfg=2)], ids=str)
@pytest.mark.parametrize("how", ["asked", "raised"])
def test_a_run_that_is_stopped_leaves_all_workers_usable(
    mesh: Mesh, how: str, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(mesh.size, step_s=0.01)
    driver, stop = driver_of(pool, mesh), threading.Event()

    def on_step(step: StepProgress) -> None:
        if step.done == 2:
            stop.set()
            if how == "raised":
                raise KeyboardInterrupt

    kind = KeyboardInterrupt if how == "raised" else SamplingCancelled
    with pytest.raises(kind):
        driver.denoise(
            experts_ref(),
            request_of(3, steps=400),
            LAYERWISE,
            on_step=on_step,
            should_stop=stop.is_set,
        )
    stop.clear()
    met = len(pool.joined)
    result = driver.denoise(experts_ref(), request_of(3), LAYERWISE)
    assert torch.equal(result.latents, fakes.expected(request_of(3).noise, range(STEPS)))
    assert len(pool.joined) == met, "workers that were stopped together stay together"
    assert (pool.killed, pool.replaced) == ([], [])


def test_a_run_can_be_stopped_while_workers_join(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2)
    pool.workers[1].kill()
    pool.replace = lambda rank: (
        pytest.fail("late") if threading.Event().wait(1) else fakes.FakePool(2).workers[1]
    )
    with pytest.raises(SamplingCancelled):
        driver_of(pool, Mesh(cfg=2)).denoise(
            experts_ref(), request_of(), LAYERWISE, should_stop=lambda: True
        )


def test_a_worker_that_died_between_two_runs_is_replaced_for_the_next(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2)
    driver = driver_of(pool, Mesh(data=2), max_restarts=0)
    driver.denoise(experts_ref(), request_of(2), LAYERWISE)
    pool.workers[1].kill()
    result = driver.denoise(experts_ref(), request_of(2), LAYERWISE)
    assert torch.equal(result.latents, fakes.expected(request_of(2).noise, range(STEPS)))
    assert (pool.replaced, result.restarts) == ([1], 0), "no loss of this run"


def test_workers_that_left_for_another_driver_join_again(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    """The host closed them, or another driver joined them in between."""
    pool = fakes.FakePool(2)
    first, second = driver_of(pool, Mesh(cfg=2)), driver_of(pool, Mesh(ulysses=2))
    for driver in (first, second, first):
        driver.denoise(experts_ref(), request_of(), LAYERWISE)
    for asked in [worker.call("close") for worker in pool.workers]:
        asked.result(10)
    first.denoise(experts_ref(), request_of(), LAYERWISE)
    layouts = [str(rendezvous.mesh) for rank, rendezvous in pool.joined if rank == 1]
    assert layouts == ["cfg 2", "ulysses 2", "cfg 2", "cfg 2"]
    assert pool.replaced == []


def test_a_repair_of_a_former_driver_is_awaited(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    """Otherwise both drivers would replace the same worker and join it to different groups."""
    pool = fakes.FakePool(2, [fakes.Fault(rank=1, step=2, failure="dies")])
    replace, repairing, go_on = pool.replace, threading.Event(), threading.Event()

    def slowly(rank: int) -> Any:
        repairing.set()
        assert go_on.wait(60)
        return replace(rank)

    pool.replace = slowly
    first = driver_of(pool, Mesh(cfg=2))
    with pytest.raises(SamplingCancelled):
        first.denoise(experts_ref(), request_of(), LAYERWISE, should_stop=repairing.is_set)
    second = Driver(
        pool, WorkersRef(count=2, timeout_s=20.0, max_restarts=0), Mesh(ulysses=2), follows=first
    )
    running = run_in_thread("second", second.denoise, experts_ref(), request_of(), LAYERWISE)
    threading.Timer(0.3, go_on.set).start()
    result = running.result(60)
    assert torch.equal(result.latents, fakes.expected(request_of().noise, range(STEPS)))
    assert (result.restarts, pool.replaced) == (0, [1])
    assert [str(rendezvous.mesh) for rank, rendezvous in pool.joined if rank == 0] == [
        "cfg 2",
        "cfg 2",
        "ulysses 2",
    ]


def test_a_disabled_group_repairs_nothing(fakes: Any) -> None:
    pool, mesh = fakes.FakePool(2), Mesh(cfg=2)
    ref = WorkersRef(count=2, timeout_s=20.0)
    late, now = (
        WorkerGroup(Rendezvous(pool, ref, (0, 1), mesh), [], [], TaskLog()) for _ in range(2)
    )
    late.rendezvous.disable()
    for group, joined in ((late, 0), (now, 2)):
        inbox: Inbox = queue.SimpleQueue()
        ended = group.repair(inbox).receive(inbox.get(timeout=10)).end
        assert ended is not None
        assert (ended.error, len(pool.joined)) == (None, joined)
    assert sorted(rank for rank, _ in pool.joined) == [0, 1]


def test_workers_leave_a_failed_rendezvous_before_the_next_one(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2, step_s=0.1, leave_s={0: 0.2})
    pool.taken = {5000}
    result = driver_of(pool, Mesh(cfg=2), max_restarts=0).denoise(
        experts_ref(), request_of(), LAYERWISE
    )
    assert result.restarts == 0


@pytest.mark.parametrize("left", [0, 3, 4])
def test_ports_that_are_taken_are_passed_over(
    left: int, fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool = fakes.FakePool(2)
    pool.taken = set(range(5000, 5000 + left))
    driver = driver_of(pool, Mesh(cfg=2))
    if left < 4:
        driver.denoise(experts_ref(), request_of(), LAYERWISE)
        return
    with pytest.raises(OSError, match="port 5003") as raised:
        driver.denoise(experts_ref(), request_of(), LAYERWISE)
    assert raised.value.errno == errno.EADDRINUSE


def test_files_that_are_missing_on_a_machine_are_named_before_anything_is_sent(
    fakes: Any, request_of: Any, experts_ref: Any
) -> None:
    pool, experts = fakes.FakePool(2), experts_ref()
    there = str(experts.high_noise.parent).replace("/", "/x", 1)
    pool.missing = {1: (str(experts.high_noise),)}
    maps = (PathMap(here=str(experts.high_noise.parent), there=there),)
    with pytest.raises(
        MissingPathError, match=rf"^{there}/.* or {experts.high_noise} does not exist on node-1"
    ):
        driver_of(pool, Mesh(data=2), paths=maps).denoise(experts, request_of(2), LAYERWISE)
    assert pool.sent == []
    pool.missing = {}
    driver_of(pool, Mesh(data=2), paths=maps).denoise(experts, request_of(2), LAYERWISE)
    assert {(task.experts, task.paths) for _, task in pool.sent} == {(experts, maps)}, (
        "each worker finds its own"
    )


def test_what_does_not_fit_is_refused(fakes: Any, request_of: Any, experts_ref: Any) -> None:
    with pytest.raises(ValueError, match="a layout of 4 workers, but there are 2"):
        driver_of(fakes.FakePool(2), Mesh(data=4))
    pool = fakes.FakePool(4)
    with pytest.raises(MeshError, match="stage 4 for 2 steps"):
        driver_of(pool, Mesh(stage=4)).denoise(
            experts_ref(), request_of(steps=2, switch_step=1), LAYERWISE
        )
    driver = driver_of(pool, Mesh())
    with pytest.raises(StateError, match="computes a run"):
        driver.denoise(
            experts_ref(),
            request_of(),
            LAYERWISE,
            on_step=lambda step: driver.denoise(experts_ref(), request_of(), LAYERWISE),
        )
    assert pool.sent[0][1].policy == LAYERWISE
