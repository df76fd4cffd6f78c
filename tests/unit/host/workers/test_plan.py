"""Run plans on workers: the user's choices are kept, the rest is planned, always alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from wanstream.distributed.messages import WorkerFacts
from wanstream.host.workers.plan import SharedRun, WorkersPlanner, plan_workers, wire_notes
from wanstream.plan import AutoOffload, Budgets, DoesNotFitError, Machine
from wanstream.plan.machine import expected_machine
from wanstream.schema import Mesh, MeshError, OffloadPolicy
from wanstream.schema.refs import WorkersError, WorkersRef
from wanstream.shapes import T2V_A14B, RunShape, VideoShape
from wanstream.tests.support.plan_fixtures import run_shape

GPU = expected_machine("RTX 4090", ram_bytes=128 * 2**30, disk_bytes_per_s=5e9)
LAYERWISE = OffloadPolicy.layerwise()


def a_shape(videos: int = 1, *, lanes: int = 2) -> RunShape:
    return run_shape(
        2,
        2,
        expert=T2V_A14B,
        tokens=VideoShape(width=832, height=480, frames=81).tokens,
        samples=videos,
        sides={"high": lanes, "low": lanes},
        outside_bytes=2 * T2V_A14B.resident_bytes(),
    )


def a_run(workers: WorkersRef, videos: int = 1, **changes: Any) -> SharedRun:
    return SharedRun(
        **{
            "workers": workers,
            "shape": a_shape(videos),
            "videos": videos,
            "requested": LAYERWISE,
            **changes,
        }
    )


def nobody() -> Machine:
    raise AssertionError("nothing is left to the planner")


def test_what_a_user_says_needs_no_machine() -> None:
    plan = plan_workers(a_run(WorkersRef(count=4, mesh=Mesh(cfg=2, ulysses=2))), nobody)
    assert (plan.mesh, plan.policy, plan.reasons) == (Mesh(cfg=2, ulysses=2), LAYERWISE, ())
    assert plan_workers(a_run(WorkersRef(count=1)), nobody).mesh == Mesh()


@pytest.mark.parametrize(
    ("mesh", "shape", "said"),
    [
        (Mesh(cfg=2), a_shape(lanes=1), "guidance is 1"),
        (Mesh(data=2), a_shape(), "one video is made"),
        (
            Mesh(ulysses=2),
            replace(a_shape(), expert=replace(T2V_A14B, width=128)),
            "does not divide 1 head",
        ),
        (Mesh(stage=5), a_shape(), "stage 5 for 4 steps"),
        (
            Mesh(ring=2),
            replace(a_shape(), video_tokens=32_580, extra_tokens=(180, 177)),
            r"32760 tokens \(positive\) and 32757 \(negative\)",
        ),
    ],
)
def test_a_layout_that_does_not_suit_the_run_is_refused(
    mesh: Mesh, shape: RunShape, said: str
) -> None:
    with pytest.raises(MeshError, match=said):
        plan_workers(a_run(WorkersRef(count=mesh.size, mesh=mesh), shape=shape), nobody)


def test_a_layout_of_another_number_of_workers_is_refused() -> None:
    with pytest.raises(WorkersError, match="is 1 x 1 x 2 x 1 x 1 = 2, and there are 3 workers"):
        plan_workers(a_run(WorkersRef(count=3, mesh=Mesh(cfg=2))), nobody)


def test_what_idles_at_times_is_told() -> None:
    plan = plan_workers(a_run(WorkersRef(count=2, mesh=Mesh(stage=2)), videos=1), nobody)
    (said,) = plan.reasons
    assert "at most 1 of 2 groups work at a time" in said


def test_one_video_is_shared_and_many_are_spread() -> None:
    now = plan_workers(a_run(WorkersRef(count=2), videos=4), lambda: GPU)
    many = plan_workers(a_run(WorkersRef(count=2, goal="throughput"), videos=4), lambda: GPU)
    assert (now.mesh, many.mesh) == (Mesh(cfg=2), Mesh(data=2))
    assert now.reasons == ("laid out as cfg 2: both prompts side by side",)
    assert many.reasons == ("laid out as data 2: 2 videos at a time",)


def test_videos_on_workers_of_their_own_are_checked_one_by_one() -> None:
    """Memory for one video is enough, though all four together would not fit."""
    requested = AutoOffload(budgets=Budgets(vram_bytes=int(5e9)))
    run = a_run(WorkersRef(count=4, goal="throughput"), videos=4, requested=requested)
    assert plan_workers(run, lambda: GPU).mesh == Mesh(data=4)


def test_videos_of_a_cell_are_lanes_of_one_pass() -> None:
    """Two videos without guidance are two lanes, to be shared by two sides."""
    both = a_run(WorkersRef(count=4, mesh=Mesh(data=2, cfg=2)), videos=4, shape=a_shape(4, lanes=1))
    assert plan_workers(both, nobody).reasons == ()
    one_each = a_run(
        WorkersRef(count=4, mesh=Mesh(data=2, cfg=2)), videos=2, shape=a_shape(2, lanes=1)
    )
    with pytest.raises(MeshError, match="guidance is 1"):
        plan_workers(one_each, nobody)


@pytest.mark.parametrize(
    ("mesh", "vram_gb"), [(Mesh(data=2), 9.5), (Mesh(data=2, cfg=2), 7)], ids=str
)
def test_a_policy_leaves_room_for_all_videos_of_a_cell(mesh: Mesh, vram_gb: float) -> None:
    def chosen(videos: int, on: Mesh) -> OffloadPolicy:
        requested = AutoOffload(budgets=Budgets(vram_bytes=int(vram_gb * 1e9)))
        return plan_workers(
            a_run(
                WorkersRef(count=on.size, mesh=on),
                videos,
                shape=a_shape(videos),
                requested=requested,
            ),
            lambda: GPU,
        ).policy

    alone = replace(mesh, data=1)
    assert chosen(16, mesh) == chosen(8, alone) != chosen(1, alone)


def test_a_policy_is_chosen_for_the_share_of_one_worker_within_the_budget() -> None:
    def chosen(**budgets: int) -> OffloadPolicy:
        requested = AutoOffload(budgets=Budgets(**budgets))
        slow_disk = replace(GPU, disk_bytes_per_s=1e9)
        return plan_workers(
            a_run(WorkersRef(count=2, mesh=Mesh(cfg=2)), requested=requested), lambda: slow_disk
        ).policy

    assert chosen().source == "pinned"
    assert chosen(ram_bytes=2 * 10**9).source == "file"
    with pytest.raises(DoesNotFitError):
        chosen(vram_bytes=10**9)


def test_equal_runs_get_the_same_plan_and_measure_once() -> None:
    measured: list[str] = []

    def machine() -> Machine:
        measured.append("measured")
        return GPU

    planned, run = WorkersPlanner(), a_run(WorkersRef(count=2))
    first = planned.plan(run, machine)
    assert planned.plan(replace(run, shape=a_shape()), machine) is first
    assert len(measured) == 1
    planned.plan(replace(run, videos=2, shape=a_shape(2)), machine)
    assert len(measured) == 2


def facts(machine: str, *, link: int = 0) -> WorkerFacts:
    where = {"node": f"node-{machine}", "address": f"10.0.0.{machine}", "machine": machine}
    return WorkerFacts(pid=1, device="cuda:0", link_bytes_per_s=link, versions={}, **where)


def test_each_group_that_is_apart_gets_a_line_with_its_workers_and_its_cost() -> None:
    mesh = Mesh(data=2, ulysses=2)
    groups = [
        (range(2), (facts("1"), facts("1"))),
        (range(2, 4), (facts("1", link=10**9), facts("2", link=10**8))),
    ]
    driver: Any = SimpleNamespace(mesh=mesh, workers=groups)
    (note,) = wire_notes(a_run(WorkersRef(count=4, mesh=mesh), videos=2), driver)
    assert note.startswith(
        "workers that share a video are apart: 2 on node-1 (10.0.0.1), 3 on node-2 (10.0.0.2); "
        "each step "
    )
    assert (
        "(ulysses 26.8 GB) in 321 exchanges, at least 268.4 s at 0.8 Gb/s (the link speed" in note
    )
    driver.workers = [(range(2), ()), *groups[:1]]
    assert wire_notes(a_run(WorkersRef(count=4, mesh=mesh), videos=2), driver) == ()
