"""States on disk: a run with the same inputs finds them, any other ignores them."""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from wanstream.sampling import SavedRun, file_versions, run_digest, saved_states
from wanstream.sampling.steps import SOLVERS, RunSlice, RunState, SamplingCancelled
from wanstream.tests.support.sampling.runs import changed_request, run
from wanstream.wan.experts.open import ExpertsRegistry


def ignore(change: str) -> None:
    return


def saved_run(folder, *requests, inputs=(), report=ignore):
    return SavedRun(folder, requests, inputs, report)


def next_steps(states):
    return [state and state.next_step for state in states]


@pytest.fixture(scope="module")
def computed():
    """States by request digest, computed by the first test to need them."""
    return {}


@pytest.fixture
def states_of(computed):
    """`states_of(task)`: the states after all steps."""

    def states_of(task):
        key = run_digest(task.request)
        if key not in computed:
            states = list[RunState]()
            registry = ExpertsRegistry()
            pair = registry.get(task.experts)
            run(pair, task.request, task.policy, on_step=lambda step: states.append(step.state()))
            registry.free()
            computed[key] = states
        return computed[key]

    return states_of


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_loaded_state_is_the_saved_one(solver, make_task, states_of, tmp_path):
    task = make_task(request={"solver": solver, "steps": 6, "switch_step": 3})
    for state in states_of(task)[:-1]:
        saved_run(tmp_path, task.request).save(0, state)
        (found,) = saved_run(tmp_path, task.request).load()
        assert run_digest(vars(found)) == run_digest(vars(state))
    assert len(list(tmp_path.iterdir())) == 1, "the last one only"


def test_a_run_continued_from_a_file_gives_the_same_bits(make_task, states_of, tmp_path):
    """The solver shifts lists in the history in place."""
    task = make_task(request={"solver": "unipc", "steps": 6, "switch_step": 3})
    states = states_of(task)
    saved_run(tmp_path, task.request).save(0, states[2])
    (found,) = saved_run(tmp_path, task.request).load()
    registry = ExpertsRegistry()
    pair = registry.get(task.experts)
    ended = run(pair, task.request, task.policy, part=RunSlice(resume=found))
    registry.free()
    assert torch.equal(ended.latents, states[-1].latents)


