"""Names from a workflow never lead out of their folders."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from wanstream.host import OutputFile, OutputNameError, OutsideFolderError, inside
from wanstream.host.embedded import EmbeddedHost, Folders
from wanstream.host.embedded.workflow.validate import Socket, listed_choice
from wanstream.host.folders import (
    GGUF_FILES,
    CachedFileNames,
    ModelNotFoundError,
    check_output,
    diffusers_folders,
    find_model,
    output_file,
    weight_files,
)
from wanstream.tests.support.host.embedded import embedded_host

OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "..", ".", "", "a/..", "../top-twin/x"]


def written(folder: Path, prefix: str, suffix: str = "mp4") -> OutputFile:
    return output_file(folder, prefix, suffix, width=832, height=480)


def _touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize("name", OUTSIDE)
def test_name_that_leaves_the_folder_is_refused(tmp_path, name):
    with pytest.raises(OutsideFolderError, match="leaves the folder"):
        inside(tmp_path / "top", name)
    with pytest.raises(OutsideFolderError):
        written(tmp_path / "top", name)
    assert not list(tmp_path.rglob("*")), "a refused name left something behind"


def test_name_below_the_folder_is_taken(tmp_path):
    for name in ("x", "a/x", "a/../x", "./x", "..x", "a b/x.y"):
        assert (tmp_path / "top") in inside(tmp_path / "top", name).parents


IMPOSSIBLE = {
    "NUL": ("video/a\0b", "NUL character"),
    "half a character": ("a\ud800", "a lone surrogate at index 1"),
    "a device": ("aux/x", "'aux' is a device name on Windows"),
    "a device with a suffix": ("video/Con.mp4", "'Con.mp4' is a device name"),
    "a stream": ("a:b", "contains ':', which no name on Windows can: remove it"),
    "a question": ("why?/x", r"contains '\?'"),
    "a folder with a dot": ("video./x", "'video.' ends with a dot or a space"),
    "a device behind another slash": ("video\\nul\\x", "'nul' is a device name"),
    "a long name": ("x" * 300, "has 300 bytes, and the limit is 232: shorten it"),
    "a long name in another script": ("\u5bb6" * 80, "has 240 bytes, and the limit is 232"),
    "a long folder": (f"{'y' * 256}/x", "has 256 bytes, and the limit is 255"),
    "a long path": (f"{'y' * 200}/" * 25 + "x", "the path has"),
    "folders and back": ("a/b/../" * 101 + "x", "has 101 folders"),
    "a folder too many": ("a/" * 101 + "x", "has 101 folders"),
    "a file for a folder": ("there/x", "there is not a folder"),
    "a file further up": ("there/sub/sub/x", "there is not a folder"),
    "a link that leads nowhere": ("dangling/x", "dangling is not a folder"),
    "a folder that must not be written": ("locked/sub/x", "is not writable"),
}


@pytest.mark.parametrize(("prefix", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_output_name_is_refused(tmp_path, monkeypatch, prefix, reason):
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


DEEP = ["a/" * 100 + "x", "./" * 1000 + "x", "a/../" * 400 + "x"]
NAMES = ["x", "video/x", "a/b/c/x", "%width%x%height%/%year%", "x" * 232, "\u5bb6/\u5bb6", "link/x"]
ODD = [".hidden/..x/console.x", "clip ", "video/clip.", "aux", "video/com1/"]


@pytest.mark.parametrize("prefix", [*DEEP, *NAMES, *ODD])
def test_name_that_is_not_refused_can_be_written(tmp_path, prefix):
    output = tmp_path / "not there" / "output"
    (tmp_path / "elsewhere").mkdir()
    if prefix.startswith("link"):
        output.mkdir(parents=True)
        (output / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    check_output(output, prefix)
    path = written(output, prefix).path
    path.with_name(f"{path.name}.part").touch()


def test_output_files_are_counted_per_prefix(tmp_path):
    numbered = ("clip_00001_.mp4", "clip_00007_.png")
    for name in (*numbered, "clip_x_.mp4", "clipper_00050_.mp4", "clip_00009.mp4"):
        _touch(tmp_path / "video" / name)
    file = written(tmp_path, "video/clip")
    assert (file.filename, file.subfolder) == ("clip_00008_.mp4", "video")
    assert file.path == tmp_path / "video" / "clip_00008_.mp4"
    assert written(tmp_path, "video\\clip") == file
    top = written(tmp_path, "clip", ".mp4")
    assert (top.filename, top.subfolder) == ("clip_00001_.mp4", "")
    with pytest.raises(OutputNameError, match=r"clip_x_\.mp4 is not a folder"):
        check_output(tmp_path / "video" / "clip_x_.mp4" / "output", "video/x")


def test_variables_of_a_prefix_are_filled_in(tmp_path, monkeypatch):
    """Dates are those of ComfyUI's frontend."""
    now = time.struct_time((2026, 3, 4, 15, 6, 7, 2, 63, 0))
    monkeypatch.setattr(time, "localtime", lambda: now)
    file = written(tmp_path, "%width%x%height%/%year%-%month%")
    assert (file.subfolder, file.filename) == ("832x480", "2026-03_00001_.mp4")
    assert file.path.parent.is_dir()
    prefix = "%date:yyyy/MM-dd%/%date:yy M d h.hh m.mm s.ss yyy%"
    check_output(tmp_path, prefix)
    file = written(tmp_path, prefix)
    assert Path(file.subfolder) == Path("2026/03-04")
    assert file.filename == "26 3 4 15.15 6.06 7.07 yyy_00001_.mp4"
    with pytest.raises(OutputNameError, match="'15:06' contains ':'"):
        check_output(tmp_path, "%date:hh:mm%")


