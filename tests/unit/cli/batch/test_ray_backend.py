"""Batch actors with services in this process and with computing replaced."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from wanstream.batch.backend import Ended, JobFailed, Lost, Outcome, UnderWay, Unknown
from wanstream.batch.errors import NoSuchFileError, UnreachableError, UnsuitableError
from wanstream.batch.output_store import check_media
from wanstream.cli.arguments import ArgumentError
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch import row_service as row_service_module
from wanstream.cli.options import ActorOptions, BatchOptions, LocalOptions
from wanstream.distributed import WorkerLostError
from wanstream.distributed.path_map import MissingPathError
from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.run import NodeFailedError, Workflow
from wanstream.tests.support.distributed.local_actor import (
    MARK,
    LocalActor,
    local_backend,
    needs_device_errors,
    row_service,
)
from wanstream.tests.support.host.shipped import node
from wanstream.tests.support.polling import eventually
from wanstream.wan.latents import write_latent

LIMIT_S = 20
SAMPLER = {"node_id": "sampler", "class_type": "WanStreamSampler"}


class Rig:
    """A backend on an actor that shares the driver's output folder or has another one."""

    def __init__(
        self, options: BatchOptions, workflow: dict[str, Any], folder: Path, *, shared: bool
    ) -> None:
        self.options = options
        self.workflow = workflow
        self.folder = folder
        self.shared = shared
        self.part = folder / "part"
        self.actor = LocalActor(row_service(options, folder / ("made" if shared else "elsewhere")))
        self.backend = local_backend(self.actor, options)
        self.shown: list[NodeProgress] = []

    @property
    def output(self) -> Path:
        return self.actor.service._output_folder()

    def post(self, *prompt_ids: str) -> None:
        """Post a workflow per id, each with a seed of its own."""
        for prompt_id in prompt_ids:
            changed = json.loads(json.dumps(self.workflow))
            changed["sampler"]["inputs"]["seed"] = sum(prompt_id.encode())
            self.backend.post(prompt_id, changed)

    def begin(self, prompt_id: str) -> None:
        self.post(prompt_id)
        assert eventually(lambda: self.backend.outcome(prompt_id) == UnderWay(begun=True))

    def ended(self, prompt_id: str) -> Outcome:
        """Wait for a workflow's end, and return the outcome."""
        until = time.monotonic() + LIMIT_S
        while isinstance(outcome := self.backend.outcome(prompt_id), UnderWay):
            assert time.monotonic() < until
            time.sleep(0.01)
        return outcome

    def fetched(self, prompt_id: str) -> bytes:
        outcome = self.ended(prompt_id)
        assert isinstance(outcome, Ended)
        (file,) = outcome.files
        self.backend.fetch(file, self.part)
        return self.part.read_bytes()

    def is_unreachable_twice(self, prompt_id: str = "row") -> None:
        message = "worker 0 is gone\nRay starts it again where a slot is free"
        for _ in range(2):
            with pytest.raises(UnreachableError, match=message):
                self.backend.outcome(prompt_id)


BOTH = pytest.mark.parametrize("rig", ["shared folder", "object store"], indirect=True)


@pytest.fixture(params=["object store"])
def rig(
    request: pytest.FixtureRequest, options: BatchOptions, workflow: dict[str, Any], tmp_path: Path
) -> Iterator[Rig]:
    rig = Rig(options, workflow, tmp_path, shared=request.param == "shared folder")
    with rig.backend.opened(tmp_path / "made", rig.shown.append):
        yield rig
    rig.actor.service.stop()


# --- files ----------------------------------------------------------------------------------------


@BOTH
def test_files_come_back_in_pieces_or_by_a_shared_folder(rig, monkeypatch):
    monkeypatch.setattr(ray_backend, "PIECE", 1000)
    rig.post("row-1", "row-2")
    rig.part.write_text("of an earlier try")
    first, second = (rig.fetched(prompt_id) for prompt_id in ("row-1", "row-2"))
    assert first != second
    (made,) = rig.output.rglob("row-2/**/*.mp4")
    assert made.read_bytes() == second
    assert made.is_relative_to(rig.folder / "made") == rig.shared
    assert (rig.folder / "made" / MARK).is_dir()
    pieces = len(first) // 1000 + len(second) // 1000 + 2
    assert rig.actor.calls.count("read") == (0 if rig.shared else pieces)
    monkeypatch.setattr(ray_backend, "PIECE", len(second))
    assert rig.fetched("row-2") == second, "a file of whole pieces ends with an empty one"
    rig.backend.release("row-2")
    assert not made.exists()
    assert (rig.backend.outcome("row-2"), rig.part.read_bytes()) == (Unknown(), second)


