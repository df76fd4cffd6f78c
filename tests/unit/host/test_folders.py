"""Names from a workflow never lead out of their folders."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.workflow.validate import Socket, listed_choice
from wanstream.host.folders import (
    GGUF_FILES,
    CachedFileNames,
    ModelNotFoundError,
    OutputNameError,
    OutsideFolderError,
    check_output,
    diffusers_folders,
    find_model,
    inside,
    output_file,
    weight_files,
)
from wanstream.tests.support.embedded import embedded_host

OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "..", ".", "", "a/..", "../top-twin/x"]


def _touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutsideFolderError, match="leaves the folder"):
        inside(tmp_path / "top", name)


@pytest.mark.parametrize("name", ["x", "a/x", "a/../x", "./x", "..x", "a b/x.y"])
def test_a_name_below_the_folder_is_taken(tmp_path: Path, name: str) -> None:
    assert (tmp_path / "top") in inside(tmp_path / "top", name).parents


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_output_outside_the_output_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutsideFolderError):
        output_file(tmp_path / "top", name, "mp4", width=0, height=0)
    assert not list(tmp_path.rglob("*")), "a refused name left something behind"


IMPOSSIBLE = {
    "NUL": ("video/a\0b", "NUL character"),
    "half a character": ("a\ud800", "a lone surrogate at index 1"),
    "a device": ("aux/x", "'aux' is a device name on Windows"),
    "a device with a suffix": ("video/Con.mp4", "'Con.mp4' is a device name"),
    "a stream": ("a:b", "contains ':', which no name on Windows can: remove it"),
    "a drive": ("C:\\video\\x", "'C:' contains ':'"),
    "a question": ("why?/x", r"contains '\?'"),
    "a line feed": ("a\nb", "contains '.n'"),
    "a folder with a dot": ("video./x", "'video.' ends with a dot or a space"),
    "a folder with a space": ("video /x", "'video ' ends with a dot or a space"),
    "a device behind another slash": ("video\\nul\\x", "'nul' is a device name"),
    "a long name": ("x" * 300, "has 300 bytes, and the limit is 232: shorten it"),
    "a long name in another script": ("\u5bb6" * 80, "has 240 bytes, and the limit is 232"),
    "a long folder": (f"{'y' * 256}/x", "has 256 bytes, and the limit is 255"),
    "a long path": (f"{'y' * 200}/" * 25 + "x", "the path has"),
    "many folders": ("a/" * 2000 + "x", "has 2000 folders, and the limit is 100: use fewer"),
    "folders and back": ("a/b/../" * 101 + "x", "has 101 folders"),
    "a folder too many": ("a/" * 101 + "x", "has 101 folders"),
    "a file for a folder": ("there/x", "there is not a folder"),
    "a file further up": ("there/sub/sub/x", "there is not a folder"),
    "a link that leads nowhere": ("dangling/x", "dangling is not a folder"),
    "a folder that must not be written": ("locked/sub/x", "is not writable"),
}


@pytest.mark.parametrize(("prefix", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_name_under_which_nothing_can_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, reason: str
) -> None:
    output = tmp_path / "output"
    _touch(output / "there")
    (output / "dangling").symlink_to(tmp_path / "gone")
    (output / "locked").mkdir()
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != output / "locked")
    before = sorted(output.rglob("*"))
    with pytest.raises(OutputNameError, match=reason) as refused:
        check_output(output, prefix)
    assert len(str(refused.value)) < 400 + len(str(output))
    assert sorted(output.rglob("*")) == before


@pytest.mark.parametrize(
    "prefix",
    [
        "a/" * 100 + "x",
        "./" * 1000 + "x",
        "a/../" * 400 + "x",
        "x",
        "video/x",
        "a/b/c/x",
        "%width%x%height%/%year%",
        "x" * 232,
        "\u5bb6/\u5bb6",
        "link/x",
        ".hidden/..x/console.x",
        "clip ",
        "video/clip.",
        "aux",
        "video/com1/",
    ],
)
def test_a_name_that_is_not_refused_can_be_written(tmp_path: Path, prefix: str) -> None:
    output = tmp_path / "not there" / "output"
    (tmp_path / "elsewhere").mkdir()
    if prefix.startswith("link"):
        output.mkdir(parents=True)
        (output / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    check_output(output, prefix)
    file = output_file(output, prefix, "mp4", width=1, height=1)
    file.path.with_name(f"{file.path.name}.part").touch()


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    _touch(tmp_path / "disk")
    with pytest.raises(OutputNameError, match="disk is not a folder"):
        check_output(tmp_path / "disk" / "output", "video/x")


def test_output_files_are_counted_per_prefix(tmp_path: Path) -> None:
    for name in (
        "clip_00001_.mp4",
        "clip_00007_.png",
        "clip_x_.mp4",
        "clipper_00050_.mp4",
        "clip_00009.mp4",
    ):
        _touch(tmp_path / "video" / name)
    file = output_file(tmp_path, "video/clip", "mp4", width=0, height=0)
    assert (file.filename, file.subfolder) == ("clip_00008_.mp4", "video")
    assert file.path == tmp_path / "video" / "clip_00008_.mp4"
    assert output_file(tmp_path, "video\\clip", "mp4", width=0, height=0) == file
    top = output_file(tmp_path, "clip", ".mp4", width=0, height=0)
    assert (top.filename, top.subfolder) == ("clip_00001_.mp4", "")


def test_variables_of_a_prefix_are_filled_in(tmp_path: Path) -> None:
    file = output_file(tmp_path, "%width%x%height%/%year%-%month%", "mp4", width=832, height=480)
    assert file.subfolder == "832x480"
    assert file.path.parent.is_dir()
    year, month = file.filename.split("_")[0].split("-")
    assert year.isdecimal()
    assert len(month) == 2


def test_a_date_is_filled_in_as_by_comfyuis_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        time, "localtime", lambda: time.struct_time((2026, 3, 4, 15, 6, 7, 2, 63, 0))
    )
    prefix = "%date:yyyy/MM-dd%/%date:yy M d h.hh m.mm s.ss yyy%"
    check_output(tmp_path, prefix)
    file = output_file(tmp_path, prefix, "mp4", width=1, height=1)
    assert (Path(file.subfolder), file.filename) == (
        Path("2026/03-04"),
        "26 3 4 15.15 6.06 7.07 yyy_00001_.mp4",
    )
    with pytest.raises(OutputNameError, match="'15:06' contains ':'"):
        check_output(tmp_path, "%date:hh:mm%")


@pytest.mark.parametrize(
    ("prefix", "written"),
    [
        ("2026-11-26 12:30", "2026-11-26 12_30"),
        ("aux/con.mp4", "_aux/_con.mp4"),
        ("a. /b\0\ud800?\n", "a._/b____"),
        ("C:\\nul ", "C_/nul "),
    ],
)
def test_a_name_that_is_known_in_the_run_only_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str, written: str
) -> None:
    file = output_file(tmp_path, prefix, "mp4", width=1, height=1)
    assert file.path.relative_to(tmp_path).as_posix() == f"{written}_00001_.mp4"
    assert f"the files are called '{written}'" in caplog.text
    host, folders = (
        EmbeddedHost(),
        Folders(models=tmp_path, output=tmp_path, input=tmp_path, finished=tmp_path),
    )
    with host.opened(folders):
        host.files.check_output(prefix)  # batch rows have other names


def test_models_are_listed_by_what_they_are(tmp_path: Path) -> None:
    for name in ("a.safetensors", "sub/b.SFT", "pickle.pt", "notes.txt", ".cache/c.safetensors"):
        _touch(tmp_path / "files" / name)
    assert sorted(weight_files(tmp_path / "files")) == ["a.safetensors", str(Path("sub/b.SFT"))]
    for name in (
        "wan/model_index.json",
        "wan/transformer/config.json",
        "own/expert/config.json",
        "empty/readme",
    ):
        _touch(tmp_path / "folders" / name)
    assert sorted(diffusers_folders(tmp_path / "folders")) == [str(Path("own/expert")), "wan"]
    assert list(weight_files(tmp_path / "none")) == []


def _tree(top: Path) -> None:
    for name in ("a.safetensors", "wan/b.safetensors", "wan/deep/c.safetensors"):
        _touch(top / "models" / "vae" / name)
    _touch(top / "disk" / "d.safetensors")
    _touch(top / "models" / "vae" / "pipe" / "model_index.json")


LOOPS: dict[str, tuple[dict[str, str], list[str]]] = {
    "one": ({"vae/a": "."}, []),
    "two": ({"vae/a": ".", "vae/b": "."}, []),
    "up": ({"vae/all": ".."}, []),
    "up twice": ({"vae/x": "../..", "vae/wan/y": "../../.."}, ["x/disk/d.safetensors"]),
    "to itself": ({"vae/self": "self"}, []),
    "to each other": ({"vae/one": "two", "vae/two": "one"}, []),
    "two folders": ({"vae/wan/back": "../pipe", "vae/pipe/there": "../wan"}, []),
    "one tree twice": ({"vae/m": "../../disk", "vae/more": "../../disk"}, ["m/d.safetensors"]),
    "nowhere": ({"vae/gone": "../nothing"}, []),
}


@pytest.mark.parametrize(("links", "more"), LOOPS.values(), ids=LOOPS)
def test_every_real_folder_is_listed_once_under_its_shortest_name(
    tmp_path: Path, links: dict[str, str], more: list[str]
) -> None:
    _tree(tmp_path)
    for name, target in links.items():
        (tmp_path / "models" / name).symlink_to(target)
    names = [Path(name).as_posix() for name in weight_files(tmp_path / "models" / "vae")]
    assert sorted(names) == sorted(
        ["a.safetensors", "wan/b.safetensors", "wan/deep/c.safetensors", *more]
    )
    assert [*diffusers_folders(tmp_path / "models" / "vae")] == ["pipe"]
    assert sorted(CachedFileNames((".safetensors",)).below(tmp_path / "models" / "vae")) == sorted(
        map(str, names)
    )


def test_a_scan_visits_a_folder_once_whatever_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        _touch(tmp_path / "disk" / f"{number}" / "x.safetensors")
    for name in "abcdefgh":
        (tmp_path / name).symlink_to(".")
        (tmp_path / f"{name}2").symlink_to("disk")
    listed, count = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path: count.append(path) or listed(path))
    read, looked = os.stat, []
    monkeypatch.setattr(
        os, "stat", lambda path, **how: looked.append(str(path)) or read(path, **how)
    )
    assert len([*weight_files(tmp_path)]) == 20
    assert len(count) == 22, "the top, its folder, and the twenty in there"
    assert not [path for path in looked if path.endswith(".safetensors")], "no file is looked at"


@pytest.mark.parametrize(
    "name",
    ["wan/b.safetensors", "other/b.safetensors", "wan\\b.safetensors", "all/vae/wan/b.safetensors"],
)
def test_a_name_over_another_link_is_the_listed_one(tmp_path: Path, name: str) -> None:
    _tree(tmp_path)
    (tmp_path / "models" / "vae" / "other").symlink_to("wan")
    (tmp_path / "models" / "vae" / "all").symlink_to("..")
    socket = Socket(name="vae", io_type="COMBO", options={}, required=True)
    with embedded_host.opened(Folders(models=tmp_path / "models", output=tmp_path, input=tmp_path)):
        listed = {"options": embedded_host.files.model_names("vae")}
        assert listed_choice(replace(socket, options=listed), name, embedded_host.files) == str(
            Path("wan/b.safetensors")
        )
        assert (
            listed_choice(replace(socket, options=listed), "nothing", embedded_host.files)
            == "nothing"
        )


def test_gguf_files_are_offered_for_experts_and_text_encoders(tmp_path: Path) -> None:
    for kind in ("diffusion_models", "vae", "text_encoders", "loras"):
        for name in ("a.safetensors", "b.gguf", "sub/C.GGUF", ".hidden/d.gguf"):
            _touch(tmp_path / "models" / kind / name)
    with embedded_host.opened(Folders(models=tmp_path / "models", output=tmp_path, input=tmp_path)):
        assert embedded_host.files.folders().run_states == tmp_path / ".wanstream-states"
        for kinds in (("diffusion_models", "diffusers"), ("diffusers", "text_encoders")):
            assert embedded_host.files.model_names(*kinds) == [
                "a.safetensors",
                "b.gguf",
                str(Path("sub/C.GGUF")),
            ]
        assert embedded_host.files.model_path("b.gguf", "diffusion_models").is_file()
        for kind in ("vae", "loras"):
            assert embedded_host.files.model_names(kind) == ["a.safetensors"]


def test_names_are_kept_until_a_folder_changes(tmp_path: Path) -> None:
    names, top = CachedFileNames(GGUF_FILES), tmp_path / "models"

    def at(folder: Path, second: int) -> None:
        os.utime(folder, (second, second))

    assert names.below(top) == ()
    _touch(top / "a.gguf")
    _touch(top / "sub" / "deep" / "b.gguf")
    found = ("a.gguf", str(Path("sub/deep/b.gguf")))
    assert names.below(top) == found, "a folder that was not there has come"
    for folder in (top, top / "sub", top / "sub/deep"):
        at(folder, 100)
    assert names.below(top) == found
    _touch(top / "sub/deep/c.gguf")
    at(top / "sub/deep", 100)
    assert names.below(top) == found, (
        "the folder says that it has not changed, so nobody looks into it"
    )
    at(top / "sub/deep", 101)
    assert len(names.below(top)) == 3
    (top / "sub/deep/b.gguf").unlink()
    at(top / "sub/deep", 102)
    assert names.below(top) == ("a.gguf", str(Path("sub/deep/c.gguf")))
    shutil.rmtree(top / "sub")
    assert names.below(top) == ("a.gguf",)
    shutil.rmtree(top)
    assert names.below(top) == ()


def test_a_model_is_found_where_its_kind_lies(tmp_path: Path) -> None:
    file = _touch(tmp_path / "second" / "a.safetensors")
    (tmp_path / "diffusers" / "wan").mkdir(parents=True)
    places = {
        "diffusion_models": [tmp_path / "first", tmp_path / "second"],
        "diffusers": [tmp_path / "diffusers"],
    }
    assert find_model("a.safetensors", places) == file
    assert find_model("wan", places) == tmp_path / "diffusers" / "wan"
    for name, error in (
        ("b.safetensors", ModelNotFoundError),
        ("../second/a.safetensors", OutsideFolderError),
    ):
        with pytest.raises(error):
            find_model(name, places)
    with pytest.raises(
        ModelNotFoundError, match="'diffusion_models, diffusers' with filename 'none'"
    ):
        find_model("none", places)


def test_a_link_inside_the_folder_is_followed_as_comfyui_does(tmp_path: Path) -> None:
    real = _touch(tmp_path / "disk" / "a.safetensors")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(real.parent, target_is_directory=True)
    name = next(weight_files(tmp_path / "models"))
    assert find_model(name, {"vae": [tmp_path / "models"]}).samefile(real)
