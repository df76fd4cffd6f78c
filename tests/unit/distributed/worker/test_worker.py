"""A worker computes its task, independent of earlier tasks."""

import contextlib
import dataclasses
import os
import pickle
import socket
from pathlib import Path

import pytest
import torch

import wanstream
from wanstream.devices.clock import DeviceError
from wanstream.distributed.messages import DecodeTask, RendezvousSpec, StepReport
from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.distributed.worker.worker import Worker
from wanstream.sampling.steps import SamplingCancelled
from wanstream.schema import Mesh, parse_step_strengths
from wanstream.schema.refs import LoraRef, PathMap
from wanstream.testing.experts import make_lora, save_lora
from wanstream.tests.support.distributed.reports import Reports, latents_of

SLOW = pytest.mark.slow  # several workers decode or compute


@pytest.fixture
def worker():
    worker = Worker("cpu")
    yield worker
    worker.close()


def ignore(_): ...


PLACE = RendezvousSpec(rank=0, mesh=Mesh(), host="127.0.0.1", port=1, generation=1, timeout_s=10)


def test_experts_are_opened_where_the_path_map_says(worker, make_task, experts_ref, alone):
    task = make_task()
    places = {"/nowhere/high": task.experts.high_noise, task.experts.low_noise: "/nowhere"}
    maps = tuple(PathMap(here=str(here), there=str(there)) for here, there in places.items())
    elsewhere = dataclasses.replace(task.experts, high_noise=Path("/nowhere/high"))
    assert torch.equal(latents_of(worker, make_task(experts=elsewhere, paths=maps)), alone(task))
    with pytest.raises(ValueError, match="/nowhere/high"):
        worker.run(make_task(experts=elsewhere), ignore)


def test_steps_are_told_with_a_state_that_goes_on_elsewhere(worker, make_task):
    task = make_task(handover_s=0.0, preview_s=0.0)
    reports = Reports()
    ended = worker.run(task, reports)
    assert [step.record for step in reports] == list(ended.timeline.steps)
    assert [step.record.index for step in reports] == [0, 1, 2, 3]
    assert torch.equal(reports[-1].denoised, reports.latents)
    rest = Reports()
    resumed = Worker("cpu").run(make_task(resume=reports[1].state), rest)
    assert torch.equal(rest.latents, reports.latents)
    assert [step.index for step in resumed.timeline.steps] == [2, 3]
    assert torch.equal(latents_of(worker, make_task(until=2)), reports[1].state.latents)


def test_states_are_handed_over_at_intervals(worker, make_task):
    def reported(**intervals: float) -> tuple[list[tuple[bool, bool]], list[int]]:
        reports = Reports()
        worker.run(make_task(**intervals), reports)
        tensors = [(each.state is not None, each.denoised is not None) for each in reports]
        return tensors, [len(pickle.dumps(each)) for each in reports]

    before, every_step = reported(handover_s=0.0, preview_s=0.0)
    after, kept = reported(handover_s=60.0)
    assert before == [(True, True)] * 4
    assert after == [(False, False)] * 3 + [(True, False)]
    unset, sizes = reported()
    assert unset == after
    assert sizes == pytest.approx(kept, rel=0.01), "counts differ in length"
    # The first preview is due.
    assert reported(handover_s=60.0, preview_s=60.0)[0] == [(False, True), *after[1:]]
    latents = make_task().request.noise.numel() * 4
    assert min(every_step) > 3 * latents
    assert max(kept[:3]) < 1500, "a record"
    worker.join(dataclasses.replace(PLACE, rank=1))
    follower, _ = reported(generation=1, handover_s=0.0, preview_s=0.0)
    assert follower == [(False, False)] * 4


def test_the_last_state_of_a_run_that_failed_can_be_requested(worker, make_task):
    task = make_task()
    wanted = Reports()
    worker.run(make_task(handover_s=0.0), wanted)
    assert worker.last_state(task.run_id) is None
    seen: list[StepReport] = []

    def on_report(report: StepReport) -> None:
        seen.append(report)
        if len(seen) == 3:
            worker.stop(task.run_id)

    with pytest.raises(SamplingCancelled):
        worker.run(task, on_report)
    kept = worker.last_state(task.run_id)
    third = wanted[2].state
    assert kept.next_step == third.next_step == 3
    assert torch.equal(kept.latents, third.latents)
    assert worker.last_state("another run") is None
    worker.run(make_task(), ignore)
    assert worker.last_state(task.run_id) is None, "only that of the last run is kept"


