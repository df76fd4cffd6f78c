"""Run plans on workers: the user's choices are kept, the rest is planned, always alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from wanstream.distributed.messages import WorkerFacts
from wanstream.host.workers.plan import SharedRun, WorkersPlanner, plan_workers, wire_notes
from wanstream.plan import AutoOffload, Budgets, DoesNotFitError, expected_machine
from wanstream.schema import Mesh, MeshError, OffloadPolicy
from wanstream.schema.refs import WorkersError, WorkersRef
from wanstream.shapes import T2V_A14B, RunShape, VideoShape
from wanstream.tests.support.plan_fixtures import run_shape

GPU = expected_machine("RTX 4090", ram_bytes=128 * 2**30, disk_bytes_per_s=5e9)
LAYERWISE = OffloadPolicy.layerwise()
TOKENS = VideoShape(width=832, height=480, frames=81).tokens


def a_shape(videos: int = 1, *, lanes: int = 2) -> RunShape:
    given = {"expert": T2V_A14B, "tokens": TOKENS, "samples": videos}
    outside = 2 * T2V_A14B.resident_bytes()
    sides = {"high": lanes, "low": lanes}
    return run_shape(2, 2, **given, sides=sides, outside_bytes=outside)


def a_run(workers: WorkersRef, videos: int = 1, **changes) -> SharedRun:
    given = {"shape": a_shape(videos), "videos": videos, "requested": LAYERWISE}
    return SharedRun(workers=workers, **{**given, **changes})


def on(mesh: Mesh, videos: int = 1, **changes) -> SharedRun:
    return a_run(WorkersRef(count=mesh.size, mesh=mesh), videos, **changes)


def budget(**nbytes: float):
    limits = {name: int(number) for name, number in nbytes.items()}
    return {"requested": AutoOffload(budgets=Budgets(**limits))}


nobody = Mock(side_effect=AssertionError("nothing is left to the planner"))


def test_given_layout_needs_no_machine():
    mesh = Mesh(cfg=2, ulysses=2)
    plan = plan_workers(on(mesh), nobody)
    assert (plan.mesh, plan.policy, plan.reasons) == (mesh, LAYERWISE, ())
    assert plan_workers(a_run(WorkersRef(count=1)), nobody).mesh == Mesh()
    (said,) = plan_workers(on(Mesh(stage=2)), nobody).reasons
    assert "at most 1 of 2 groups work at a time" in said
    # Two videos without guidance are two lanes, to be shared by two sides.
    both = on(Mesh(data=2, cfg=2), 4, shape=a_shape(4, lanes=1))
    assert plan_workers(both, nobody).reasons == ()


ONE_HEAD = replace(a_shape(), expert=replace(T2V_A14B, width=128))
UNEVEN = replace(a_shape(), video_tokens=32_580, extra_tokens=(180, 177))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (a_run(WorkersRef(count=3, mesh=Mesh(cfg=2))), "= 2, and there are 3 workers"),
        (on(Mesh(cfg=2), shape=a_shape(lanes=1)), "guidance is 1"),
        (on(Mesh(data=2)), "one video is made"),
        (on(Mesh(ulysses=2), shape=ONE_HEAD), "does not divide 1 head"),
        (on(Mesh(stage=5)), "stage 5 for 4 steps"),
        (on(Mesh(ring=2), shape=UNEVEN), r"32760 tokens \(positive\) and 32757 \(negative\)"),
    ],
)
def test_unsuitable_layout_is_refused(run, said):
    with pytest.raises((MeshError, WorkersError), match=said):
        plan_workers(run, nobody)


def test_one_video_is_shared_and_many_are_spread():
    now = plan_workers(a_run(WorkersRef(count=2), videos=4), lambda: GPU)
    many = plan_workers(a_run(WorkersRef(count=2, goal="throughput"), videos=4), lambda: GPU)
    assert (now.mesh, many.mesh) == (Mesh(cfg=2), Mesh(data=2))
    assert now.reasons == ("laid out as cfg 2: both prompts side by side",)
    assert many.reasons == ("laid out as data 2: 2 videos at a time",)
    # Memory for one video is enough, though all four together would not fit.
    four = a_run(WorkersRef(count=4, goal="throughput"), videos=4, **budget(vram_bytes=5e9))
    assert plan_workers(four, lambda: GPU).mesh == Mesh(data=4)


@pytest.mark.parametrize(("mesh", "vram_gb"), [(Mesh(data=2), 9.5), (Mesh(data=2, cfg=2), 7)])
def test_policy_leaves_room_for_all_videos_of_a_cell(mesh, vram_gb):
    def chosen(videos: int, mesh: Mesh) -> OffloadPolicy:
        run = on(mesh, videos, **budget(vram_bytes=vram_gb * 1e9))
        return plan_workers(run, lambda: GPU).policy

    alone = replace(mesh, data=1)
    assert chosen(16, mesh) == chosen(8, alone) != chosen(1, alone)


def test_policy_is_chosen_for_one_worker_within_the_budget():
    def chosen(**budgets: float) -> OffloadPolicy:
        slow_disk = replace(GPU, disk_bytes_per_s=1e9)
        return plan_workers(on(Mesh(cfg=2), **budget(**budgets)), lambda: slow_disk).policy

    assert chosen().source == "pinned"
    assert chosen(ram_bytes=2e9).source == "file"
    with pytest.raises(DoesNotFitError):
        chosen(vram_bytes=1e9)


def test_equal_runs_get_the_same_plan_and_measure_once():
    machine = Mock(return_value=GPU)
    planned = WorkersPlanner()
    run = a_run(WorkersRef(count=2))
    first = planned.plan(run, machine)
    assert planned.plan(replace(run, shape=a_shape()), machine) is first
    assert machine.call_count == 1
    planned.plan(replace(run, videos=2, shape=a_shape(2)), machine)
    assert machine.call_count == 2


def facts(machine: str, *, link: int = 0) -> WorkerFacts:
    where = {"node": f"node-{machine}", "address": f"10.0.0.{machine}", "machine": machine}
    return WorkerFacts(pid=1, device="cuda:0", link_bytes_per_s=link, versions={}, **where)


def test_group_on_several_machines_gets_a_note_with_its_cost():
    mesh = Mesh(data=2, ulysses=2)
    apart = (facts("1", link=10**9), facts("2", link=10**8))
    groups = [(range(2), (facts("1"), facts("1"))), (range(2, 4), apart)]
    driver = SimpleNamespace(mesh=mesh, workers=groups)
    (note,) = wire_notes(on(mesh, 2), driver)
    places = "2 on node-1 (10.0.0.1), 3 on node-2 (10.0.0.2)"
    assert note.startswith(f"workers that share a video are apart: {places}; each step ")
    cost = "(ulysses 26.8 GB) in 321 exchanges, at least 268.4 s at 0.8 Gb/s (the link speed"
    assert cost in note
    driver.workers = [(range(2), ()), *groups[:1]]
    assert wire_notes(on(mesh, 2), driver) == ()