IMAGE = {"image": node("LoadImage", image="scene.png")}


def test_inputs_are_sent_once_unless_the_machine_has_them(rig, monkeypatch):
    scene = rig.options.local.input / "scene.png"
    scene.write_bytes(b"one")
    rig.backend.post("here", IMAGE)
    assert "write_input" not in rig.actor.calls, "its machine has the folder"
    monkeypatch.setattr(rig.actor.service, "_input", rig.folder / "not there")
    rig.backend.post("first", IMAGE)
    rig.backend.post("second", IMAGE)
    assert rig.actor.calls.count("write_input") == 1
    scene.write_bytes(b"two")
    os.utime(scene, ns=(1, 1))  # same size, but older
    rig.backend.post("third", IMAGE)
    assert rig.actor.calls.count("write_input") == 2
    sent = rig.actor.service._own_folder() / "input"
    assert (sent / "scene.png").read_bytes() == b"two"
    assert rig.actor.service._input_folder(rig.backend._send_inputs(IMAGE)) == sent


def test_latent_is_sent_for_its_workflow(rig, monkeypatch):
    monkeypatch.setattr(ray_backend, "PIECE", 100)
    rig.part.write_bytes(os.urandom(250))
    for _ in range(2):
        rig.backend.provide("row", rig.part, "continued/one.latent")
    written = rig.output / "row" / "continued" / "one.latent"
    assert written.read_bytes() == rig.part.read_bytes()
    assert rig.actor.calls == ["write_latent"] * 6


@pytest.mark.parametrize(
    ("load", "save", "fault"),
    [
        (
            node("LoadImage", image="latents/x [output]"),
            node("WanStreamSaveVideo", images=["load", 0], filename_prefix="x", fps=16.0, crf=20),
            "latents/x is not in the output folder",
        ),
        (
            node("WanStreamLoadLatent", file="latents/x"),
            node("WanStreamSaveLatent", latent=["load", 0], filename_prefix="x"),
            "x does not exist",
        ),
    ],
)
def test_files_of_the_output_folder_are_sent_and_read(rig, load, save, fault):
    prompt = {"load": load, "save": save}
    assert fault in "".join(rig.backend.faults(prompt))
    (rig.options.output / "latents").mkdir(parents=True)
    write_latent(rig.options.output / "latents" / "x", torch.zeros(1, 16, 1, 2, 2))
    assert rig.backend.faults(prompt) == []
    assert "write_input" in rig.actor.calls