@pytest.mark.parametrize(
    ("prefix", "repaired"),
    [
        ("2026-11-26 12:30", "2026-11-26 12_30"),
        ("aux/con.mp4", "_aux/_con.mp4"),
        ("a. /b\0\ud800?\n", "a._/b____"),
        ("C:\\nul ", "C_/nul "),
    ],
)
def test_name_that_is_known_in_the_run_only_is_repaired(tmp_path, caplog, prefix, repaired):
    path = written(tmp_path, prefix).path
    assert path.relative_to(tmp_path).as_posix() == f"{repaired}_00001_.mp4"
    assert f"the files are called '{repaired}'" in caplog.text
    host = EmbeddedHost()
    places = dict.fromkeys(("models", "output", "input"), tmp_path)
    with host.opened(Folders(**places, finished=tmp_path)):
        host.files.check_output(prefix)  # batch rows have other names


def test_models_are_listed_by_what_they_are(tmp_path):
    for name in ("a.safetensors", "sub/b.SFT", "pickle.pt", "notes.txt", ".cache/c.safetensors"):
        _touch(tmp_path / "files" / name)
    assert sorted(weight_files(tmp_path / "files")) == ["a.safetensors", str(Path("sub/b.SFT"))]
    configs = ("wan/transformer/config.json", "own/expert/config.json")
    for name in ("wan/model_index.json", *configs, "empty/readme"):
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
    "up": ({"vae/all": ".."}, []),
    "up twice": ({"vae/x": "../..", "vae/wan/y": "../../.."}, ["x/disk/d.safetensors"]),
    "to itself": ({"vae/self": "self"}, []),
    "to each other": ({"vae/one": "two", "vae/two": "one"}, []),
    "two folders": ({"vae/wan/back": "../pipe", "vae/pipe/there": "../wan"}, []),
    "one tree twice": ({"vae/m": "../../disk", "vae/more": "../../disk"}, ["m/d.safetensors"]),
    "nowhere": ({"vae/gone": "../nothing"}, []),
}


@pytest.mark.parametrize(("links", "more"), LOOPS.values(), ids=LOOPS)
def test_real_folder_is_listed_once_under_its_shortest_name(tmp_path, links, more):
    _tree(tmp_path)
    for name, target in links.items():
        (tmp_path / "models" / name).symlink_to(target)
    folder = tmp_path / "models" / "vae"
    expected = {"a.safetensors", "wan/b.safetensors", "wan/deep/c.safetensors", *more}
    names = [Path(name).as_posix() for name in weight_files(folder)]
    assert (len(names), {*names}) == (len(expected), expected)
    assert [*diffusers_folders(folder)] == ["pipe"]
    assert sorted(CachedFileNames((".safetensors",)).below(folder)) == sorted(names)


