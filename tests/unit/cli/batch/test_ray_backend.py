"""Batches on actors with services in this process, and with computing replaced."""

import errno
import json
import os
import re
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from wanstream.batch.backend import Ended, JobFailed, Lost, Outcome, UnderWay, Unknown
from wanstream.batch.errors import NoSuchFileError, UnreachableError, UnsuitableError
from wanstream.batch.journal.entry import State
from wanstream.batch.output_store import OutputStore, check_media
from wanstream.batch.rows.rows import BatchJob
from wanstream.batch.running import failures
from wanstream.batch.running.failures import MAX_LOSSES
from wanstream.cli import main
from wanstream.cli.arguments import DONE, INVALID, ArgumentError
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch import row_service as row_service_module
from wanstream.cli.batch.row_service import RowService
from wanstream.cli.options import ActorOptions, BatchOptions, LocalOptions
from wanstream.distributed import WorkerLostError
from wanstream.distributed.path_map import MissingPathError
from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.run import History, NodeFailedError, Workflow
from wanstream.host.workers.clusters import VARIABLE
from wanstream.tests.support.batch.command import command_line, shipped
from wanstream.tests.support.batch.fake_batch import Bench, Killed, Mishaps
from wanstream.tests.support.distributed import local_actor
from wanstream.tests.support.host.shipped import node
from wanstream.tests.support.marks import needs_device_errors
from wanstream.tests.support.polling import eventually
from wanstream.wan.latents import write_latent

LIMIT_S = 20
SAMPLER = {"node_id": "sampler", "class_type": "WanStreamSampler"}


class Rig:
    """A backend on an actor that shares the driver's output folder or has another one."""

    def __init__(self, options, workflow, folder, *, shared):
        self.options = options
        self.workflow = workflow
        self.folder = folder
        self.shared = shared
        self.part = folder / "part"
        self.actor = local_actor.LocalActor(
            local_actor.row_service(options, folder / ("made" if shared else "elsewhere"))
        )
        self.backend = local_actor.local_backend(self.actor, options)
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
        (file,) = self.ended(prompt_id).files
        self.backend.fetch(file, self.part)
        return self.part.read_bytes()

    def is_unreachable_twice(self, prompt_id: str = "row") -> None:
        message = "worker 0 is gone\nRay starts it again where a slot is free"
        for _ in range(2):
            with pytest.raises(UnreachableError, match=message):
                self.backend.outcome(prompt_id)


BOTH = pytest.mark.parametrize("rig", ["shared folder", "object store"], indirect=True)


@pytest.fixture(params=["object store"])
def rig(request, options, workflow, tmp_path):
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
    assert (rig.folder / "made" / local_actor.MARK).is_dir()
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


LINKED = ["load", 0]
VIDEO = node("WanStreamSaveVideo", images=LINKED, filename_prefix="x", fps=16.0, crf=20)
LATENT = node("WanStreamSaveLatent", latent=LINKED, filename_prefix="x")
OUTPUT_IMAGE = node("LoadImage", image="latents/x [output]")
OUTPUT_LATENT = node("WanStreamLoadLatent", file="latents/x")