def touch(folder: Path, *names: str) -> None:
    for path in (folder / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_input_files_of_a_workflow_are_those_below_the_folder(tmp_path):
    touch(tmp_path, "input/a.png", "input/below/b.mp4", "outside.png")
    touch(tmp_path, "output/c.png", "output/d.png")
    named = ["a.png", "below/b.mp4 [input]", "c.png [output]", "d.png", "below\\b.mp4"]
    named += ["a.png[input]", "d.png [temp]", "e.png [output]", "", "a\0b", "x" * 5000]
    named += ["../outside.png", "../outside.png [output]", str(tmp_path / "outside.png")]
    values = [*named, 1, ["node", 0]]
    prompt = {"node": {"inputs": {str(number): value for number, value in enumerate(values)}}}
    folder = tmp_path / "input"
    output = tmp_path / "output"
    assert ray_backend.input_files(prompt, folder, output) == {
        "a.png": folder / "a.png",
        "below/b.mp4": folder / "below" / "b.mp4",
        ".output/c.png": output / "c.png",
        ".output/d.png": output / "d.png",
    }


def test_model_files_are_named_by_the_workflow_or_a_row(tmp_path):
    models = tmp_path / "models"
    files = ["loras/sub/b.safetensors", "vae/a.safetensors"]
    touch(models, *files, "loras/unused.safetensors", "text.safetensors")
    inputs = {"vae": "a.safetensors", "other": "../text.safetensors", "text": "a" * 5000}
    rows = [{"lora.file": "sub/b.safetensors", "sampler.seed": 3}]
    found = ray_backend.model_files({"vae": {"inputs": inputs}}, rows, models)
    assert found == [models / name for name in files]
    assert ray_backend.model_files({"vae": {"inputs": inputs}}, rows, tmp_path / "not there") == []


# --- outcomes -------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event awaited by every run, unless the run is stopped."""
    event, inner = threading.Event(), Workflow.run

    def waiting(workflow: Workflow, *, on_progress: Callable[[NodeProgress], None]) -> Any:
        with workflow.host.opened(workflow.folders, device=workflow.device):
            while not event.wait(0.01):
                on_progress(NodeProgress(**SAMPLER, done=0, total=1))
                workflow.host.events.raise_if_stopped()
        return inner(workflow)

    monkeypatch.setattr(Workflow, "run", waiting)
    yield event
    event.set()


def test_one_workflow_runs_and_the_next_one_waits(rig, gate):
    backend = rig.backend
    assert backend.window == 2
    rig.begin("first")
    rig.post("second")
    assert backend.outcome("second") == UnderWay(begun=False)
    backend.withdraw("first")
    assert backend.outcome("first") == UnderWay(begun=True), "it has started"
    backend.withdraw("second")
    assert backend.outcome("second") == Unknown()
    backend.interrupt("second")
    backend.interrupt("first")
    assert rig.ended("first") == Unknown()
    rig.post("third")
    gate.set()
    assert isinstance(rig.ended("third"), Ended)


def test_progress_of_the_running_workflow_comes_with_a_poll(rig, monkeypatch):
    begun, go_on, inner = threading.Event(), threading.Event(), Workflow.run
    halfway = NodeProgress(**SAMPLER, done=500, total=1000)

    def run(workflow: Workflow, *, on_progress: Callable[[NodeProgress], None], **_: Any) -> Any:
        for done in range(1000):
            on_progress(replace(halfway, done=done))
        on_progress(halfway)
        begun.set()
        assert go_on.wait(LIMIT_S)
        return inner(workflow)

    monkeypatch.setattr(Workflow, "run", run)
    rig.post("row", "next")
    assert begun.wait(LIMIT_S)
    assert rig.shown == [], "steps are not sent"
    for prompt_id in ("row", "next"):
        rig.backend.outcome(prompt_id)
    go_on.set()
    assert rig.shown == [halfway]


def test_refused_workflow_fails_with_its_faults(rig):
    rig.workflow["sampler"]["inputs"]["steps"] = 0
    rig.post("row")
    outcome = rig.ended("row")
    assert isinstance(outcome, JobFailed)
    for words in (outcome.reason, "\n".join(rig.backend.faults(rig.workflow))):
        assert "node sampler (WanStreamSampler)" in words


@BOTH
def test_full_disk_of_the_driver_ends_the_batch(rig, monkeypatch):
    full = OSError(errno.ENOSPC, "full")

    def run(*_: Any, **__: Any) -> Any:
        raise NodeFailedError("save", "WanStreamSaveVideo", full) from full

    monkeypatch.setattr(Workflow, "run", run)
    rig.post("row")
    free = rf"[\d,]+ bytes are free in {rig.output}"
    error = UnsuitableError
    message = rf"actor 0: its disk is full: on .*, {free}: node save .*full"
    if rig.shared:
        error = OSError
        message = rf"node save .*full \(on .*, {free}\)"
    with pytest.raises(error, match=message) as raised:
        rig.ended("row")
    assert not rig.shared or raised.value.errno == errno.ENOSPC
    # The disk under the inputs is the actor's own.
    (rig.options.local.input / "scene.png").write_bytes(b"one")
    monkeypatch.setattr(rig.actor.service, "_input", rig.folder / "not there")
    monkeypatch.setattr(row_service_module, "_write", mock.Mock(side_effect=full))
    with pytest.raises(UnsuitableError, match=r"actor 0: its disk is full: on .*bytes are free"):
        rig.backend.post("row", IMAGE)


def test_stop_ends_the_running_workflow(rig, gate):
    rig.begin("row")
    rig.post("next")
    began = time.monotonic()
    rig.actor.service.stop()
    assert time.monotonic() - began < ray_backend.STOP_TIMEOUT_S
    assert [rig.backend.outcome(prompt_id) for prompt_id in ("row", "next")] == [Unknown()] * 2


def test_all_actors_stop_at_the_same_time():
    lost, *others = [Future[None]() for _ in range(3)]
    actors = [SimpleNamespace(serve=lambda method, each=each: each) for each in (lost, *others)]
    lost.set_exception(WorkerLostError("worker 0 is gone", 0))
    threading.Timer(0.1, lambda: [answer.set_result(None) for answer in others]).start()
    began = time.monotonic()
    ray_backend.stop_all(actors)  # type: ignore[arg-type]
    assert 0.05 < time.monotonic() - began < ray_backend.STOP_TIMEOUT_S


# --- lost actors ----------------------------------------------------------------------------------


@BOTH
def test_lost_actor_has_files_only_in_a_shared_folder(rig):
    rig.post("row")
    before = rig.fetched("row")
    outcome = rig.ended("row")
    assert isinstance(outcome, Ended)
    rig.actor.kill()
    if rig.shared:
        rig.backend.fetch(outcome.files[0], rig.part)
        check_media(rig.part.rename(rig.folder / "part.mp4"))
    rig.is_unreachable_twice()
    if not rig.shared:
        with pytest.raises(NoSuchFileError):
            rig.backend.fetch(outcome.files[0], rig.part)
    assert (rig.backend.outcome("row"), rig.actor.restarts) == (Unknown(), 1)
    rig.post("row")
    assert rig.fetched("row") == before
    assert rig.actor.restarts == 1


def test_silent_actor_is_unreachable_while_its_ray_runs(rig, monkeypatch):
    ended = r"^Ray has ended on this machine: run the same command again to go on$"
    actor = rig.actor
    backend = rig.backend
    monkeypatch.setattr(ray_backend, "LIMIT_S", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(actor, "serve", lambda *_: Future())
        with pytest.raises(UnreachableError, match=r"actor 0 has not answered within 0.02 s"):
            backend.outcome("row")
    assert backend.outcome("row") == Unknown()
    actor.kill()
    with pytest.raises(UnreachableError, match="Ray starts it again where a slot is free"):
        backend.outcome("row")
    actor.without_ray = True
    with pytest.raises(ray_backend.RayEndedError, match=ended) as raised:
        backend.outcome("row")
    assert not isinstance(raised.value, UnreachableError), "which the batch would wait out"
    # An actor that is not started again.
    monkeypatch.setattr(actor, "call", lambda *_: Future())
    actor.without_ray = False
    with pytest.raises(UnreachableError, match="has not answered within"):
        backend.outcome("row")
    actor.without_ray = True
    with pytest.raises(ray_backend.RayEndedError, match=ended):
        backend.outcome("row")


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (MissingPathError("/models does not exist"), UnsuitableError, "run the batch: /models"),
        (RuntimeError("no device"), UnsuitableError, "cannot run the batch: no device"),
        (WorkerLostError("worker 0 is gone", 0), UnreachableError, "does not answer: worker 0"),
        (TimeoutError(), UnreachableError, "actor 0 was restarted, and does not answer"),
    ],
)
def test_restarted_actor_needs_a_suitable_machine(rig, error, raised, message):
    faults = [error]

    def check_machine(_: object) -> None:
        if faults:
            raise faults.pop()

    rig.backend._check_machine = check_machine
    rig.post("row")
    rig.actor.kill()
    rig.is_unreachable_twice()
    with pytest.raises(raised, match=message):
        rig.backend.outcome("row")
    assert rig.backend.outcome("row") == Unknown()


