"""Batch actors with services in this process and with computing replaced."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanstream.batch.backend import (
    Ended,
    JobFailed,
    Lost,
    Outcome,
    UnderWay,
    Unknown,
)
from wanstream.batch.errors import (
    NoSuchFileError,
    UnreachableError,
    UnsuitableError,
)
from wanstream.batch.output_store import check_media
from wanstream.cli.arguments import ArgumentError
from wanstream.cli.batch import ray_backend
from wanstream.cli.batch import row_service as row_service_module
from wanstream.cli.batch.ray_backend import (
    RayBackend,
    check_ray_options,
    input_files,
    model_files,
    stop_all,
)
from wanstream.cli.batch.row_service import TEMPORARY, RowService
from wanstream.cli.options import ActorOptions, BatchOptions, LocalOptions
from wanstream.distributed import WorkerLostError, open_services
from wanstream.distributed.path_map import DifferentFilesError, MissingPathError
from wanstream.distributed.ray import services as services_module
from wanstream.distributed.ray.pool import VersionsError
from wanstream.distributed.ray.services import service_count
from wanstream.distributed.worker.worker import Worker
from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.run import NodeFailedError, Workflow
from wanstream.schema.refs import ExpertsRef, PathMap, WorkersError, WorkersRef
from wanstream.tests.faults.replaced import named_models, run_replaced
from wanstream.tests.support.local_actor import (
    MARK,
    LocalActor,
    local_backend,
    row_service,
    rows_ended,
)
from wanstream.wan.latents import write_latent

WORKFLOWS = Path(__file__).parents[4] / "workflows" / "api"
LIMIT_S = 20


@pytest.fixture
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((WORKFLOWS / "t2v.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture
def options(
    tmp_path: Path, workflow: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[BatchOptions]:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "input").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    models = named_models(tmp_path / "models", workflow)
    # Tests use `monkeypatch` too. A context would end first, and `monkeypatch` would then set the
    # replacement again.
    monkeypatch.setattr(Workflow, "run", run_replaced)
    with rows_ended():
        yield BatchOptions(
            jobs=Path("jobs.csv"),
            workflow=Path("workflow.json"),
            output=tmp_path / "out",
            local=LocalOptions(models=models, input=tmp_path / "input"),
            actors=ActorOptions(ray="local"),
        )


@pytest.fixture(params=["shared folder", "object store"])
def actor(
    request: pytest.FixtureRequest, options: BatchOptions, workflow: dict[str, Any], tmp_path: Path
) -> Iterator[LocalActor]:
    """An actor that shares the driver's output folder or has another one."""
    output = tmp_path / "made" if request.param == "shared folder" else tmp_path / "elsewhere"
    actor = LocalActor(row_service(options, output))
    yield actor
    actor.service.stop()


@pytest.fixture
def shown() -> list[NodeProgress]:
    return []


@pytest.fixture
def backend(
    actor: LocalActor, options: BatchOptions, tmp_path: Path, shown: list[NodeProgress]
) -> Iterator[RayBackend]:
    backend = local_backend(actor, options)
    with backend.opened(tmp_path / "made", shown.append):
        yield backend


def ended(backend: RayBackend, prompt_id: str) -> Outcome:
    """Wait for a workflow's end, and return the outcome."""
    until = time.monotonic() + LIMIT_S
    while isinstance(outcome := backend.outcome(prompt_id), UnderWay):
        assert time.monotonic() < until
        time.sleep(0.01)
    return outcome


def with_seed(workflow: dict[str, Any], seed: int) -> dict[str, Any]:
    changed = json.loads(json.dumps(workflow))
    changed["sampler"]["inputs"]["seed"] = seed
    return changed


def fetched(backend: RayBackend, outcome: Outcome, part: Path) -> bytes:
    assert isinstance(outcome, Ended)
    (file,) = outcome.files
    backend.fetch(file, part)
    return part.read_bytes()


