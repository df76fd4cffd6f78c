"""Machine profile: kept, and used only where it holds."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from wanstream.devices import auto_dtype, dtype_name
from wanstream.devices.machine.available_ram import limited_groups
from wanstream.host import machine_profile as module
from wanstream.host.machine_profile import (
    FORMAT,
    Profile,
    load_machine_profile,
    measure_machine,
    profile_path,
    stored_machine,
)
from wanstream.plan import Machine
from wanstream.shapes import ExpertShape
from wanstream.wan.measurement import meter

CPU = torch.device("cpu")
TINY = ExpertShape(width=256, ffn_width=512, blocks=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "small.safetensors").write_bytes(os.urandom(1000))
    (folder / "diffusion_models").mkdir()
    (folder / "diffusion_models" / "large.safetensors").write_bytes(os.urandom(3_000_000))
    (folder / "larger.bin").write_bytes(os.urandom(4_000_000))
    return folder


@pytest.fixture(scope="module")
def measured(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return measure_machine(
        CPU, expert=TINY, tokens=300, models=models, folder=tmp_path_factory.mktemp("cache")
    )


@pytest.fixture
def kept(measured: Profile, tmp_path: Path) -> Path:
    """A cache folder with a copy of the profile, marked by an odd figure."""
    assert measured.kept_in is not None
    data = json.loads(measured.kept_in.read_text(encoding="utf-8"))
    data["machine"]["copy_bytes_per_s"] = 12345.0
    profile_path(CPU, tmp_path).write_text(json.dumps(data), encoding="utf-8")
    return tmp_path


@pytest.fixture
def measures_at_once(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every further measurement return `measured` at once."""
    monkeypatch.setattr(module, "_measured", lambda *_: measured.machine)


def _change(folder: Path, **changes: Any) -> None:
    path = profile_path(CPU, folder)
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8"
    )


def _identity(folder: Path) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(profile_path(CPU, folder).read_text(encoding="utf-8"))[
        "identity"
    ]
    return identity


def test_what_is_measured(measured: Profile, models: Path) -> None:
    machine = measured.machine
    assert (machine.vram_bytes, machine.bus) == (0, None)
    assert machine.origin == "measured here"
    assert machine.ram_bytes == min(
        [psutil.virtual_memory().total, *(group.limit for group in limited_groups())]
    ), "whatever of it is free"
    assert machine.name
    assert measured.notes[0] == "read: large.safetensors"
    assert measured.notes[1].startswith("disk: ")
    assert machine.block.linear_speedups.keys() == {"int8", "fp8"}
    assert machine.block.product_flops_per_s.keys() == {"", "int8", "fp8"}
    assert machine.block.attention_flops_per_s is not None
    assert [note.partition(": ")[0] for note in measured.notes[-3:]] == [
        dtype_name(auto_dtype(CPU)),
        "int8",
        "fp8",
    ]
    assert all("% of the device's limit (" in note for note in measured.notes[-3:])


def test_a_slow_device_measures_a_narrower_block(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "MOST_VISIT_S", 0.0)
    profile = measure_machine(CPU, expert=TINY, tokens=10, models=models, folder=tmp_path)
    assert profile.machine.block.linear_speedups.keys() == {"int8", "fp8"}
    assert profile.machine.block.product_flops_per_s == {}
    assert profile.machine.block.attention_flops_per_s is None
    assert all(note.endswith("), 64 tokens of width 128") for note in profile.notes[-3:])


@pytest.mark.slow
def test_fewer_tokens_than_wanted_are_told(models: Path, tmp_path: Path) -> None:
    profile = measure_machine(CPU, expert=TINY, tokens=10_000_000, models=models, folder=tmp_path)
    (told,) = (note for note in profile.notes if note.startswith("compute: measured with "))
    assert told.endswith(" tokens, extrapolated to 10000000 by operation count")


def test_what_was_measured_is_kept_whole(measured: Profile) -> None:
    assert measured.kept_in is not None
    data = json.loads(measured.kept_in.read_text(encoding="utf-8"))
    assert Machine.from_dict(data["machine"]) == measured.machine
    assert list(measured.kept_in.parent.iterdir()) == [measured.kept_in]


