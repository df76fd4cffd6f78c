"""Foreign things in a batch's working folder and next to the journal: refused, never followed."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from wanstream.batch.folder import own_files
from wanstream.batch.folder.names import is_made_name, is_of_journal, name_key, stem_fault
from wanstream.batch.folder.own_files import ForeignFileError, check_work_folder
from wanstream.batch.journal.journal import Journal, check_journal
from wanstream.batch.output_store import OutputStore

if sys.platform == "win32":
    pytest.skip("links and pipes are those of POSIX", allow_module_level=True)

from wanstream.tests.faults.foreign import FOREIGN, Outside, foreign_thing, of_another_user

OWN = [
    number
    for number, (place, _) in enumerate(FOREIGN)
    if not place.endswith("00004.mp4") or "/" in place
]


def check(out: Path) -> None:
    check_work_folder(out)
    check_journal(out / "journal.sqlite")


def finished(out: Path) -> Path:
    out.mkdir()
    OutputStore(out)
    for name in (
        "lock",
        "lock-journal",
        "parts/00001~2.mp4",
        "states/part-x.safetensors",
        "made/some-id/video/x.mp4",
    ):
        (out / ".wanstream" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / ".wanstream" / name).touch()
    Journal(out / "journal.sqlite", workflow="w").__exit__(None, None, None)
    return out


def test_what_a_batch_leaves_is_its_own(tmp_path: Path) -> None:
    out = finished(tmp_path / "out")
    check(out)
    os.link(
        out / ".wanstream" / "made" / "some-id" / "video" / "x.mp4",
        out / ".wanstream" / "parts" / "00003.mp4",
    )
    os.link(
        out / ".wanstream" / "parts" / "00003.mp4", out / "00003.mp4"
    )  # as by an actor killed meanwhile
    check(out)
    (tmp_path / "link").symlink_to(out, target_is_directory=True)
    check(tmp_path / "link")  # the user's choice, as is everything above the output folder


@pytest.mark.parametrize(
    "number", OWN, ids=[f"{FOREIGN[number][0]} {FOREIGN[number][1].__name__}" for number in OWN]
)
def test_a_foreign_thing_is_refused_by_its_name(tmp_path: Path, number: int) -> None:
    if FOREIGN[number][1] is of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    out, outside = finished(tmp_path / "out"), Outside(tmp_path / "outside")
    with foreign_thing(out, number, outside) as path:
        with pytest.raises(ForeignFileError) as met:
            check(out)
        first, _, folder = str(met.value).partition("\n")
        assert path.name in str(met.value)
        assert "move it away" in first
        assert str(out) in folder
        assert outside.touched == []
    check(out)


HARMLESS = (
    ".DS_Store",
    "Thumbs.db",
    "desktop.ini",
    "._00001.mp4",
    "._lock",
    ".nfs000000000a1",
    ".directory",
)
HARMLESS_FOLDERS = ("@eaDir", ".@__thumb")


def test_files_of_file_managers_are_left_alone(tmp_path: Path) -> None:
    out = finished(tmp_path / "out")
    places = [
        out / ".wanstream" / place
        for place in ("", "parts", "made", "made/some-id/video", "states")
    ]
    kept = [place / name for place in places for name in HARMLESS]
    kept += [
        place / name / "00001.mp4" / "x.latent" for place in places for name in HARMLESS_FOLDERS
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    os.link(kept[0], out / "twin")  # never written, so other names do not matter
    check(out)
    store = OutputStore(out)
    assert store.remove_leftovers(lambda prompt_id: None) == []
    store.clear_parts()
    own = {
        out / ".wanstream" / name for name in ("lock", "lock-journal", "states/part-x.safetensors")
    }
    assert {path for path in (out / ".wanstream").rglob("*") if path.is_file()} == {*kept, *own}


@pytest.mark.parametrize("place", ["", "parts"])
@pytest.mark.parametrize("name", [*HARMLESS, *HARMLESS_FOLDERS])
def test_a_link_or_another_kind_with_their_name_is_refused(
    tmp_path: Path, name: str, place: str
) -> None:
    out = finished(tmp_path / "out")
    path = out / ".wanstream" / place / name
    other = Path.touch if name in HARMLESS_FOLDERS else Path.mkdir
    makes = (
        other,
        os.mkfifo,
        lambda each: each.symlink_to(out),
        lambda each: each.symlink_to(out / "lost"),
    )
    for number, make in enumerate(makes):
        make(path)
        with pytest.raises(ForeignFileError, match=name):
            check(out)
        path.rename(tmp_path / f"aside-{number}")


def test_a_drive_that_maps_users_is_no_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = finished(tmp_path / "out")
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    trust = own_files._trust(out)
    assert trust is not None
    assert trust.owner_of_new_files == os.geteuid()
    for path in (*out.rglob("*"), out / "journal.sqlite"):
        os.chown(path, 65534, -1)
    with pytest.raises(ForeignFileError, match="belongs to another user"):
        check(out)
    monkeypatch.setattr(own_files._Trust, "owner_of_new_files", 65534)
    check(out)


@pytest.mark.parametrize("folder", [False, True])
def test_only_a_folder_on_another_device_is_mounted(tmp_path: Path, folder: bool) -> None:
    path = finished(tmp_path / "out") / ".wanstream" / ("parts" if folder else "lock")
    found = [*os.lstat(path)]
    found[stat.ST_DEV] += 1  # as a file in an overlay has its layer's device
    trust = own_files._trust(tmp_path)
    assert trust is not None
    fault = trust._fault(path, os.stat_result(found), folder=folder, names=1)
    assert fault == ("is on another file system (mounted)" if folder else "")


@pytest.mark.parametrize(
    "name", ["shot", "00001", "é 1", "console", "com10", "a.con", "journal 2", "x" * 100, "v1.5"]
)
def test_names_of_rows(name: str) -> None:
    assert stem_fault(name) is None
    assert not is_of_journal(name, "journal.sqlite")
    assert is_made_name(f"{name}.mp4")
    assert is_made_name(f"{name}~12.png", stem=name)


def test_names_of_one_file_are_equal() -> None:
    assert name_key("É") == name_key("E\u0301") == name_key("é")
    assert [is_of_journal(name, "j") for name in ("j", "J-wal", "j.lock", "jx", "x")] == [
        True,
        True,
        True,
        False,
        False,
    ]