BROKEN = "CUDA error: an illegal memory access was encountered"


def break_device(*_: Any, **__: Any) -> Any:
    """Fail in place of `Workflow.run`, as with a broken device."""
    cause = torch.AcceleratorError(f"{BROKEN}\nCUDA kernel errors might be asynchronously reported")
    raise NodeFailedError("sampler", "WanStreamSampler", cause) from cause


@needs_device_errors
def test_process_with_a_broken_device_ends(rig, monkeypatch):
    rig.post("before")
    assert isinstance(rig.ended("before"), Ended)
    with monkeypatch.context() as patch:
        patch.setattr(Workflow, "run", break_device)
        rig.post("row")
        assert eventually(lambda: rig.actor.service._broken)
    rig.post("next")
    rig.fetched("before")  # still fetched afterwards
    assert rig.ended("next") == Unknown(), "nothing more runs in this process"
    outcome = rig.ended("row")
    assert isinstance(outcome, Lost)
    assert f"node sampler (WanStreamSampler): AcceleratorError: {BROKEN} (on " in outcome.reason
    assert rig.actor.calls[-1] == "end"
    rig.is_unreachable_twice()
    assert (rig.backend.outcome("row"), rig.actor.restarts) == (Unknown(), 1)
    rig.post("again")
    assert isinstance(rig.ended("again"), Ended)


