"""Machine profile: kept, and used only where it holds."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from wanstream.devices import auto_dtype, dtype_name
from wanstream.devices.machine.available_ram import limited_groups
from wanstream.host import Profile, load_machine_profile, measure_machine
from wanstream.host import machine_profile as module
from wanstream.host.machine_profile import FORMAT, profile_path, stored_machine
from wanstream.plan import Machine
from wanstream.shapes import ExpertShape
from wanstream.tests.support.full_disk import largest_file
from wanstream.wan.measurement import meter

CPU = torch.device("cpu")
TINY = ExpertShape(width=256, ffn_width=512, blocks=2)
MARK = 12345.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "diffusion_models").mkdir()
    large = {"diffusion_models/large.safetensors": 3_000_000, "larger.bin": 4_000_000}
    for name, size in {"small.safetensors": 1000, **large}.items():
        (folder / name).write_bytes(os.urandom(size))
    return folder


def measure(**options) -> Profile:
    return measure_machine(CPU, **{"expert": TINY, "tokens": 300, **options})


@pytest.fixture(scope="module")
def measured(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter, "MOST_VISIT_S", math.inf)  # however busy this machine is
        return measure(models=models, folder=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def kept(measured: Profile, tmp_path: Path) -> Path:
    """A cache folder with a copy of the profile, marked by an odd figure."""
    assert measured.kept_in is not None
    data = json.loads(measured.kept_in.read_text(encoding="utf-8"))
    data["machine"]["copy_bytes_per_s"] = MARK
    profile_path(CPU, tmp_path).write_text(json.dumps(data), encoding="utf-8")
    return tmp_path


@pytest.fixture
def measures_at_once(measured: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every further measurement return `measured` at once."""
    monkeypatch.setattr(module, "_measured", lambda *_: measured.machine)


def load(folder: Path, models: Path | None = None, **options) -> Machine:
    return load_machine_profile(CPU, expert=TINY, models=models, folder=folder, **options)


def _change(folder: Path, identity=None, **changes) -> None:
    path = profile_path(CPU, folder)
    data = json.loads(path.read_text(encoding="utf-8"))
    data |= {**changes, "identity": {**data["identity"], **(identity or {})}}
    path.write_text(json.dumps(data), encoding="utf-8")


def test_measured_figures_are_kept(measured):
    machine = measured.machine
    assert (machine.vram_bytes, machine.bus, machine.origin) == (0, None, "measured here")
    limits = [psutil.virtual_memory().total, *(group.limit for group in limited_groups())]
    assert machine.ram_bytes == min(limits), "whatever of it is free"
    assert machine.name
    assert measured.notes[0] == "read: large.safetensors"
    assert measured.notes[1].startswith("disk: ")
    assert machine.block.linear_speedups.keys() == {"int8", "fp8"}
    assert machine.block.product_flops_per_s.keys() == {"", "int8", "fp8"}
    assert machine.block.attention_flops_per_s is not None
    formats = [note.partition(": ")[0] for note in measured.notes[-3:]]
    assert formats == [dtype_name(auto_dtype(CPU)), "int8", "fp8"]
    assert all("% of the device's limit (" in note for note in measured.notes[-3:])
    assert measured.kept_in is not None
    data = json.loads(measured.kept_in.read_text(encoding="utf-8"))
    assert Machine.from_dict(data["machine"]) == machine
    assert list(measured.kept_in.parent.iterdir()) == [measured.kept_in]


def test_slow_device_measures_a_narrower_block(models, tmp_path, monkeypatch):
    """A file of weights may be named itself."""
    monkeypatch.setattr(meter, "MOST_VISIT_S", 0.0)
    profile = measure(tokens=10, models=models / "small.safetensors", folder=tmp_path)
    assert profile.notes[0] == "read: small.safetensors"
    assert profile.machine.block.linear_speedups.keys() == {"int8", "fp8"}
    assert profile.machine.block.product_flops_per_s == {}
    assert profile.machine.block.attention_flops_per_s is None
    assert all(note.endswith("), 64 tokens of width 128") for note in profile.notes[-3:])


@pytest.mark.slow
def test_fewer_tokens_than_wanted_are_noted(models, tmp_path):
    profile = measure(tokens=10_000_000, models=models, folder=tmp_path)
    (note,) = (note for note in profile.notes if note.startswith("compute: measured with "))
    assert note.endswith(" tokens, extrapolated to 10000000 by operation count")


