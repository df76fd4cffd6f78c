"""Foreign things in a batch's working folder and next to the journal: refused, never followed."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from wanstream.batch.folder import own_files
from wanstream.batch.folder.names import is_made_name, is_of_journal, name_key, stem_fault
from wanstream.batch.folder.own_files import ForeignFileError, check_work_folder
from wanstream.batch.journal.journal import Journal, check_journal
from wanstream.batch.output_store import OutputStore

if sys.platform == "win32":
    pytest.skip("links and pipes are those of POSIX", allow_module_level=True)

from wanstream.tests.support.batch import foreign

KINDS = {make for _, makes in foreign.PLACES for make in makes}
KEPT = ("lock", "lock-journal", "states/part-x.safetensors")
VIDEO = "made/some-id/video/x.mp4"
HARMLESS = (".DS_Store", "Thumbs.db", "desktop.ini", "._1.mp4", "._lock", ".nfs0a1", ".directory")
HARMLESS_FOLDERS = ("@eaDir", ".@__thumb")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def check(out: Path) -> None:
    check_work_folder(out)
    check_journal(out / "journal.sqlite")


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder as a batch leaves it."""
    folder = tmp_path / "out"
    folder.mkdir()
    OutputStore(folder)
    for name in (*KEPT, "parts/00001~2.mp4", VIDEO):
        touch(folder / ".wanstream" / name)
    Journal(folder / "journal.sqlite", workflow="w").__exit__(None, None, None)
    return folder


def test_what_a_batch_leaves_is_its_own(out, tmp_path):
    check(out)
    part = out / ".wanstream" / "parts" / "00003.mp4"
    os.link(out / ".wanstream" / VIDEO, part)
    os.link(part, out / "00003.mp4")  # as by an actor killed meanwhile
    check(out)
    (tmp_path / "link").symlink_to(out, target_is_directory=True)
    check(tmp_path / "link")  # the user's choice, as is everything above the output folder


@pytest.mark.parametrize("make", sorted(KINDS, key=lambda make: make.__name__))
def test_a_foreign_thing_is_refused_by_its_name(out, tmp_path, make):
    if make is foreign.of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    outside = foreign.Outside(tmp_path / "outside")
    for place in (place for place, makes in foreign.PLACES if make in makes):
        with foreign.foreign_thing(out, place, make, outside) as path:
            with pytest.raises(ForeignFileError) as met:
                check(out)
            first, _, folder = str(met.value).partition("\n")
            assert path.name in str(met.value)
            assert "move it away" in first
            assert str(out) in folder
            assert outside.touched == []
        check(out)


@pytest.mark.parametrize("name", [".wanstream", ".wanstream/made"])
def test_a_file_in_place_of_a_folder_is_refused(out, name):
    shutil.rmtree(out / name)
    touch(out / name)
    with pytest.raises(ForeignFileError, match=f"'{Path(name).name}' is not a folder"):
        check(out)


def test_files_of_file_managers_are_left_alone(out):
    work = out / ".wanstream"
    places = ("", "parts", "made", "made/some-id/video", "states")
    names = [*HARMLESS, *(f"{name}/00001.mp4/x.latent" for name in HARMLESS_FOLDERS)]
    kept = [touch(work / place / name) for place in places for name in names]
    os.link(kept[0], out / "twin")  # never written, so other names do not matter
    check(out)
    store = OutputStore(out)
    assert store.remove_leftovers(lambda prompt_id: None) == []
    store.clear_parts()
    left = {path for path in work.rglob("*") if path.is_file()}
    assert left == {*kept, *(work / name for name in KEPT)}


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, ("", "parts")[at % 2]) for at, name in enumerate((*HARMLESS, *HARMLESS_FOLDERS))],
)
def test_a_link_or_another_kind_with_a_harmless_name_is_refused(out, tmp_path, name, place):
    path = out / ".wanstream" / place / name
    makes = (
        Path.touch if name in HARMLESS_FOLDERS else Path.mkdir,
        os.mkfifo,
        lambda each: each.symlink_to(out),
        lambda each: each.symlink_to(out / "lost"),
    )
    for number, make in enumerate(makes):
        make(path)
        with pytest.raises(ForeignFileError, match=name):
            check(out)
        path.rename(tmp_path / f"aside-{number}")


@AS_ROOT
def test_a_drive_that_maps_users_is_no_other_users(out, monkeypatch):
    assert own_files._trust(out).owner_of_new_files == os.geteuid()
    for path in (*out.rglob("*"), out / "journal.sqlite"):
        os.chown(path, 65534, -1)
    with pytest.raises(ForeignFileError, match="belongs to another user"):
        check(out)
    monkeypatch.setattr(own_files._Trust, "owner_of_new_files", 65534)
    check(out)


@pytest.mark.parametrize(("name", "mounted"), [("lock", False), ("parts", True)])
def test_only_a_folder_on_another_device_is_mounted(out, name, mounted):
    path = out / ".wanstream" / name
    found = [*os.lstat(path)]
    found[stat.ST_DEV] += 1  # as a file in an overlay has its layer's device
    trust = own_files._trust(out.parent)
    fault = trust._fault(path, os.stat_result(found), folder=mounted, names=1)
    assert fault == "is on another file system (mounted)" * mounted


@AS_ROOT
@pytest.mark.parametrize("name", ["parts", "made", "made/some-id"])
def test_a_mounted_folder_is_refused(out, tmp_path, name):
    path = out / ".wanstream" / name
    outside = foreign.Outside(tmp_path / "outside")
    with ExitStack() as mount:
        try:
            mount.enter_context(foreign.mounted(path, outside))
        except OSError as err:
            pytest.skip(f"a folder cannot be mounted: {err}")
        with pytest.raises(ForeignFileError, match=rf"{path.name}' .*\(mounted\)"):
            check(out)


@pytest.mark.parametrize(
    "name", ["shot", "00001", "é 1", "console", "com10", "a.con", "journal 2", "x" * 100, "v1.5"]
)
def test_names_of_rows(name):
    assert stem_fault(name) is None
    assert not is_of_journal(name, "journal.sqlite")
    assert is_made_name(f"{name}.mp4")
    assert is_made_name(f"{name}~12.png", stem=name)


DEVICES = ["con", "AUX", "nul.x", "aux .x", "com1", "COM\u00b9", "lpt\u00b3.mp4"]
SIGNS = ["a:b", "x.", ".", "..", "a/b", "a\\b", "x~1", "e\u0301", "\u202ex", "-x", "/x", "*", "?"]
SPACES = ["x ", " x", "x\ny", "x\0y", "", "x" * 101]


@pytest.mark.parametrize("name", [*DEVICES, *SIGNS, *SPACES])
def test_a_name_that_is_none_on_some_system_is_refused(name):
    assert stem_fault(name)


def test_names_of_one_file_are_equal():
    assert name_key("É") == name_key("E\u0301") == name_key("é")
    names = ("j", "J-wal", "j.lock", "jx", "x")
    assert [is_of_journal(name, "j") for name in names] == [True, True, True, False, False]