def test_files_come_back_whole_in_pieces_or_by_a_shared_folder(
    backend: RayBackend,
    actor: LocalActor,
    workflow: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_backend, "PIECE", 100)
    for seed in (1, 2):
        backend.post(f"row-{seed}", with_seed(workflow, seed))
    (tmp_path / "part").write_text("of an earlier try")
    first, second = (
        fetched(backend, ended(backend, f"row-{seed}"), tmp_path / "part") for seed in (1, 2)
    )
    assert first != second
    (made,) = actor.service._output_folder().rglob("row-2/**/*.mp4")
    assert made.read_bytes() == second
    shared = made.is_relative_to(tmp_path / "made")
    assert actor.calls.count("read") == (
        0 if shared else len(first) // 100 + len(second) // 100 + 2
    )
    assert fetched(backend, ended(backend, "row-2"), tmp_path / "again") == second, (
        "the outcome stays until a release"
    )
    backend.release("row-2")
    assert not made.exists()
    assert (backend.outcome("row-2"), (tmp_path / "part").read_bytes()) == (Unknown(), second)


def test_a_file_of_whole_pieces_ends_with_an_empty_one(
    backend: RayBackend, workflow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.post("row", workflow)
    outcome = ended(backend, "row")
    whole = fetched(backend, outcome, tmp_path / "part")
    monkeypatch.setattr(ray_backend, "PIECE", len(whole))
    assert fetched(backend, outcome, tmp_path / "other") == whole


def test_a_lost_actor_is_silent_and_then_has_no_workflows(
    backend: RayBackend, actor: LocalActor, workflow: dict[str, Any], tmp_path: Path
) -> None:
    backend.post("row", workflow)
    before = fetched(backend, ended(backend, "row"), tmp_path / "part")
    actor.kill()
    for _ in range(2):
        with pytest.raises(
            UnreachableError, match="worker 0 is gone\nRay starts it again where a slot is free"
        ):
            backend.outcome("row")
    assert (backend.outcome("row"), actor.restarts) == (Unknown(), 1)
    backend.post("again", workflow)
    assert fetched(backend, ended(backend, "again"), tmp_path / "part") == before
    assert actor.restarts == 1


def test_a_file_of_a_lost_actor_is_there_only_in_a_shared_folder(
    backend: RayBackend, actor: LocalActor, workflow: dict[str, Any], tmp_path: Path
) -> None:
    backend.post("row", workflow)
    outcome = ended(backend, "row")
    assert isinstance(outcome, Ended)
    actor.kill()
    shared = actor.service._output_folder().is_relative_to(tmp_path / "made")
    for error in () if shared else (UnreachableError, UnreachableError, NoSuchFileError):
        with pytest.raises(error):
            backend.fetch(outcome.files[0], tmp_path / "part")
    if shared:
        backend.fetch(outcome.files[0], tmp_path / "part")
        check_media((tmp_path / "part").rename(tmp_path / "part.mp4"))


def test_an_actor_that_does_not_answer_is_unreachable(
    backend: RayBackend, actor: LocalActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_backend, "LIMIT_S", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(actor, "serve", lambda *_: Future())
        with pytest.raises(UnreachableError, match=r"actor 0 has not answered within 0.02 s"):
            backend.outcome("row")
    assert backend.outcome("row") == Unknown()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event awaited by every run, unless the run is stopped."""
    event, inner = threading.Event(), Workflow.run

    def waiting(workflow: Workflow, *, on_progress: Callable[[NodeProgress], None]) -> Any:
        with workflow.host.opened(workflow.folders, device=workflow.device):
            while not event.wait(0.01):
                on_progress(
                    NodeProgress(node_id="sampler", class_type="WanStreamSampler", done=0, total=1)
                )
                workflow.host.events.raise_if_stopped()
        return inner(workflow)

    monkeypatch.setattr(Workflow, "run", waiting)
    yield event
    event.set()


def test_one_workflow_runs_and_the_next_one_waits(
    backend: RayBackend, workflow: dict[str, Any], gate: threading.Event, shown: list[NodeProgress]
) -> None:
    assert backend.window == 2
    backend.post("first", workflow)
    backend.post("second", with_seed(workflow, 2))
    while backend.outcome("first") != UnderWay(begun=True):
        time.sleep(0.01)
    assert backend.outcome("second") == UnderWay(begun=False)
    backend.withdraw("first")
    assert backend.outcome("first") == UnderWay(begun=True), "it has started"
    backend.withdraw("second")
    assert backend.outcome("second") == Unknown()
    backend.interrupt("second")
    backend.interrupt("first")
    assert ended(backend, "first") == Unknown()
    backend.post("third", workflow)
    gate.set()
    assert isinstance(ended(backend, "third"), Ended)


def test_progress_is_that_of_the_running_workflow_when_it_is_polled(
    backend: RayBackend,
    workflow: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    shown: list[NodeProgress],
) -> None:
    begun, go_on, inner = threading.Event(), threading.Event(), Workflow.run
    halfway = NodeProgress(node_id="sampler", class_type="WanStreamSampler", done=1, total=2)

    def run(workflow: Workflow, *, on_progress: Callable[[NodeProgress], None], **_: Any) -> Any:
        for done in range(1000):
            on_progress(replace(halfway, done=done, total=1000))
        on_progress(halfway)
        begun.set()
        assert go_on.wait(LIMIT_S)
        return inner(workflow)

    monkeypatch.setattr(Workflow, "run", run)
    backend.post("row", workflow)
    backend.post("next", workflow)
    assert begun.wait(LIMIT_S)
    assert shown == [], "steps are not sent"
    backend.outcome("row")
    backend.outcome("next")
    go_on.set()
    assert shown == [halfway]


def test_a_refused_workflow_fails_with_the_words_of_its_validation(
    backend: RayBackend, workflow: dict[str, Any]
) -> None:
    workflow["sampler"]["inputs"]["steps"] = 0
    backend.post("row", workflow)
    outcome = ended(backend, "row")
    assert isinstance(outcome, JobFailed)
    assert "node sampler (WanStreamSampler)" in outcome.reason
    assert any("node sampler (WanStreamSampler)" in line for line in backend.faults(workflow))


def test_a_full_disk_of_an_actor_ends_the_batch_only_if_it_is_the_drivers(
    backend: RayBackend,
    actor: LocalActor,
    workflow: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise NodeFailedError(
            "save", "WanStreamSaveVideo", OSError(errno.ENOSPC, "full")
        ) from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Workflow, "run", run)
    backend.post("row", workflow)
    folder = actor.service._output_folder()
    if folder.is_relative_to(tmp_path / "made"):
        with pytest.raises(
            OSError, match=rf"node save .*full \(on .*, [\d,]+ bytes are free in {folder}\)"
        ) as raised:
            ended(backend, "row")
        assert raised.value.errno == errno.ENOSPC
        return
    message = (
        rf"actor 0: its disk is full: on .*, [\d,]+ bytes are free in {folder}: node save .*full"
    )
    with pytest.raises(UnsuitableError, match=message):
        ended(backend, "row")


def test_a_latent_is_sent_for_its_workflow(
    backend: RayBackend, actor: LocalActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_backend, "PIECE", 100)
    (tmp_path / "latent").write_bytes(os.urandom(250))
    for _ in range(2):
        backend.provide("row", tmp_path / "latent", "continued/one.latent")
    written = actor.service._output_folder() / "row" / "continued" / "one.latent"
    assert written.read_bytes() == (tmp_path / "latent").read_bytes()
    assert actor.calls == ["write_latent"] * 6


IMAGE = {"image": {"class_type": "LoadImage", "inputs": {"image": "scene.png"}}}


def test_input_files_are_sent_once_unless_the_machine_has_them(
    backend: RayBackend,
    actor: LocalActor,
    options: BatchOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (options.local.input / "scene.png").write_bytes(b"one")
    backend.post("here", IMAGE)
    assert "write_input" not in actor.calls, "its machine has the folder"
    monkeypatch.setattr(actor.service, "_input", tmp_path / "not there")
    backend.post("first", IMAGE)
    backend.post("second", IMAGE)
    assert actor.calls.count("write_input") == 1
    (options.local.input / "scene.png").write_bytes(b"two")
    os.utime(options.local.input / "scene.png", ns=(1, 1))  # same size, but older
    backend.post("third", IMAGE)
    assert actor.calls.count("write_input") == 2
    sent = actor.service._own_folder() / "input"
    assert (sent / "scene.png").read_bytes() == b"two"
    assert actor.service._input_folder(backend._send_inputs(IMAGE)) == sent


SAVE_VIDEO = {"images": ["load", 0], "filename_prefix": "x", "fps": 16.0, "crf": 20}


@pytest.mark.parametrize(
    ("load", "save", "reason"),
    [
        (
            {"class_type": "LoadImage", "inputs": {"image": "latents/x [output]"}},
            {"class_type": "WanStreamSaveVideo", "inputs": SAVE_VIDEO},
            "latents/x is not in the output folder",
        ),
        (
            {"class_type": "WanStreamLoadLatent", "inputs": {"file": "latents/x"}},
            {
                "class_type": "WanStreamSaveLatent",
                "inputs": {"latent": ["load", 0], "filename_prefix": "x"},
            },
            "x does not exist",
        ),
    ],
)
def test_a_file_of_the_output_folder_is_sent_and_read(
    backend: RayBackend,
    actor: LocalActor,
    options: BatchOptions,
    load: object,
    save: object,
    reason: str,
) -> None:
    made = {"load": load, "save": save}
    (fault,) = backend.faults(made)
    assert reason in fault
    (options.output / "latents").mkdir(parents=True)
    write_latent(options.output / "latents" / "x", torch.zeros(1, 16, 1, 2, 2))
    assert backend.faults(made) == []
    assert "write_input" in actor.calls


def test_input_files_of_a_workflow_are_those_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "input" / "below").mkdir(parents=True)
    (tmp_path / "output").mkdir()
    for name in ("input/a.png", "input/below/b.mp4", "outside.png", "output/c.png", "output/d.png"):
        (tmp_path / name).touch()
    inputs = {
        "image": "a.png",
        "file": "below/b.mp4 [input]",
        "text": "x" * 5000,
        "other": "../outside.png",
    }
    inputs |= {
        "seed": 1,
        "link": ["node", 0],
        "empty": "",
        "nul": "a\0b",
        "absolute": str(tmp_path / "outside.png"),
    }  # type: ignore[dict-item]
    more = {
        "marked": "a.png[input]",
        "made": "c.png [output]",
        "temporary": "d.png [temp]",
        "plain": "d.png",
    }
    more |= {
        "windows": "below\\b.mp4",
        "gone": "e.png [output]",
        "above": "../outside.png [output]",
    }
    prompt = {
        str(number): {"class_type": "Any", "inputs": each}
        for number, each in enumerate((inputs, more))
    }
    folder, output = tmp_path / "input", tmp_path / "output"
    assert input_files(prompt, folder, output) == {
        "a.png": folder / "a.png",
        "below/b.mp4": folder / "below" / "b.mp4",
        ".output/c.png": output / "c.png",
        ".output/d.png": output / "d.png",
    }


def test_model_files_are_those_that_the_workflow_or_a_row_names(tmp_path: Path) -> None:
    for name in (
        "vae/a.safetensors",
        "loras/sub/b.safetensors",
        "loras/unused.safetensors",
        "text.safetensors",
    ):
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).touch()
    workflow = {
        "vae": {
            "inputs": {"vae": "a.safetensors", "other": "../text.safetensors", "text": "a" * 5000}
        }
    }
    rows = [{"lora.file": "sub/b.safetensors", "sampler.seed": 3}]
    models = tmp_path / "models"
    found = [models / "loras" / "sub" / "b.safetensors", models / "vae" / "a.safetensors"]
    assert model_files(workflow, rows, models) == found
    assert model_files(workflow, rows, tmp_path / "not there") == []


def test_folders_of_killed_processes_are_removed(actor: LocalActor, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    kept = {temporary / f"{TEMPORARY}{os.getpid()}-x", temporary / f"{TEMPORARY}x-y"}
    gone = 4_194_305  # above Linux's largest process id
    kept.add(
        temporary / f"wanstream-batch-another.machine-{gone}-x"
    )  # in a folder shared by machines
    for folder in (*kept, temporary / f"{TEMPORARY}{gone}-x"):
        (folder / "output").mkdir(parents=True)
    own = actor.service._own_folder()
    assert set(temporary.iterdir()) == {own, *kept}
    actor.service.stop()
    assert not own.exists()


def test_a_stop_ends_the_running_workflow(
    backend: RayBackend, actor: LocalActor, workflow: dict[str, Any], gate: threading.Event
) -> None:
    backend.post("row", workflow)
    backend.post("next", workflow)
    while backend.outcome("row") != UnderWay(begun=True):
        time.sleep(0.01)
    began = time.monotonic()
    actor.service.stop()
    assert time.monotonic() - began < ray_backend.STOP_TIMEOUT_S
    assert (backend.outcome("row"), backend.outcome("next")) == (Unknown(), Unknown())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"actors": ActorOptions(workers=2)}, "--workers 2 needs --ray, which starts them"),
        ({"servers": ("http://127.0.0.1:8188",)}, "--ray and --server: .* give one of them"),
        ({"actors": ActorOptions(ray="in-process")}, "--ray in-process: leave out --ray"),
        (
            {"local": LocalOptions(device="cuda:1")},
            "--device cuda:1 with --ray: Ray assigns one GPU to each actor",
        ),
        (
            {"local": LocalOptions(device="xpu")},
            "--device xpu with --ray: .* leave out --device, or give cpu",
        ),
        (
            {"local": LocalOptions(device="cpu")},
            "--device cpu with --ray: give the number of actors with --workers N",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    options: BatchOptions, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_ray_options(replace(options, **given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"local": LocalOptions(device="cuda")},
        {"local": LocalOptions(device="cpu"), "actors": ActorOptions(ray="local", workers=4)},
        {"actors": ActorOptions(ray="local", workers=3)},
    ],
)
def test_options_that_fit_together_are_accepted(
    options: BatchOptions, given: dict[str, Any]
) -> None:
    check_ray_options(replace(options, **given))
    check_ray_options(replace(options, actors=ActorOptions()))


def test_there_is_a_process_for_each_gpu_unless_a_number_is_given() -> None:
    resources = {"GPU": 8.0, "CPU": 16.0}
    assert service_count(resources, "local", device="cuda", count=None) == 8
    assert service_count(resources, "local", device="cuda", count=2) == 2
    assert service_count({"CPU": 16.0}, "local", device="cpu", count=4) == 4
    with pytest.raises(
        WorkersError,
        match=r"the Ray at local has no GPU that it can .* \(--device cpu --workers N\)",
    ):
        service_count({"CPU": 16.0}, "local", device="cuda", count=2)
    with pytest.raises(WorkersError, match=r"the Ray at 10\.0\.0\.1:6379 has no GPU"):
        service_count({"CPU": 16.0}, "10.0.0.1:6379", device="cuda", count=None)


def test_the_mark_is_in_the_folder_of_the_driver(backend: RayBackend, tmp_path: Path) -> None:
    assert (tmp_path / "made" / MARK).is_dir()


def test_actors_of_one_machine_share_the_blocks_in_ram(
    options: BatchOptions, workflow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []

    def open_pair(ref: ExpertsRef, *, shared: bool) -> Any:
        opened.append(shared)
        raise InterruptedError

    monkeypatch.setattr(row_service_module, "open_pair", open_pair)
    folders = {"models": str(options.local.models), "input": "", "marked": ""}
    for processes in (1, 2):
        service = RowService("cpu", processes, strict=False, **folders)
        with pytest.raises(InterruptedError):
            service._host._experts.get(
                ExpertsRef(high_noise=tmp_path / "high", low_noise=tmp_path / "low")
            )
    assert opened == [False, sys.platform != "win32"], "one alone does not share"


def test_folders_of_another_machine_are_those_of_the_path_map(
    options: BatchOptions, workflow: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "made" / MARK).mkdir(parents=True)
    folders = {
        "models": "/home/me/models",
        "input": "/home/me/input",
        "marked": f"/home/me/made/{MARK}",
    }
    maps = [("/home/me", str(tmp_path / "not mounted")), ("/home/me", str(tmp_path))]
    service = RowService("cpu", 1, strict=False, **folders, path_map=maps)
    assert service.faults(workflow, {}) == []
    assert (service._models, service._input) == (tmp_path / "models", tmp_path / "input")
    assert service._output_folder() == tmp_path / "made"
    service.stop()


def test_a_folder_of_the_same_name_without_the_mark_is_not_shared(
    options: BatchOptions, workflow: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    service = row_service(options, tmp_path / "made")()
    assert service._output_folder().is_relative_to(tmp_path / "temporary")
    service.stop()


class OneWorker:
    """Worker in an actor's process, with this machine's files."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.changes = rank, dict[str, Any]()

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(
            replace(getattr(Worker("cpu", machine="m"), method)(*args), **self.changes)
        )
        return future


@contextmanager
def services(
    monkeypatch: pytest.MonkeyPatch,
    workers: Sequence[OneWorker],
    paths: Sequence[Path],
    maps: Sequence[PathMap] = (),
) -> Iterator[Callable[[OneWorker], None]]:
    """Yield the check for a restarted worker's machine, from `open_services` with these workers."""
    pool = SimpleNamespace(workers=workers)
    monkeypatch.setattr(services_module, "RayPool", lambda *_, **__: nullcontext(pool))
    monkeypatch.setattr(
        services_module,
        "CONNECTION",
        SimpleNamespace(
            acquire=lambda _: SimpleNamespace(cluster_resources=dict), release=lambda: None
        ),
    )
    ref = WorkersRef(count=1, paths=tuple(maps))
    opened = open_services(ref, ("", {}), device="cpu", count=len(workers), paths=paths)
    with opened as (_, check_machine):
        yield check_machine  # type: ignore[misc]


def test_an_actor_that_is_lost_during_the_checks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> Future[Any]:
        raise WorkerLostError("worker 0 is gone", 0)

    worker = OneWorker()
    monkeypatch.setattr(worker, "call", lost)
    with (
        pytest.raises(ValueError, match="worker 0 is gone"),
        services(monkeypatch, [worker], [tmp_path]),
    ):
        pass


def test_a_restarted_actor_must_have_the_files_and_the_versions_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, workers = tmp_path / "model", [OneWorker(0), OneWorker(1)]
    model.write_bytes(b"12")
    with services(monkeypatch, workers, [model]) as check_machine:
        check_machine(workers[1])
        workers[1].changes = {"node": "another", "sizes": {str(model): 3}}
        with pytest.raises(DifferentFilesError, match=r"2 bytes on .* and 3 bytes on another"):
            check_machine(workers[1])
        workers[1].changes = {
            "node": "another",
            "versions": {**Worker("cpu", machine="m").facts().versions, "torch": "1.0"},
        }
        with pytest.raises(VersionsError, match=r"worker 1 on another has torch 1\.0"):
            check_machine(workers[1])
        check_machine(workers[0])


def test_a_machine_without_the_models_is_refused_with_the_paths_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = [PathMap(here=str(tmp_path), there=str(tmp_path / "mounted"))]
    models = tmp_path / "models"
    with (
        pytest.raises(MissingPathError) as raised,
        services(monkeypatch, [OneWorker()], [models], maps),
    ):
        pass
    assert f"{tmp_path / 'mounted' / 'models'} or {models} does not exist on" in str(raised.value)
    assert (
        "add its folder there to the path_map of the cluster in the list of clusters (the map is "
        f"{tmp_path} ->" in (str(raised.value))
    )
    (tmp_path / "mounted" / "models").mkdir(parents=True)
    with services(monkeypatch, [OneWorker()], [models], maps):
        pass


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            MissingPathError("/models does not exist on another"),
            UnsuitableError,
            "cannot run the batch: /models",
        ),
        (
            RuntimeError("CUDA error: no device"),
            UnsuitableError,
            "cannot run the batch: CUDA error: no device",
        ),
        (
            DifferentFilesError("the weights have 2 and 3 bytes"),
            UnsuitableError,
            "the weights have 2 and 3 bytes",
        ),
        (VersionsError("worker 0 has torch 1.0"), UnsuitableError, "worker 0 has torch 1.0"),
        (
            WorkerLostError("worker 0 is gone", 0),
            UnreachableError,
            "does not answer: worker 0 is gone",
        ),
        (TimeoutError(), UnreachableError, "actor 0 was restarted, and does not answer"),
    ],
)
def test_an_actor_gets_rows_after_a_restart_only_if_its_machine_is_suitable(
    actor: LocalActor,
    options: BatchOptions,
    workflow: dict[str, Any],
    error: Exception,
    raised: type[Exception],
    message: str,
) -> None:
    faults = [error]

    def check_machine(_: object) -> None:
        if faults:
            raise faults.pop()

    backend = RayBackend(actor, options, {}, MARK, check_machine=check_machine, stop=lambda: None)
    backend.post("row", workflow)
    actor.kill()
    for _ in range(2):
        with pytest.raises(UnreachableError):
            backend.outcome("row")
    with pytest.raises(raised, match=message):
        backend.outcome("row")
    assert backend.outcome("row") == Unknown()