def test_scan_visits_a_folder_once(tmp_path, monkeypatch):
    for number in range(20):
        _touch(tmp_path / "disk" / f"{number}" / "x.safetensors")
    for name in "abcdefgh":
        (tmp_path / name).symlink_to(".")
        (tmp_path / f"{name}2").symlink_to("disk")
    listed = Mock(wraps=os.scandir)
    looked = Mock(wraps=os.stat)
    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(os, "stat", looked)
    assert len([*weight_files(tmp_path)]) == 20
    assert listed.call_count == 22, "the top, its folder, and the twenty in there"
    paths = [str(each.args[0]) for each in looked.call_args_list]
    assert not [path for path in paths if path.endswith(".safetensors")], "no file is looked at"


def test_name_over_another_link_is_the_listed_one(tmp_path):
    _tree(tmp_path)
    (tmp_path / "models" / "vae" / "other").symlink_to("wan")
    (tmp_path / "models" / "vae" / "all").symlink_to("..")
    with embedded_host.opened(Folders(models=tmp_path / "models", output=tmp_path, input=tmp_path)):
        files = embedded_host.files
        listed = str(Path("wan/b.safetensors"))
        options = {"options": files.model_names("vae")}
        socket = Socket(name="vae", io_type="COMBO", options=options, required=True)
        for folder in ("wan/", "other/", "wan\\", "all/vae/wan/"):
            assert listed_choice(socket, f"{folder}b.safetensors", files) == listed
        assert listed_choice(socket, "nothing", files) == "nothing"


def test_gguf_files_are_offered_for_experts_and_text_encoders(tmp_path):
    for kind in ("diffusion_models", "vae", "text_encoders", "loras"):
        for name in ("a.safetensors", "b.gguf", "sub/C.GGUF", ".hidden/d.gguf"):
            _touch(tmp_path / "models" / kind / name)
    with embedded_host.opened(Folders(models=tmp_path / "models", output=tmp_path, input=tmp_path)):
        files = embedded_host.files
        both = ["a.safetensors", "b.gguf", str(Path("sub/C.GGUF"))]
        assert files.folders().run_states == tmp_path / ".wanstream-states"
        for kinds in (("diffusion_models", "diffusers"), ("diffusers", "text_encoders")):
            assert files.model_names(*kinds) == both
        assert files.model_path("b.gguf", "diffusion_models").is_file()
        assert files.model_names("vae") == files.model_names("loras") == ["a.safetensors"]


def test_names_are_kept_until_a_folder_changes(tmp_path):
    names = CachedFileNames(GGUF_FILES)
    top = tmp_path / "models"
    deep = top / "sub" / "deep"
    assert names.below(top) == ()
    _touch(top / "a.gguf")
    _touch(deep / "b.gguf")
    found = ("a.gguf", str(Path("sub/deep/b.gguf")))
    assert names.below(top) == found, "a folder that was not there has come"
    for folder in (top, top / "sub", deep):
        os.utime(folder, (100, 100))
    assert names.below(top) == found
    _touch(deep / "c.gguf")
    os.utime(deep, (100, 100))
    assert names.below(top) == found, "an unchanged time: the folder is not read"
    os.utime(deep, (101, 101))
    assert len(names.below(top)) == 3
    (deep / "b.gguf").unlink()
    os.utime(deep, (102, 102))
    assert names.below(top) == ("a.gguf", str(Path("sub/deep/c.gguf")))
    shutil.rmtree(top / "sub")
    assert names.below(top) == ("a.gguf",)
    shutil.rmtree(top)
    assert names.below(top) == ()


def test_model_is_found_in_the_folders_of_its_kind(tmp_path):
    file = _touch(tmp_path / "second" / "a.safetensors")
    (tmp_path / "diffusers" / "wan").mkdir(parents=True)
    # A link inside the folder is followed, as by ComfyUI.
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "linked").symlink_to(file.parent, target_is_directory=True)
    diffusers = tmp_path / "diffusers"
    places = {"diffusion_models": [tmp_path / "first", file.parent], "diffusers": [diffusers]}
    assert find_model("a.safetensors", places) == file
    assert find_model("wan", places) == diffusers / "wan"
    assert find_model(next(weight_files(tmp_path / "first")), places).samefile(file)
    with pytest.raises(OutsideFolderError):
        find_model("../second/a.safetensors", places)
    message = "'diffusion_models, diffusers' with filename 'none'"
    with pytest.raises(ModelNotFoundError, match=message):
        find_model("none", places)