@pytest.mark.parametrize(
    ("load", "save", "fault"),
    [
        (OUTPUT_IMAGE, VIDEO, "latents/x is not in the output folder"),
        (OUTPUT_LATENT, LATENT, "x does not exist"),
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
    values = ["a.png", "below/b.mp4 [input]", "c.png [output]", "d.png", "below\\b.mp4"]
    values += ["a.png[input]", "d.png [temp]", "e.png [output]", "", "a\0b", "x" * 5000]
    values += ["../outside.png", "../outside.png [output]", str(tmp_path / "outside.png")]
    values += [1, ["node", 0]]
    prompt = {"node": {"inputs": {str(number): value for number, value in enumerate(values)}}}
    found = ray_backend.input_files(prompt, tmp_path / "input", tmp_path / "output")
    places = {f".output/{name}": f"output/{name}" for name in ("c.png", "d.png")}
    places |= {name: f"input/{name}" for name in ("a.png", "below/b.mp4")}
    assert found == {name: tmp_path / place for name, place in places.items()}


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
def gate(monkeypatch):
    """Event awaited by every run, unless the run is stopped."""
    event = threading.Event()
    inner = Workflow.run

    def waiting(workflow, *, on_progress):
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
    begun = threading.Event()
    go_on = threading.Event()
    inner = Workflow.run
    halfway = NodeProgress(**SAMPLER, done=500, total=1000)

    def run(workflow, *, on_progress, **_):
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

    failed = NodeFailedError("save", "WanStreamSaveVideo", full)
    failed.__cause__ = full
    monkeypatch.setattr(Workflow, "run", mock.Mock(side_effect=failed))
    rig.post("row")
    free = rf"[\d,]+ bytes are free in {rig.output}"
    message = rf"actor 0: its disk is full: on .*, {free}: node save .*full"
    if rig.shared:
        message = rf"node save .*full \(on .*, {free}\)"
    with pytest.raises(OSError if rig.shared else UnsuitableError, match=message) as raised:
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
    ray_backend.stop_all(actors)
    assert 0.05 < time.monotonic() - began < ray_backend.STOP_TIMEOUT_S


# --- lost actors ----------------------------------------------------------------------------------


@BOTH
def test_lost_actor_has_files_only_in_a_shared_folder(rig):
    rig.post("row")
    before = rig.fetched("row")
    (file,) = rig.ended("row").files
    rig.actor.kill()
    if rig.shared:
        rig.backend.fetch(file, rig.part)
        check_media(rig.part.rename(rig.folder / "part.mp4"))
    rig.is_unreachable_twice()
    if not rig.shared:
        with pytest.raises(NoSuchFileError):
            rig.backend.fetch(file, rig.part)
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


def break_device(*_, **__):
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


def with_actors(ray="local", workers=None, device=None, **more):
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
        ray_backend.check_ray_options(with_actors(**fitting))
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


# --- fleets ---------------------------------------------------------------------------------------


KINDS = ("actor", "actor while it answers", "driver", "answer")
"""Killed actors, killed drivers, and a lost response."""


def seed_of(workflow):
    return workflow.verdict.prompt["sampler"]["inputs"]["seed"]


def write_row(workflow, **_):
    """Replace `Workflow.run`."""
    folder = workflow.folders.output / "video"
    folder.mkdir(parents=True)
    (folder / "row.txt").write_text(f"row {seed_of(workflow)}")
    shown = {"images": [{"filename": "row.txt", "subfolder": "video", "type": "output"}]}
    return History(outputs={"save": shown}, results={}, node_errors={})


class UnluckyActor(local_actor.LocalActor):
    """An actor with mishaps."""

    mishaps: Mishaps

    def serve(self, method, *args):
        what = "" if method == "stop" else self.mishaps.next(*KINDS)
        if what == "actor":
            self.kill()
        if what == "driver":
            raise Killed
        answer = super().serve(method, *args)
        if what == "actor while it answers":
            self.kill()
        return Future() if what == "answer" else answer


class ActorFleet(Bench):
    """A driver restarted at will on one folder, along with the actors."""

    def __init__(self, options: BatchOptions, output: Path, *, actors: int, rows: int) -> None:
        super().__init__(options.output, rows=rows)
        self.planner = self._plan
        self.mishaps = Mishaps(0, 0, 0.0)
        self._options = options
        self._make = local_actor.row_service(options, output)
        self._count = actors

    def run(self, *_, **__):
        actors = [UnluckyActor(self._make, rank) for rank in range(self._count)]
        self.servers = [local_actor.local_backend(actor, self._options) for actor in actors]
        folder = OutputStore.backend_folder_of(self.folder)
        with ExitStack() as opened:
            for actor, backend in zip(actors, self.servers, strict=True):
                actor.mishaps = self.mishaps
                opened.enter_context(backend.opened(folder, lambda _: None))
            return super().run()

    def _plan(self, rows):
        prompts = [shipped(sampler={"seed": row.position}) for row in rows]
        pairs = zip(prompts, rows, strict=True)
        return [BatchJob(prompt=p, rows=(row,), saves={row.hash: None}) for p, row in pairs]


@pytest.fixture
def replaced(options, monkeypatch):
    """Compute nothing: rows are texts."""
    monkeypatch.setattr(Workflow, "run", write_row)
    monkeypatch.setattr(ray_backend, "LIMIT_S", 1.0)


@pytest.mark.slow  # runs a whole batch, or waits for the servers
@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("shared", [True, False])
def test_fifty_mishaps_in_a_hundred_rows_cost_nothing(shared, options, tmp_path, monkeypatch):
    own = tmp_path / "of another machine"
    mishaps = Mishaps(int(shared), 50, 0.2)
    # So many mishaps may hit one row five times while the driver lives, and it would rightly fail.
    monkeypatch.setattr(failures, "MAX_LOSSES", mishaps.left + 1)
    output = OutputStore.backend_folder_of(options.output) if shared else own
    fleet = ActorFleet(options, output, actors=4, rows=100)
    fleet.mishaps = mishaps
    fleet.run_through(mishaps)
    fleet.check(range(1, 101))
    assert not fleet.reporter.failures
    assert set(mishaps.happened) == {*KINDS}
    assert mishaps.left == 0
    assert [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()] == []


@pytest.fixture
def faulty_fleet(options, tmp_path, monkeypatch, replaced):
    """Create a fleet with three actors on separate machines and 40 rows, some with faults.

    `faulty_fleet(fault)`: `fault` returns a node's error for a workflow, or None.
    """

    def make(fault):
        fleet = ActorFleet(options, tmp_path / "of another machine", actors=3, rows=40)

        def run(workflow, **given):
            if (error := fault(workflow)) is not None:
                raise NodeFailedError("save", "WanStreamSaveVideo", error) from error
            time.sleep(0.02)
            return write_row(workflow, **given)

        monkeypatch.setattr(Workflow, "run", run)
        return fleet

    return make


def test_batch_ends_when_the_disks_of_all_actors_are_full(faulty_fleet):
    full = OSError(errno.ENOSPC, "No space left on device")
    fleet = faulty_fleet(lambda _: full)
    reason = r"actor \d: its disk is full: on .*bytes are free.*No space left on device"
    with pytest.raises(UnsuitableError, match=reason):
        fleet.run()
    whole = re.compile(rf"{reason}; it gets no more rows")
    assert len([told for told in fleet.reporter.told if whole.fullmatch(told)]) == 2
    assert State.failed not in fleet.states()


@needs_device_errors
def test_row_that_breaks_every_device_fails_alone(faulty_fleet):
    raised = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    fleet = faulty_fleet(lambda workflow: raised if seed_of(workflow) == 4 else None)
    fleet.run()
    fleet.check(number for number in range(1, 41) if number != 4)
    (failed,) = fleet.reporter.failures
    node = "node save (WanStreamSaveVideo): Acc"
    assert failed.startswith(f"failed 4: lost {MAX_LOSSES} times while running: {node}")
    assert any(f"has lost a row: {node}" in told for told in fleet.reporter.told)


# --- the command ----------------------------------------------------------------------------------


def open_services(_, service, *, device, count, paths):
    assert device == "cpu"
    make = partial(RowService, device, count, **service[1])
    return nullcontext(([local_actor.LocalActor(make, rank) for rank in range(count)], None))


@pytest.fixture
def batch(options, tmp_path, monkeypatch):
    """`batch(rows, *options)` runs a batch with as many rows, and returns the exit code."""
    monkeypatch.setattr(ray_backend, "check_ray", lambda ref: None)
    monkeypatch.setattr(ray_backend, "open_services", open_services)
    places = ["--models", options.local.models, "--input", tmp_path]

    def run(count: int, *more: str) -> int:
        rows = [{"sampler.seed": number} for number in range(count)]
        return main(command_line(tmp_path, shipped(), *rows, options=[*places, *more]))

    return run


def test_summary_has_the_rows_of_each_actor_and_command(batch, capsys):
    for rows, expected in ((6, {}), (8, {"earlier commands": 6})):
        assert batch(rows, "--ray", "--device", "cpu", "--workers", "2") == DONE
        printed = capsys.readouterr()
        notes = printed.err.splitlines()
        assert (notes[0], notes[-1]) == ("starting Ray and 2 actors", "ending the actors")
        first, *lines = printed.out.splitlines()
        assert "rows are done in" in first
        counts = {name: int(line.split()[0]) for name, line in (each.split(": ") for each in lines)}
        assert counts.keys() == {"actor 0", "actor 1", *expected}
        assert sum(counts.values()) == rows
        assert counts.items() >= expected.items()


TOO_MANY = "--workers 5: each actor on a CPU needs a core, and there are 4: give --workers 4 at"
NO_CLUSTER = "the cluster is 'lab', and there are local, rack: choose one of them"


@pytest.mark.parametrize(
    ("given", "message"), [("--ray --device cpu --workers 5", TOO_MANY), ("--ray lab", NO_CLUSTER)]
)
def test_wrong_actors_are_refused_before_ray_starts(
    batch, given, message, tmp_path, monkeypatch, capsys
):
    started = mock.Mock(side_effect=AssertionError("Ray is started"))
    monkeypatch.setattr(ray_backend, "open_services", started)
    monkeypatch.setattr(ray_backend, "core_count", lambda: 4)
    listed = tmp_path / "clusters.json"
    listed.write_text(json.dumps({"rack": {"address": "127.0.0.1:6379"}}), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(listed))
    assert batch(1, *given.split()) == INVALID
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