def test_all_actors_stop_at_the_same_time() -> None:
    answers = [Future[None]() for _ in range(3)]
    actors = [SimpleNamespace(serve=lambda method, answer=answer: answer) for answer in answers]
    answers[0].set_exception(WorkerLostError("worker 0 is gone", 0))
    threading.Timer(0.1, lambda: [answer.set_result(None) for answer in answers[1:]]).start()
    began = time.monotonic()
    stop_all(actors)  # type: ignore[arg-type]
    assert 0.05 < time.monotonic() - began < ray_backend.STOP_TIMEOUT_S


def test_a_full_disk_under_the_inputs_of_an_actor_is_its_own(
    backend: RayBackend,
    actor: LocalActor,
    options: BatchOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    (options.local.input / "scene.png").write_bytes(b"one")
    monkeypatch.setattr(actor.service, "_input", tmp_path / "not there")
    monkeypatch.setattr(row_service_module, "_write", write)
    with pytest.raises(
        UnsuitableError, match=r"actor 0: its disk is full: on .*, [\d,]+ bytes are free in .*full"
    ):
        backend.post("row", IMAGE)


BROKEN = "CUDA error: an illegal memory access was encountered"


def break_device(*_: Any, **__: Any) -> Any:
    """Fail in place of `Workflow.run`, as with a broken device."""
    cause = torch.AcceleratorError(f"{BROKEN}\nCUDA kernel errors might be asynchronously reported")
    raise NodeFailedError("sampler", "WanStreamSampler", cause) from cause


needs_device_errors = pytest.mark.skipif(
    not hasattr(torch, "AcceleratorError"),
    reason="torch before 2.8 has no class for errors of a device",
)


@needs_device_errors
def test_a_process_whose_device_is_broken_ends_and_its_row_is_lost(
    backend: RayBackend,
    actor: LocalActor,
    workflow: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend.post("before", workflow)
    assert isinstance(ended(backend, "before"), Ended)
    with monkeypatch.context() as patch:
        patch.setattr(Workflow, "run", break_device)
        backend.post("row", workflow)
        while not actor.service._broken:
            time.sleep(0.01)
    backend.post("next", workflow)
    fetched(backend, ended(backend, "before"), tmp_path / "part")  # still fetched afterwards
    assert ended(backend, "next") == Unknown(), "nothing more runs in this process"
    outcome = ended(backend, "row")
    assert isinstance(outcome, Lost)
    assert f"node sampler (WanStreamSampler): AcceleratorError: {BROKEN} (on " in outcome.reason
    assert actor.calls[-1] == "end"
    for _ in range(2):
        with pytest.raises(UnreachableError):
            backend.outcome("row")
    assert (backend.outcome("row"), actor.restarts) == (Unknown(), 1)
    backend.post("again", workflow)
    assert isinstance(ended(backend, "again"), Ended)


@needs_device_errors
def test_an_actor_whose_device_breaks_again_and_again_gets_no_more_rows(
    backend: RayBackend,
    actor: LocalActor,
    workflow: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_once() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Workflow, "run", break_device)
            backend.post("bad", workflow)
            assert isinstance(ended(backend, "bad"), Lost)
        for _ in range(2):
            with pytest.raises(UnreachableError):
                backend.outcome("bad")

    for _ in range(ray_backend.MAX_BROKEN - 1):
        break_once()
    backend.post("good", workflow)
    assert isinstance(ended(backend, "good"), Ended)
    for _ in range(ray_backend.MAX_BROKEN - 1):
        break_once()
    with pytest.raises(
        UnsuitableError, match=rf"actor 0: its device has failed 6 times in a row, .*: {BROKEN}"
    ):
        break_once()
    assert actor.restarts == 2 * (ray_backend.MAX_BROKEN - 1)
