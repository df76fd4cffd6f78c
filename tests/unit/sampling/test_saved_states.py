"""States on disk: a run with the same inputs finds them, any other ignores them."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.distributed.messages import RunTask
from wanstream.sampling import SavedRun, denoise, saved_states
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens
from wanstream.sampling.saved_states import file_versions, run_digest
from wanstream.sampling.steps import RunSlice, RunState, SamplingCancelled
from wanstream.sampling.steps.results import StepProgress
from wanstream.shapes import ContextWindows
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan.experts.open import ExpertsRegistry

MakeTask = Callable[..., RunTask]
DAY_S = 86400.0


def ignore(change: str) -> None:
    return


def saved_run(folder: Path, request: DenoiseRequest, inputs: object = ()) -> SavedRun:
    return SavedRun(folder, [request], inputs, ignore)


@pytest.fixture
def states_of() -> Callable[[RunTask], list[RunState]]:
    """`states_of(task)`: the states after all steps."""

    def run(task: RunTask) -> list[RunState]:
        states, registry = list[RunState](), ExpertsRegistry()

        def on_step(step: StepProgress) -> None:
            states.append(step.state())

        denoise(
            registry.get(task.experts),
            task.request,
            policy=task.policy,
            device="cpu",
            on_step=on_step,
        )
        registry.free()
        return states

    return run


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("solver", ["euler", "unipc", "dpm++", "lcm"])
def test_a_run_that_continues_from_a_file_gives_the_same_bits(
    solver: str, make_task: MakeTask, states_of: Any, tmp_path: Path
) -> None:
    task = make_task(request={"solver": solver, "steps": 6, "switch_step": 3})
    states = states_of(task)
    for state in states[:-1]:
        saved_run(tmp_path, task.request).save(0, state)
        (found,) = saved_run(tmp_path, task.request).load()
        assert found is not None
        assert found.next_step == state.next_step
        assert torch.equal(found.latents, state.latents)
        registry = ExpertsRegistry()
        pair, part = registry.get(task.experts), RunSlice(resume=found)
        ended = denoise(pair, task.request, part, policy=task.policy, device="cpu")
        registry.free()
        assert torch.equal(ended.latents, states[-1].latents)
    assert len(list(tmp_path.iterdir())) == 1, "the last one only"


def test_a_file_is_whole_and_on_disk_before_it_has_its_name(
    make_task: MakeTask, states_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, calls = make_task(), list[str]()
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("sync"), sync(handle)))
    monkeypatch.setattr(
        Path, "replace", lambda path, target: (calls.append("rename"), rename(path, target))[1]
    )
    first, second, *_ = states_of(task)
    run = saved_run(tmp_path, task.request)
    run.save(0, first)
    assert calls[:2] == ["sync", "rename"]
    monkeypatch.setattr(os, "fsync", full_disk)
    run.save(0, second)
    (found,) = saved_run(tmp_path, task.request).load()
    assert found is not None
    assert found.next_step == 1, "the former file is kept"
    assert len(list(tmp_path.iterdir())) == 1, "and no part of the new one"


def full_disk(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def not_json(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"next_step", b"next_stop"))


def of_another_solver(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"model_outputs", b"model_inputss"))


def past_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'next_step\\": 2', b'next_step\\": 9'))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [cut, zeroed, not_json, of_another_solver, past_the_end, a_folder]
)
def test_a_damaged_file_is_ignored_with_a_warning(
    damage: Callable[[Path], None],
    make_task: MakeTask,
    states_of: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = make_task()
    run = saved_run(tmp_path, task.request)
    run.save(0, states_of(task)[1])
    (file,) = tmp_path.iterdir()
    assert run.load() != [None]
    damage(file)
    assert run.load() == [None]
    assert f"the state {file} is ignored, and the run starts from its first step" in caplog.text


def test_a_state_of_other_size_or_without_finite_values_is_ignored(
    make_task: MakeTask, states_of: Any, tmp_path: Path
) -> None:
    task = make_task()
    run, state = saved_run(tmp_path, task.request), states_of(task)[1]
    for latents in (state.latents[..., :4], state.latents.double(), state.latents / 0):
        run.save(0, replace(state, latents=latents))
        assert run.load() == [None]


@pytest.mark.slow  # several loop runs
def test_states_of_a_part_are_no_states_of_another(
    make_task: MakeTask, states_of: Any, tmp_path: Path
) -> None:
    tasks = [make_task(seed=seed) for seed in (1, 2)]
    changes: list[str] = []
    run = SavedRun(tmp_path, [task.request for task in tasks], "inputs", changes.append)
    run.save(1, states_of(tasks[1])[2])
    first, second = run.load()
    assert first is None
    assert second is not None
    assert changes == ["continued from step 3 of an interrupted run in part 2 of 2"]
    assert SavedRun(tmp_path, [task.request for task in tasks], "others", ignore).load() == [
        None,
        None,
    ]
    run.save(1, states_of(tasks[1])[3])
    run.save(0, states_of(tasks[0])[3])
    assert [state and state.next_step for state in run.load()] == [None, 4], (
        "the last part ends with the run"
    )
    again = SavedRun(tmp_path, [task.request for task in tasks], "inputs", ignore)
    assert [state and state.next_step for state in again.load()] == [None, 4]
    again.save(0, states_of(tasks[0])[2])
    again.save(0, states_of(tasks[0])[3])
    assert [state and state.next_step for state in again.load()] == [3, 4], (
        "also if it is the last one left"
    )


@pytest.mark.parametrize(
    ("error", "kept"),
    [(None, False), (SamplingCancelled, False), (ValueError, True), (SystemExit, True)],
)
def test_states_are_kept_after_errors_only(
    error: type[BaseException] | None,
    kept: bool,
    make_task: MakeTask,
    states_of: Any,
    tmp_path: Path,
) -> None:
    task, folder = make_task(), tmp_path / "states"
    with (
        nullcontext() if error is None else pytest.raises(error),
        saved_run(folder, task.request) as run,
    ):
        run.save(0, states_of(task)[0])
        assert folder.exists()
        if error is not None:
            raise error(1, 0)
    assert folder.exists() == kept


def test_without_a_folder_nothing_is_saved(make_task: MakeTask, states_of: Any) -> None:
    task = make_task()
    with SavedRun(None, [task.request], (), ignore) as run:
        run.save(0, states_of(task)[0])
        assert run.load() == [None]


def test_the_digest_has_every_input_of_a_request(make_task: MakeTask) -> None:
    base = make_task(request={"solver": "euler"}).request
    noise = base.noise
    other: dict[str, Any] = {
        "noise": noise + 1,
        "positive": base.positive + 1,
        "negative": base.negative + 1,
        "image_condition": torch.zeros(1, 20, *noise.shape[2:]),
        "latent": torch.zeros_like(noise),
        "start_step": 1,
        "steps": 5,
        "solver": "dpm++",
        "schedule": "simple",
        "sigmas": (1.0, 0.9, 0.6, 0.3, 0.0),
        "flow_shift": 4.0,
        "boundary_ratio": 0.8,
        "switch_step": 1,
        "guidance": (4.0, 3.5),
        "mask": torch.ones(1, 1, *noise.shape[2:]),
        "end_step": 3,
        "leftover_noise": True,
        "add_noise": False,
        "latent_sigma": 0.5,
        "image_embedding": torch.zeros(1, 3, 1280),
        "guidance_steps": (4.0, 3.0, 2.0, 2.0),
        "cache": None,
        "nag": None,
        "windows": ContextWindows(frames=2, overlap=1),
        "tokens": ExtraTokens(reference=torch.zeros(1, 16, 1, *noise.shape[3:])),
        "negative_tokens": ExtraTokens(),
        "context_guidance": 2.0,
    }
    assert list(other) == list(base.keywords())
    digests = {run_digest(base)}
    for name, value in other.items():
        changed = changed_request(base)
        # The value need not fit the others.
        vars(changed)["keywords"] = partial(dict, {**base.keywords(), name: value})
        digests.add(run_digest(changed))
    assert len(digests) == len(other) - 1, "all but the two that are None here"
    assert run_digest(base) == run_digest(make_task(request={"solver": "euler"}).request)


def test_states_of_requests_that_were_one_flat_value_are_found(
    make_task: Callable[..., Any],
) -> None:
    request = make_task().request
    flat = make_dataclass("DenoiseRequest", request.keywords())
    assert run_digest(request) == run_digest(flat(**request.keywords()))


def test_values_that_look_alike_have_different_digests() -> None:
    values = [
        1,
        1.0,
        True,
        "1",
        "True",
        None,
        "None",
        (1,),
        ((1,),),
        (1, 2),
        (12,),
        ("1", "2"),
        ("12",),
        {"a": 1},
        [()],
    ]
    values += [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2).double(),
        torch.zeros(2).bfloat16(),
        torch.tensor(0.0),
    ]
    assert len({run_digest(value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="a function has no digest"):
        run_digest(ignore)


@pytest.mark.parametrize(
    ("ages_and_sizes", "removed"),
    [
        ([], []),
        ([(1.0, 5), (13.0, 5)], []),
        ([(1.0, 5), (15.0, 5)], ["1"]),
        ([(2.0, 10), (1.0, 1), (3.0, 1)], ["0", "2"]),
        ([(1.0, 11)], ["0"]),
    ],
)
def test_old_states_and_too_many_are_removed(
    ages_and_sizes: list[tuple[float, int]],
    removed: list[str],
    make_task: MakeTask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved_states, "MAX_BYTES", 10)
    paths = [tmp_path / f"part-{number}.safetensors" for number in range(len(ages_and_sizes))]
    for path, (days, nbytes) in zip(paths, ages_and_sizes, strict=True):
        path.write_bytes(bytes(nbytes))
        os.utime(path, (0, time.time() - days * DAY_S))
    saved_run(tmp_path, make_task().request).load()
    assert [str(number) for number, path in enumerate(paths) if not path.exists()] == removed


def test_a_run_removes_outdated_states_of_others_and_no_other_files(
    make_task: MakeTask, states_of: Any, tmp_path: Path
) -> None:
    names = [
        f"{'a' * 64}.safetensors",
        "part-x.safetensors",
        f"{'b' * 64}.safetensors",
        "old.txt",
        "model.safetensors",
    ]
    old, part, new, *foreign = (tmp_path / name for name in names)
    for path in (old, part, new, *foreign):
        path.write_bytes(b"x")
    for path in (old, part, *foreign):
        os.utime(path, (0, 0))
    assert saved_run(tmp_path, make_task().request).load() == [None]
    assert set(tmp_path.iterdir()) == {new, *foreign}


def test_a_batch_keeps_its_own_states_above_the_limit_of_a_folder(
    make_task: MakeTask, states_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_states, "MAX_BYTES", 1)
    tasks = [make_task(seed=seed) for seed in (1, 2)]
    batch = SavedRun(tmp_path, [task.request for task in tasks], (), ignore)
    for part, task in enumerate(tasks):
        batch.save(part, states_of(task)[1])
    assert [state and state.next_step for state in batch.load()] == [2, 2]
    assert saved_run(tmp_path, tasks[0].request, "another run").load() == [None]
    assert list(tmp_path.iterdir()) == []


def test_a_loaded_state_does_not_keep_its_file_open(
    make_task: MakeTask, states_of: Any, tmp_path: Path
) -> None:
    task = make_task()
    saved_run(tmp_path, task.request).save(0, states_of(task)[1])
    (found,) = saved_run(tmp_path, task.request).load()
    (file,) = tmp_path.iterdir()
    assert found is not None
    assert not found.latents.data_ptr() % 64
    if sys.platform == "linux":
        assert file.name not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_versions_of_files_follow_links_and_ignore_broken_ones(tmp_path: Path) -> None:
    component, pipeline = tmp_path / "component", tmp_path / "pipeline"
    for folder in (component, pipeline):
        folder.mkdir()
    weights, lora = component / "model.safetensors", tmp_path / "lora.sft"
    for file in (weights, lora):
        file.write_bytes(b"1")
    (pipeline / "transformer").symlink_to(component)
    (pipeline / "gone.safetensors").symlink_to(tmp_path / "gone")
    for file in (weights, lora):
        before = file_versions([pipeline, lora, tmp_path / "missing"])
        assert len(before) == 2
        os.utime(file, (0, 0))
        assert file_versions([pipeline, lora, tmp_path / "missing"]) != before