def test_a_kept_profile_is_used(kept: Path, models: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert (
        load_machine_profile(CPU, expert=TINY, models=models, folder=kept).copy_bytes_per_s
        == 12345.0
    )
    assert load_machine_profile(CPU, expert=TINY, folder=kept).copy_bytes_per_s == 12345.0, (
        "of whichever disk"
    )
    assert not caplog.records


def test_what_is_kept_can_be_asked_for_without_measuring(
    kept: Path, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place in (models, None):
        machine = stored_machine(CPU, expert=TINY, models=place, folder=kept)
        assert machine is not None
        assert machine.copy_bytes_per_s == 12345.0
    other = ExpertShape(width=512, ffn_width=512, blocks=2)
    assert stored_machine(CPU, expert=other, models=models, folder=kept) is None
    _change(kept, format=FORMAT + 1)
    before = profile_path(CPU, kept).read_bytes()
    assert stored_machine(CPU, expert=TINY, models=models, folder=kept) is None
    assert stored_machine(CPU, expert=TINY, models=models, folder=tmp_path / "nowhere") is None
    assert profile_path(CPU, kept).read_bytes() == before
    assert not (tmp_path / "nowhere").exists()
    assert not caplog.records, "nothing is measured again, so there is nothing to tell"


@pytest.mark.usefixtures("measures_at_once")
def test_room_is_made_only_where_something_is_measured(kept: Path, models: Path) -> None:
    asked = list[bool]()

    def make_room() -> None:
        asked.append(profile_path(CPU, kept).is_file())

    load_machine_profile(CPU, expert=TINY, models=models, folder=kept, make_room=make_room)
    assert asked == []
    profile_path(CPU, kept).unlink()
    load_machine_profile(CPU, expert=TINY, models=models, folder=kept, make_room=make_room)
    assert asked == [False], "before anything is measured and kept"


@pytest.mark.usefixtures("measures_at_once")
@pytest.mark.parametrize(
    "changed",
    [
        {"device": "RTX 9090"},
        {"ram_bytes": 1},
        {"disk": -1},
        {"block": [1, 2]},
        {"computes_in": "float8"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_profile_of_another_machine_is_told_and_measured_again(
    kept: Path, models: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    _change(kept, identity={**_identity(kept), **changed})
    with caplog.at_level(logging.WARNING):
        machine = load_machine_profile(CPU, expert=TINY, models=models, folder=kept)
    assert machine.copy_bytes_per_s != 12345.0
    (record,) = caplog.records
    assert "is of another machine" in record.getMessage()
    assert repr(changed[next(iter(changed))]) in record.getMessage()
    assert load_machine_profile(CPU, expert=TINY, models=models, folder=kept) == machine


@pytest.mark.usefixtures("measures_at_once")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 0}',
        '{"format": 1}',
        '{"format": 1, "machine": {}, "identity": {}}',
        "\0",
    ],
)
def test_what_is_no_profile_is_told_and_measured_again(
    kept: Path, models: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = profile_path(CPU, kept)
    path.write_text(text, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        machine = load_machine_profile(CPU, expert=TINY, models=models, folder=kept)
    assert "is not a machine profile" in caplog.records[0].getMessage()
    assert Machine.from_dict(json.loads(path.read_text(encoding="utf-8"))["machine"]) == machine


@pytest.mark.usefixtures("measures_at_once")
def test_bytes_that_are_no_text_are_measured_again(
    kept: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile_path(CPU, kept).write_bytes(b"\xff\xfe\x00")
    load_machine_profile(CPU, expert=TINY, models=models, folder=kept)
    assert "cannot be read" in caplog.records[0].getMessage()


def test_a_folder_that_takes_nothing_does_not_stop_a_run(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    profile = measure_machine(
        CPU, expert=TINY, tokens=300, models=models, folder=tmp_path / "file" / "cache"
    )
    assert profile.kept_in is None
    assert profile.machine.flops_per_s > 0
    assert "cannot write the machine profile" in caplog.records[0].getMessage()


def test_no_space_for_the_profile_leaves_the_old_one(
    kept: Path, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resource = pytest.importorskip("resource")
    path = profile_path(CPU, kept)
    before = path.read_text(encoding="utf-8")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, usual[1]))  # our files may have at most 10 bytes
    try:
        profile = measure_machine(CPU, expert=TINY, tokens=300, models=models, folder=kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert profile.kept_in is None
    assert "cannot write the machine profile" in caplog.records[0].getMessage()
    assert path.read_text(encoding="utf-8") == before
    assert list(kept.iterdir()) == [path]


def test_a_file_of_weights_may_be_named_itself(models: Path, tmp_path: Path) -> None:
    file = models / "small.safetensors"
    profile = measure_machine(CPU, expert=TINY, tokens=300, models=file, folder=tmp_path)
    assert profile.notes[0] == f"read: {file.name}"


@pytest.fixture
def scratch_folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of folders where temporary folders were made."""
    made: list[Path] = []
    original = tempfile.TemporaryDirectory

    def noted(*, prefix: str, dir: Path) -> tempfile.TemporaryDirectory[str]:
        made.append(dir)
        return original(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", noted)
    return made


NO_WEIGHTS = "read: a temporary file, because there is no file of weights to read"


@pytest.mark.slow
def test_without_weights_a_file_is_written_read_and_removed(
    tmp_path: Path, scratch_folders: list[Path]
) -> None:
    empty, cache = tmp_path / "models", tmp_path / "cache"
    empty.mkdir()
    profile = measure_machine(CPU, expert=TINY, tokens=300, models=empty, folder=cache)
    assert (profile.notes[0], scratch_folders) == (NO_WEIGHTS, [empty])
    assert list(empty.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="there the environment does not name the cache folder"
)
def test_without_a_folder_of_models_the_disk_of_the_cache_is_read(
    tmp_path: Path, scratch_folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files often lie in RAM, where a test file would show the fastest disk of all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile = measure_machine(CPU, expert=TINY, tokens=300)
    assert (profile.notes[0], scratch_folders) == (NO_WEIGHTS, [tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["wanstream"]
