"""Batch output folder: checks, names, and repeated renames."""

import os

import av
import numpy as np
import pytest
import torch
from PIL import Image

from wanstream.batch import output_store as module
from wanstream.batch.journal.entry import KeptFile
from wanstream.batch.output_store import OutputStore, UnreadableFileError, file_names, sha256_of
from wanstream.nodes.runs.video_file import write_video


def picture(path):
    Image.effect_noise((64, 64), 50).save(path)
    return path


def video(path):
    frames = torch.rand((9, 64, 64, 3), generator=torch.Generator().manual_seed(0))
    write_video(path, frames, fps=16, crf=18, metadata={"prompt": {"1": {}}})
    return path


@pytest.fixture
def store(tmp_path):
    return OutputStore(tmp_path)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.mp4"])
def test_a_whole_file_is_placed_and_half_a_one_refused(store, name):
    make = video if name == "a.mp4" else picture
    part = store.part_path(name)
    placed = store.folder / name
    made = make(part).read_bytes()
    for share in (0.0, 0.5, 0.9):
        part.write_bytes(made[: int(len(made) * share)])
        with pytest.raises(UnreadableFileError, match=name.replace(".", r"\.")):
            store.check_file(part)
    part.write_bytes(made)
    checked = store.check_file(part)
    assert (checked.name, checked.size, placed.exists()) == (name, len(made), False)
    for _ in range(2):
        assert store.place([checked])
        assert placed.read_bytes() == made
        assert not part.exists()
        assert store.has([checked])


def cut_between_frames(path):
    """Cut a video where a decoder does not report it: only the frame count shows it."""
    video(path)
    with av.open(str(path)) as container:
        starts = sorted(packet.pos for packet in container.demux(video=0) if packet.size)
    path.write_bytes(path.read_bytes()[: starts[-2]])


def page(path):
    path.write_text("<html>busy, come back later</html>")


def sound(path):
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), "float32"), "fltp", "mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("a.mp4", cut_between_frames, r"a\.mp4"),
        ("a.mp4", page, r"a\.mp4"),
        ("a.png", page, r"a\.png"),
        ("a.flac", page, r"a\.flac"),
        ("a.mp4", sound, "it has no video stream"),
    ],
)
def test_a_file_of_another_kind_is_refused(store, name, make, reason):
    make(store.part_path(name))
    with pytest.raises(UnreadableFileError, match=reason):
        store.check_file(store.part_path(name))


def test_a_picture_with_too_many_pixels_is_refused(store, monkeypatch):
    part = picture(store.part_path("a.png"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UnreadableFileError, match=r"a\.png cannot be read to its end.*pixels"):
        store.check_file(part)


def test_a_file_that_is_nowhere_or_another_is_not_placed(store):
    checked = store.check_file(picture(store.part_path("a.png")))
    store.clear_parts()
    assert not store.place([checked])
    (store.folder / "a.png").write_bytes(b"x" * checked.size)
    assert not store.place([checked])
    assert store.has([checked]), "by its size alone"
    (store.folder / "a.png").write_bytes(b"x")
    assert not store.has([checked])


def test_names():
    assert file_names("shot 1.5", ["wan_00012_.mp4"]) == ["shot 1.5.mp4"]
    several = ["00007~1.mp4", "00007~2.png", "00007~3"]
    assert file_names("00007", ["b.mp4", "a.png", "latent"]) == several
    assert file_names("x", ["a.m/../../p4", "."]) == ["x~1", "x~2"]


def test_only_files_that_would_be_replaced_are_in_the_way(store):
    names = ["00001.mp4", "00001~2.png", "SHOT_1.mp4", "shot.png", "00001_notes.txt"]
    for name in (*names, "journal.sqlite", "shot 1.5", "shot 2.5~3"):
        (store.folder / name).touch()
    (store.folder / "00002").mkdir()
    (store.folder / "00009.mp4").mkdir()
    (store.folder / "00008.mp4").symlink_to("nowhere")
    for stems, found in {
        ("00008", "00009"): ["00008.mp4", "00009.mp4"],  # a folder, and a link to nothing
        ("shot 1.5", "shot 2.5"): ["shot 1.5", "shot 2.5~3"],  # without a suffix
        ("00001", "00002", "shot_1"): ["00001.mp4", "00001~2.png", "SHOT_1.mp4"],
    }.items():
        assert store.foreign_files(stems) == found
    names = ["00008.mp4", "00009.mp4", "00001.mp4", "00010.mp4"]
    former = [KeptFile(name="00001.mp4", size=0, sha256="")]
    assert store.occupied(names, former) == names[:2], "names that came into use"


@pytest.mark.parametrize("kept_times", [False, True])
def test_other_file_of_the_same_size_is_noticed(store, kept_times, monkeypatch):
    placed = store.place([store.check_file(picture(store.part_path("a.png")))])
    path = store.folder / "a.png"
    read = []
    monkeypatch.setattr(module, "sha256_of", lambda each: read.append(each) or sha256_of(each))
    assert store.compared(placed) == placed
    assert not read, "nothing has touched it"
    os.utime(path, ns=(1, 1))
    touched = store.compared(placed)
    assert touched not in (None, placed)
    assert store.compared(touched) == touched
    assert len(read) == 1
    times = path.stat()
    path.write_bytes(b"x" * placed[0].size)
    if kept_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.has(touched)
    assert store.compared(touched) is None


@pytest.mark.parametrize("lines", [None, [2]])
def test_half_a_video_does_not_stay_with_a_kept_latent(store, lines):
    folder = store.backend_folder / "id" / "video"
    folder.mkdir(parents=True)
    for name in ("save_00001_.latent", "save_00001_.mp4.part"):
        (folder / name).touch()
    kept = folder / "save_00001_.latent"
    assert store.remove_leftovers(lambda prompt_id: lines) == [(kept, lines)]
    assert [*folder.iterdir()] == [kept]