def test_a_stopped_worker_is_usable_at_once(worker, make_task, alone):
    task = make_task()
    reports = list[StepReport]()

    def on_report(each: StepReport) -> None:
        reports.append(each)
        if len(reports) == 2:
            worker.stop(task.run_id)

    with pytest.raises(SamplingCancelled) as cancelled:
        worker.run(task, on_report)
    assert (cancelled.value.step, cancelled.value.block, len(reports)) == (2, 0, 2)
    after = make_task()
    assert torch.equal(latents_of(worker, after), alone(after))


def test_facts_are_those_of_this_process(worker, tmp_path):
    there = tmp_path / "there"
    gone = tmp_path / "gone"
    there.write_bytes(b"abc")
    facts = worker.facts([str(there), str(gone)])
    assert facts.pid == os.getpid()
    assert facts.sizes == {str(there): 3, str(gone): None}
    maps = (PathMap(here="/nowhere", there=str(tmp_path)),)
    elsewhere = worker.facts(["/nowhere/there", "/nowhere/gone"], maps)
    assert elsewhere.sizes == {"/nowhere/there": 3, "/nowhere/gone": None}
    assert (facts.address, facts.device) == ("127.0.0.1", "cpu")
    assert facts.versions["WanStream"] == wanstream.__version__
    assert facts.versions["torch"] == torch.__version__
    with socket.socket() as listening:
        listening.bind((facts.address, worker.free_port()))


def test_blocks_and_frames_are_counted(worker, make_task, tiny_pipeline):
    reports: list[int] = []
    worker.run(make_task(), lambda step: reports.append(worker.blocks_begun()))
    assert reports == [4, 8, 12, 16], "4 blocks a step"
    latents = torch.zeros(1, 16, 2, 4, 4)
    worker.decode_tile(DecodeTask(run_id="tile", vae=tiny_pipeline(), latents=latents))
    assert worker.blocks_begun() >= 18, "2 frames"


def test_task_of_a_left_rendezvous_is_refused(worker, make_task):
    reports = Reports()
    here = make_task(generation=1, preview_s=0.0)
    other = make_task(generation=7)
    worker.join(PLACE)
    worker.run(here, reports)
    assert (reports[-1].state is not None, reports[-1].denoised is not None) == (True, True)
    with pytest.raises(PeerLostError, match="for rendezvous 7, but this worker is in rendezvous 1"):
        worker.run(other, reports)
    worker.leave()
    with pytest.raises(PeerLostError, match="for rendezvous 1, but this worker is in none"):
        worker.run(here, reports)
    assert len(reports) == 4
    assert torch.equal(latents_of(worker, make_task()), reports.latents)


def test_two_runs_at_a_time_and_a_missing_device_are_refused(worker, make_task):
    with pytest.raises(AssertionError, match="was assigned to a worker that computes another run"):
        worker.run(make_task(), lambda _: worker.run(make_task(), ignore))
    with pytest.raises(DeviceError):
        Worker("cuda:99")


@SLOW
def test_a_stage_takes_the_strengths_of_its_steps(
    make_task, experts_ref, alone, tmp_path, make_tiny_expert
):
    """Each worker begins in the middle of the schedule, with the strengths for its first step."""
    save_lora(make_lora(make_tiny_expert(), seed=3), tmp_path / "lora", dtype=torch.float32)
    ranges = parse_step_strengths("0: 0, 3: 0.5")
    lora = LoraRef(high_noise=tmp_path / "lora", low_noise=tmp_path / "lora", steps=ranges)
    task = make_task(experts=dataclasses.replace(experts_ref(), loras=(lora,)))
    state = None
    for first, end in ((0, 1), (1, 3), (3, 4)):
        reports = Reports()
        with contextlib.closing(Worker("cpu", threads=1)) as stage:
            stage.run(dataclasses.replace(task, resume=state, until=end), reports)
        state = reports[-1].state
        assert [report.record.index for report in reports] == list(range(first, end))
    assert torch.equal(state.latents, alone(task))
