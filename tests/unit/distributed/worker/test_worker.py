"""A worker computes its task, independent of earlier tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wanstream
from wanstream.block_kernels.attention import KernelsError
from wanstream.devices.clock import DeviceError
from wanstream.distributed.messages import DecodeTask, RendezvousSpec, RunTask, StepReport
from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.distributed.worker.worker import Worker
from wanstream.sampling.steps import RequestError, SamplingCancelled
from wanstream.schema import Mesh, parse_step_strengths
from wanstream.schema.refs import ExpertsRef, LoraRef, PathMap
from wanstream.testing.experts import make_lora, save_lora
from wanstream.tests.support.reports import Reports, latents_of

MakeTask = Callable[..., RunTask]
MakeRef = Callable[..., ExpertsRef]
ComputeAlone = Callable[[RunTask], torch.Tensor]


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("cpu")
    yield worker
    worker.close()


def ignore(_: StepReport) -> None:
    return


def place(rank: int, mesh: Mesh) -> RendezvousSpec:
    return RendezvousSpec(
        rank=rank, mesh=mesh, host="127.0.0.1", port=1, generation=1, timeout_s=10
    )


@pytest.mark.slow  # several workers decode or compute
def test_the_second_task_runs_what_it_says(
    worker: Worker, make_task: MakeTask, experts_ref: MakeRef, alone: ComputeAlone
) -> None:
    first, reseeded = make_task(), make_task(seed=20)
    swapped = make_task(experts=experts_ref(high=2, low=1))
    other = make_task(experts=experts_ref(high=1, low=3))
    for task in (first, reseeded, swapped, other, first):
        assert torch.equal(latents_of(worker, task), alone(task))
    assert len({alone(task).sum().item() for task in (first, reseeded, swapped, other)}) == 4


def test_experts_are_opened_where_the_path_map_says(
    worker: Worker, make_task: MakeTask, experts_ref: MakeRef, alone: ComputeAlone
) -> None:
    task = make_task()
    low = task.experts.low_noise
    assert low is not None
    maps = (
        PathMap(here="/nowhere/high", there=str(task.experts.high_noise)),
        PathMap(here=str(low), there="/nowhere"),
    )
    elsewhere = dataclasses.replace(task.experts, high_noise=Path("/nowhere/high"))
    assert torch.equal(latents_of(worker, make_task(experts=elsewhere, paths=maps)), alone(task))
    with pytest.raises(ValueError, match="/nowhere/high"):
        worker.run(make_task(experts=elsewhere), ignore)


@pytest.mark.slow  # several workers decode or compute
def test_files_that_were_replaced_are_opened_anew(
    worker: Worker,
    make_task: MakeTask,
    tiny_expert_folder: Callable[..., Path],
    tmp_path: Path,
    alone: ComputeAlone,
) -> None:
    low = tmp_path / "low"
    shutil.copytree(tiny_expert_folder(seed=2), low)
    ref = ExpertsRef(high_noise=tiny_expert_folder(seed=1), low_noise=low, compute_dtype="float32")
    task = make_task(experts=ref)
    before = latents_of(worker, task)
    shutil.rmtree(low)
    shutil.copytree(tiny_expert_folder(seed=5), low)
    after = latents_of(worker, task)
    assert not torch.equal(before, after)
    assert torch.equal(after, alone(task))


def test_steps_are_told_with_a_state_that_goes_on_elsewhere(
    worker: Worker, make_task: MakeTask
) -> None:
    task, reports = make_task(handover_s=0.0, preview_s=0.0), Reports()
    ended = worker.run(task, reports)
    assert [step.record for step in reports] == list(ended.timeline.steps)
    assert [step.record.index for step in reports] == [0, 1, 2, 3]
    assert torch.equal(reports[-1].denoised, reports.latents)
    rest = Reports()
    resumed = Worker("cpu").run(make_task(resume=reports[1].state), rest)
    assert torch.equal(rest.latents, reports.latents)
    assert [step.index for step in resumed.timeline.steps] == [2, 3]
    assert torch.equal(latents_of(worker, make_task(until=2)), reports[1].state.latents)


def test_states_stay_at_the_worker_until_the_last_step_or_an_interval_is_over(
    worker: Worker, make_task: MakeTask, record_property: Any
) -> None:
    def reported(**intervals: float) -> tuple[list[tuple[bool, bool]], list[int]]:
        reports = Reports()
        worker.run(make_task(**intervals), reports)
        tensors = [(each.state is not None, each.denoised is not None) for each in reports]
        return tensors, [len(pickle.dumps(each)) for each in reports]

    before, every_step = reported(handover_s=0.0, preview_s=0.0)
    after, kept = reported(handover_s=60.0)
    assert before == [(True, True)] * 4
    assert after == [(False, False)] * 3 + [(True, False)]
    assert reported() == (after, kept)
    assert reported(handover_s=60.0, preview_s=60.0)[0] == [(False, True), *after[1:]], (
        "the first preview is due"
    )
    record_property("bytes of each step's report, before and after", (every_step, kept))
    latents = make_task().request.noise.numel() * 4
    assert min(every_step) > 3 * latents
    assert max(kept[:3]) < 1500, "a record"


def test_the_last_state_of_a_run_that_failed_can_be_requested(
    worker: Worker, make_task: MakeTask
) -> None:
    task, wanted = make_task(), Reports()
    worker.run(make_task(handover_s=0.0), wanted)
    assert worker.last_state(task.run_id) is None
    seen: list[StepReport] = []

    def on_report(report: StepReport) -> None:
        seen.append(report)
        if len(seen) == 3:
            worker.stop(task.run_id)

    with pytest.raises(SamplingCancelled):
        worker.run(task, on_report)
    kept, third = worker.last_state(task.run_id), wanted[2].state
    assert kept is not None
    assert third is not None
    assert kept.next_step == third.next_step == 3
    assert torch.equal(kept.latents, third.latents)
    assert worker.last_state("another run") is None
    worker.run(make_task(), ignore)
    assert worker.last_state(task.run_id) is None, "only that of the last run is kept"


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_stopped_worker_is_usable_at_once(
    step: int, worker: Worker, make_task: MakeTask, alone: ComputeAlone
) -> None:
    task, reports = make_task(), list[StepReport]()

    def on_report(each: StepReport) -> None:
        reports.append(each)
        if len(reports) == step:
            worker.stop(task.run_id)

    if step == 0:
        worker.stop(task.run_id)
    with pytest.raises(SamplingCancelled) as cancelled:
        worker.run(task, on_report)
    assert (cancelled.value.step, cancelled.value.block) == (step, 0)
    assert len(reports) == step
    after = make_task()
    assert torch.equal(latents_of(worker, after), alone(after))


def test_a_failed_task_leaves_the_worker_usable(
    worker: Worker, make_task: MakeTask, alone: ComputeAlone, tmp_path: Path
) -> None:
    gone = ExpertsRef(high_noise=tmp_path / "gone", low_noise=tmp_path / "gone")
    with pytest.raises(ValueError, match="gone"):
        worker.run(make_task(experts=gone), ignore)
    with pytest.raises(RequestError):
        worker.run(make_task(until=9), ignore)
    with pytest.raises(ZeroDivisionError):
        worker.run(make_task(), lambda _: 1 / 0)
    task = make_task()
    assert torch.equal(latents_of(worker, task), alone(task))


def test_a_worker_computes_with_the_attention_that_its_experts_name_or_says_why_not(
    worker: Worker, make_task: MakeTask, experts_ref: MakeRef, alone: ComputeAlone
) -> None:
    with pytest.raises(
        KernelsError, match="'cudnn' computes on CUDA devices only, and this is cpu: choose 'sdpa'"
    ):
        worker.run(make_task(experts=dataclasses.replace(experts_ref(), attention="cudnn")), ignore)
    task = make_task(experts=dataclasses.replace(experts_ref(), attention="sdpa"))
    assert torch.equal(latents_of(worker, task), alone(make_task()))


def test_the_leader_of_a_group_returns_latents(worker: Worker, make_task: MakeTask) -> None:
    reports = Reports()
    worker.join(place(0, Mesh()))
    worker.run(make_task(preview_s=0.0), reports)
    assert (reports[-1].state is not None, reports[-1].denoised is not None) == (True, True)
    worker.leave()
    assert torch.equal(latents_of(worker, make_task()), reports.latents)


def test_facts_are_those_of_this_process(worker: Worker, tmp_path: Path) -> None:
    there, gone = tmp_path / "there", tmp_path / "gone"
    there.write_bytes(b"abc")
    facts = worker.facts([str(there), str(gone)])
    assert facts.pid == os.getpid()
    assert facts.sizes == {str(there): 3, str(gone): None}
    elsewhere = worker.facts(
        ["/nowhere/there", "/nowhere/gone"], (PathMap(here="/nowhere", there=str(tmp_path)),)
    )
    assert elsewhere.sizes["/nowhere/gone"] is None
    assert (facts.address, facts.device) == ("127.0.0.1", "cpu")
    assert facts.versions["WanStream"] == wanstream.__version__
    assert facts.versions["torch"] == torch.__version__
    with socket.socket() as listening:
        listening.bind((facts.address, worker.free_port()))


def test_blocks_and_frames_are_counted(
    worker: Worker, make_task: MakeTask, tiny_pipeline: Callable[[], Path]
) -> None:
    reports: list[int] = []
    worker.run(make_task(), lambda step: reports.append(worker.blocks_begun()))
    assert reports == [4, 8, 12, 16], "4 blocks a step"
    worker.decode_tile(
        DecodeTask(run_id="tile", vae=tiny_pipeline(), latents=torch.zeros(1, 16, 2, 4, 4))
    )
    assert worker.blocks_begun() >= 18, "2 frames"


def test_a_task_for_a_meeting_that_was_left_is_not_computed_alone(
    worker: Worker, make_task: MakeTask
) -> None:
    reports: list[StepReport] = []
    here, other = make_task(generation=1), make_task(generation=7)
    worker.join(place(0, Mesh()))
    worker.run(here, reports.append)
    with pytest.raises(PeerLostError, match="for rendezvous 7, but this worker is in rendezvous 1"):
        worker.run(other, reports.append)
    worker.leave()
    with pytest.raises(PeerLostError, match="for rendezvous 1, but this worker is in none"):
        worker.run(here, reports.append)
    assert len(reports) == 4
    worker.run(make_task(), ignore)


def test_one_run_at_a_time(worker: Worker, make_task: MakeTask) -> None:
    with pytest.raises(AssertionError, match="was assigned to a worker that computes another run"):
        worker.run(make_task(), lambda _: worker.run(make_task(), ignore))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError):
        Worker("cuda:99")


@pytest.mark.slow  # several workers decode or compute
def test_a_lora_of_another_strength_is_another_run(
    worker: Worker, make_task: MakeTask, experts_ref: MakeRef, alone: ComputeAlone, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "lora.safetensors"
    generator = torch.Generator().manual_seed(3)
    save_file(
        {
            "diffusion_model.blocks.1.ffn.0.lora_down.weight": torch.randn(
                4, 256, generator=generator
            ),
            "diffusion_model.blocks.1.ffn.0.lora_up.weight": torch.randn(
                512, 4, generator=generator
            ),
            "diffusion_model.blocks.1.ffn.0.dora_scale": torch.randn(512, 1, generator=generator),
            "diffusion_model.blocks.0.ffn.0.lokr_w1": torch.randn(8, 4, generator=generator),
            "diffusion_model.blocks.0.ffn.0.lokr_w2": torch.randn(64, 64, generator=generator),
        },
        file,
    )
    seen = []
    for strength in (0.0, 0.5, 1.0):
        lora = LoraRef(
            high_noise=file, low_noise=file, strength_high=strength, strength_low=strength
        )
        task = make_task(experts=dataclasses.replace(experts_ref(), loras=(lora,)))
        seen.append(latents_of(worker, task))
        assert torch.equal(seen[-1], alone(task))
    assert torch.equal(seen[0], alone(make_task()))
    assert not torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.slow  # several workers decode or compute
def test_a_stage_takes_the_strengths_of_its_steps(
    make_task: MakeTask,
    experts_ref: MakeRef,
    alone: ComputeAlone,
    tmp_path: Path,
    make_tiny_expert: Any,
) -> None:
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
        assert state is not None
        assert [report.record.index for report in reports] == list(range(first, end))
    assert state is not None
    assert torch.equal(state.latents, alone(task))