@needs_device_errors
def test_actor_whose_device_keeps_breaking_gets_no_rows(rig, monkeypatch):
    def break_often() -> None:
        for _ in range(ray_backend.MAX_BROKEN - 1):
            with monkeypatch.context() as patch:
                patch.setattr(Workflow, "run", break_device)
                rig.post("bad")
                assert isinstance(rig.ended("bad"), Lost)
            rig.is_unreachable_twice("bad")

    break_often()
    rig.post("good")
    assert isinstance(rig.ended("good"), Ended)
    break_often()
    message = rf"actor 0: its device has failed 6 times in a row, .*: {BROKEN}"
    monkeypatch.setattr(Workflow, "run", break_device)
    rig.post("bad")
    with pytest.raises(UnsuitableError, match=message):
        rig.ended("bad")
    assert rig.actor.restarts == 2 * (ray_backend.MAX_BROKEN - 1)


# --- options, and the number of actors ------------------------------------------------------------


def with_actors(
    ray: str | None = "local", workers: int | None = None, device: str | None = None, **more: Any
) -> BatchOptions:
    given = {"actors": ActorOptions(ray=ray, workers=workers), "local": LocalOptions(device=device)}
    return BatchOptions(jobs=Path(), workflow=Path(), output=Path(), **given, **more)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ray": None, "workers": 2}, "--workers 2 needs --ray, which starts them"),
        ({"servers": ("http://x",)}, "--ray and --server: .* give one of them"),
        ({"ray": "in-process"}, "--ray in-process: leave out --ray"),
        ({"device": "cuda:1"}, "--device cuda:1 with --ray: Ray assigns one GPU to each actor"),
        ({"device": "xpu"}, "--device xpu with --ray: .* leave out --device, or give cpu"),
        ({"device": "cpu"}, "--device cpu with --ray: give the number of actors with --workers N"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(given, message):
    for fitting in ({}, {"ray": None}, {"device": "cuda"}, {"device": "cpu", "workers": 4}):
        ray_backend.check_ray_options(with_actors(**fitting))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=message):
        ray_backend.check_ray_options(with_actors(**given))


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "cores", "message"),
    [
        ("cpu", 50, 0, 2, "each actor on a CPU needs a core, and there are 2: give --workers 2 at"),
        ("cpu", 9, 8, 8, "give --workers 8 at most"),
        ("cpu", 3, 0, 1, "give --workers 2 at most"),
        (None, None, 0, 2, r"--ray: this machine has no GPU .* \(--device cpu --workers N\)"),
        ("cuda", 2, 0, 2, "--ray: this machine has no GPU"),
        (None, 3, 2, 64, "--workers 3: each actor takes a GPU, and this machine has 2: give"),
        ("cpu", 2, 0, 2, ""),
        ("cpu", 2, 0, 1, ""),
        (None, None, 1, 1, ""),
        (None, 2, 2, 1, ""),
        ("cuda", 1, 8, 4, ""),
    ],
)
def test_too_many_actors_for_this_machine_are_refused(device, workers, gpus, cores, message):
    options = with_actors(workers=workers, device=device)
    with pytest.raises(ArgumentError, match=message) if message else nullcontext():
        ray_backend.check_local(options, gpus=gpus, cores=cores)


@pytest.mark.parametrize(
    ("workers", "gpus", "address", "note"),
    [
        (None, 4, "local", "starting Ray and 4 actors"),
        (1, 4, "local", "starting Ray and 1 actor"),
        (None, 4, "10.0.0.1:6379", "starting the actors on the Ray cluster at 10.0.0.1:6379"),
        (3, 0, "10.0.0.1:6379", "starting 3 actors on the Ray cluster at 10.0.0.1:6379"),
    ],
)
def test_note_has_the_number_of_actors_if_known(monkeypatch, workers, gpus, address, note):
    monkeypatch.setattr(ray_backend, "gpu_count", lambda: gpus)
    assert ray_backend.note_of_start(workers, address) == note