def test_a_file_is_on_disk_before_it_has_its_name(make_task, states_of, tmp_path, monkeypatch):
    task = make_task()
    calls = list[str]()
    sync = os.fsync
    rename = Path.replace

    def synced(handle: int) -> None:
        calls.append("sync")
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    def full_disk(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    first, second, *_ = states_of(task)
    saved = saved_run(tmp_path, task.request)
    saved.save(0, first)
    assert calls[:2] == ["sync", "rename"]
    monkeypatch.setattr(os, "fsync", full_disk)
    saved.save(0, second)
    assert next_steps(saved_run(tmp_path, task.request).load()) == [1], "the former file is kept"
    assert len(list(tmp_path.iterdir())) == 1, "and no part of the new one"


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def changed_bytes(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


DAMAGES = {
    "cut": changed_bytes(lambda data: data[:-100]),
    "zeroed": changed_bytes(lambda data: bytes(len(data))),
    "another key": changed_bytes(lambda data: data.replace(b"next_step", b"next_stop")),
    "another solver": changed_bytes(lambda data: data.replace(b"model_outputs", b"model_inputss")),
    "past the end": changed_bytes(lambda old: old.replace(b'next_step\\": 2', b'next_step\\": 9')),
    "a folder": a_folder,
}


def test_a_damaged_file_is_ignored_with_a_warning(make_task, states_of, tmp_path, caplog):
    task = make_task()
    saved = saved_run(tmp_path, task.request)
    for name, damage in DAMAGES.items():
        saved.save(0, states_of(task)[1])
        (file,) = tmp_path.iterdir()
        assert saved.load() != [None]
        damage(file)
        assert saved.load() == [None], name
    assert f"the state {file} is ignored, and the run starts from its first step" in caplog.text


def test_unusable_latents_are_ignored(make_task, states_of, tmp_path):
    task = make_task()
    saved = saved_run(tmp_path, task.request)
    state = states_of(task)[1]
    for latents in (state.latents[..., :4], state.latents.double(), state.latents / 0):
        saved.save(0, replace(state, latents=latents))
        assert saved.load() == [None]


@pytest.mark.slow  # several loop runs
def test_states_of_a_part_are_no_states_of_another(make_task, states_of, tmp_path):
    tasks = [make_task(seed=seed) for seed in (1, 2)]
    changes = list[str]()
    first, second = (states_of(task) for task in tasks)
    batch = partial(saved_run, tmp_path, *(task.request for task in tasks))
    saved = batch(inputs="inputs", report=changes.append)
    saved.save(1, second[2])
    assert next_steps(saved.load()) == [None, 3]
    assert changes == ["continued from step 3 of an interrupted run in part 2 of 2"]
    assert batch(inputs="others").load() == [None, None]
    saved.save(1, second[3])
    saved.save(0, first[3])
    assert next_steps(saved.load()) == [None, 4], "the last part ends with the run"
    again = batch(inputs="inputs")
    assert next_steps(again.load()) == [None, 4]
    again.save(0, first[2])
    again.save(0, first[3])
    assert next_steps(again.load()) == [3, 4], "also if it is the last one left"


@pytest.mark.parametrize(
    ("error", "kept"),
    [(None, False), (SamplingCancelled, False), (ValueError, True), (SystemExit, True)],
)
def test_states_are_kept_after_errors_only(error, kept, make_task, states_of, tmp_path):
    task = make_task()
    folder = tmp_path / "states"
    expected = nullcontext() if error is None else pytest.raises(error)
    with expected, saved_run(folder, task.request) as saved:
        saved.save(0, states_of(task)[0])
        assert folder.exists()
        if error is not None:
            raise error(1, 0)
    assert folder.exists() == kept


def test_without_a_folder_nothing_is_saved(make_task, states_of):
    task = make_task()
    with saved_run(None, task.request) as saved:
        saved.save(0, states_of(task)[0])
        assert saved.load() == [None]


def test_the_digest_has_every_input_of_a_request(make_task):
    base = make_task(request={"solver": "euler"}).request
    digests = {run_digest(base)}
    for name in base.keywords():
        changed = changed_request(base)
        vars(changed)["keywords"] = partial(dict, {**base.keywords(), name: "another value"})
        digests.add(run_digest(changed))
    assert len(digests) == len(base.keywords()) + 1
    assert run_digest(base) == run_digest(make_task(request={"solver": "euler"}).request)
    flat = make_dataclass("DenoiseRequest", base.keywords())  # a request was once one flat value
    assert run_digest(base) == run_digest(flat(**base.keywords()))


def test_values_that_look_alike_have_different_digests():
    values = [1, 1.0, True, "1", "True", None, "None", {"a": 1}, [()]]
    values += [(1,), ((1,),), (1, 2), (12,), ("1", "2"), ("12",)]
    zeros = torch.zeros(2)
    values += [
        zeros,
        zeros + 1,
        zeros[:, None],
        zeros.double(),
        zeros.bfloat16(),
        torch.tensor(0.0),
    ]
    assert len({run_digest(value) for value in values}) == len(values)
    with pytest.raises(TypeError, match="a function has no digest"):
        run_digest(ignore)


@pytest.mark.parametrize(
    ("stored", "removed"),
    [
        ([], []),
        ([(1.0, 5), (13.0, 5)], []),
        ([(1.0, 5), (15.0, 5)], ["1"]),
        ([(2.0, 10), (1.0, 1), (3.0, 1)], ["0", "2"]),
        ([(1.0, 11)], ["0"]),
    ],
)
def test_old_states_and_too_many_are_removed(stored, removed, make_task, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_states, "MAX_BYTES", 10)
    paths = [tmp_path / f"part-{number}.safetensors" for number in range(len(stored))]
    for path, (days, nbytes) in zip(paths, stored, strict=True):
        path.write_bytes(bytes(nbytes))
        os.utime(path, (0, time.time() - days * 86400))
    saved_run(tmp_path, make_task().request).load()
    assert [str(number) for number, path in enumerate(paths) if not path.exists()] == removed


def test_outdated_states_are_removed(make_task, tmp_path):
    old = f"{'a' * 64}.safetensors"
    part = "part-x.safetensors"
    new = f"{'b' * 64}.safetensors"
    for name in (old, part, new, "old.txt", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
        if name != new:
            os.utime(tmp_path / name, (0, 0))
    assert saved_run(tmp_path, make_task().request).load() == [None]
    assert {path.name for path in tmp_path.iterdir()} == {new, "old.txt", "model.safetensors"}


def test_a_batch_keeps_its_own_states_above_the_limit(make_task, states_of, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_states, "MAX_BYTES", 1)
    tasks = [make_task(seed=seed) for seed in (1, 2)]
    batch = saved_run(tmp_path, *(task.request for task in tasks))
    for part, task in enumerate(tasks):
        batch.save(part, states_of(task)[1])
    assert next_steps(batch.load()) == [2, 2]
    assert saved_run(tmp_path, tasks[0].request, inputs="another run").load() == [None]
    assert list(tmp_path.iterdir()) == []


def test_a_loaded_state_does_not_keep_its_file_open(make_task, states_of, tmp_path):
    task = make_task()
    saved_run(tmp_path, task.request).save(0, states_of(task)[1])
    (found,) = saved_run(tmp_path, task.request).load()
    (file,) = tmp_path.iterdir()
    assert not found.latents.data_ptr() % 64
    if sys.platform == "linux":
        assert file.name not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_versions_of_files_follow_links_and_ignore_broken_ones(tmp_path):
    component = tmp_path / "component"
    pipeline = tmp_path / "pipeline"
    for folder in (component, pipeline):
        folder.mkdir()
    weights = component / "model.safetensors"
    lora = tmp_path / "lora.sft"
    for file in (weights, lora):
        file.write_bytes(b"1")
    (pipeline / "transformer").symlink_to(component)
    (pipeline / "gone.safetensors").symlink_to(tmp_path / "gone")
    paths = [pipeline, lora, tmp_path / "missing"]
    for file in (weights, lora):
        before = file_versions(paths)
        assert len(before) == 2
        os.utime(file, (0, 0))
        assert file_versions(paths) != before