def test_kept_profile_is_used_without_measuring(kept, models, caplog):
    for place in (models, None):  # whichever disk
        assert load(kept, place).copy_bytes_per_s == MARK
        machine = stored_machine(CPU, expert=TINY, models=place, folder=kept)
        assert machine is not None
        assert machine.copy_bytes_per_s == MARK
    other = ExpertShape(width=512, ffn_width=512, blocks=2)
    assert stored_machine(CPU, expert=other, models=models, folder=kept) is None
    _change(kept, format=FORMAT + 1)
    before = profile_path(CPU, kept).read_bytes()
    nowhere = kept / "nowhere"
    for folder in (kept, nowhere):
        assert stored_machine(CPU, expert=TINY, models=models, folder=folder) is None
    assert profile_path(CPU, kept).read_bytes() == before
    assert not nowhere.exists()
    assert not caplog.records, "nothing is measured again, so there is nothing to report"


@pytest.mark.usefixtures("measures_at_once")
def test_room_is_made_only_before_a_measurement(kept, models):
    asked = list[bool]()

    def make_room() -> None:
        asked.append(profile_path(CPU, kept).is_file())

    load(kept, models, make_room=make_room)
    assert asked == []
    profile_path(CPU, kept).unlink()
    load(kept, models, make_room=make_room)
    assert asked == [False], "before anything is measured and kept"


CHANGED = {"device": "RTX 9090", "ram_bytes": 1, "disk": -1, "block": [1, 2]}


@pytest.mark.usefixtures("measures_at_once")
@pytest.mark.parametrize(("name", "value"), [*CHANGED.items(), ("computes_in", "float8")])
def test_profile_of_another_machine_is_measured_again(kept, models, caplog, name, value):
    _change(kept, identity={name: value})
    with caplog.at_level(logging.WARNING):
        machine = load(kept, models)
    assert machine.copy_bytes_per_s != MARK
    (record,) = caplog.records
    assert "is of another machine" in record.getMessage()
    assert repr(value) in record.getMessage()
    assert load(kept, models) == machine


EMPTY = b'{"format": 1, "machine": {}, "identity": {}}'
NO_PROFILES = [b"", b"{", b"[]", b"null", b'{"format": 0}', b'{"format": 1}', EMPTY, b"\0"]


@pytest.mark.usefixtures("measures_at_once")
@pytest.mark.parametrize("content", [*NO_PROFILES, b"\xff\xfe\x00"])
def test_unreadable_profile_is_measured_again(kept, models, caplog, content):
    path = profile_path(CPU, kept)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        machine = load(kept, models)
    said = "cannot be read" if b"\xff" in content else "is not a machine profile"
    assert said in caplog.records[0].getMessage()
    assert Machine.from_dict(json.loads(path.read_text(encoding="utf-8"))["machine"]) == machine


@pytest.mark.usefixtures("measures_at_once")
def test_profile_that_cannot_be_written_stops_no_run(kept, models, caplog):
    path = profile_path(CPU, kept)
    assert measure(models=models, folder=path / "cache").kept_in is None
    before = path.read_text("utf-8")
    with largest_file(10):
        profile = measure(models=models, folder=kept)
    assert (profile.kept_in, path.read_text("utf-8")) == (None, before)
    assert list(kept.iterdir()) == [path]
    for record in caplog.records:
        assert "cannot write the machine profile" in record.getMessage()
    assert len(caplog.records) == 2


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="there the environment does not name the cache folder"
)
def test_without_weights_a_file_on_the_same_disk_is_read(tmp_path, monkeypatch):
    """Temporary files often lie in RAM, where a test file would show the fastest disk of all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    empty = tmp_path / "models"
    empty.mkdir()
    (tmp_path / "home").mkdir()
    made = Mock(wraps=tempfile.TemporaryDirectory)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", made)
    profiles = [measure(models=empty, folder=tmp_path / "cache"), measure()]
    read = "read: a temporary file, because there is no file of weights to read"
    assert [profile.notes[0] for profile in profiles] == [read, read]
    assert [each.kwargs["dir"] for each in made.call_args_list] == [empty, tmp_path / "home"]
    assert list(empty.iterdir()) == []
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["wanstream"]
