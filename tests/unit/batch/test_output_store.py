"""Batch output folder: checks, names, and repeated renames."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from wanstream.batch import output_store as module
from wanstream.batch.journal.entry import KeptFile
from wanstream.batch.output_store import OutputStore, UnreadableFileError, file_names, sha256_of
from wanstream.nodes.runs.video_file import write_video


def picture(path: Path) -> Path:
    Image.effect_noise((64, 64), 50).save(path)
    return path


def video(path: Path) -> Path:
    frames = torch.rand((9, 64, 64, 3), generator=torch.Generator().manual_seed(0))
    write_video(path, frames, fps=16, crf=18, metadata={"prompt": {"1": {}}})
    return path


MAKERS = [("a.png", picture), ("a.jpg", picture), ("a.webp", picture), ("a.mp4", video)]


@pytest.mark.parametrize(("name", "make"), MAKERS)
def test_a_whole_file_is_sealed_and_placed_once_and_again(
    tmp_path: Path, name: str, make: object
) -> None:
    store = OutputStore(tmp_path)
    made = make(store.part_path(name)).read_bytes()  # type: ignore[operator]
    checked = store.check_file(store.part_path(name))
    assert (checked.name, checked.size) == (name, len(made))
    assert not (tmp_path / name).exists()
    for _ in range(2):
        assert store.place([checked])
        assert (tmp_path / name).read_bytes() == made
        assert not store.part_path(name).exists()
        assert store.has([checked])


@pytest.mark.parametrize(("name", "make"), MAKERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_file_that_is_cut_off_is_refused(
    tmp_path: Path, name: str, make: object, share: float
) -> None:
    store = OutputStore(tmp_path)
    part = make(store.part_path(name))  # type: ignore[operator]
    part.write_bytes(part.read_bytes()[: int(part.stat().st_size * share)])
    with pytest.raises(UnreadableFileError, match=name.replace(".", r"\.")):
        store.check_file(store.part_path(name))


def test_a_video_that_is_cut_between_two_frames_is_refused(tmp_path: Path) -> None:
    """A decoder does not report this cut. Only the frame count shows it."""
    store = OutputStore(tmp_path)
    part = video(store.part_path("a.mp4"))
    with av.open(str(part)) as container:
        starts = sorted(packet.pos for packet in container.demux(video=0) if packet.size)
    part.write_bytes(part.read_bytes()[: starts[-2]])
    with pytest.raises(UnreadableFileError, match=r"a\.mp4"):
        store.check_file(store.part_path("a.mp4"))


def test_a_page_of_a_proxy_is_no_video(tmp_path: Path) -> None:
    store = OutputStore(tmp_path)
    for name in ("a.mp4", "a.png", "a.flac"):
        store.part_path(name).write_text("<html>busy, come back later</html>")
        with pytest.raises(UnreadableFileError):
            store.check_file(store.part_path(name))


def test_a_picture_of_too_many_pixels_costs_its_row_alone(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    store = OutputStore(tmp_path)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    store.part_path("a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    )
    with pytest.raises(UnreadableFileError, match=r"a\.png cannot be read to its end.*pixels"):
        store.check_file(store.part_path("a.png"))


def test_a_sound_is_no_video(tmp_path: Path) -> None:
    store = OutputStore(tmp_path)
    with av.open(str(store.part_path("a.mp4")), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
        frame.sample_rate = 44100
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(UnreadableFileError, match="it has no video stream"):
        store.check_file(store.part_path("a.mp4"))


def test_a_file_that_is_nowhere_or_another_is_not_placed(tmp_path: Path) -> None:
    store = OutputStore(tmp_path)
    picture(store.part_path("a.png"))
    checked = store.check_file(store.part_path("a.png"))
    store.clear_parts()
    assert not store.place([checked])
    (tmp_path / "a.png").write_bytes(b"x" * checked.size)
    assert not store.place([checked])
    assert store.has([checked]), "by its size alone"
    (tmp_path / "a.png").write_bytes(b"x")
    assert not store.has([checked])


def test_names() -> None:
    assert file_names("shot 1.5", ["wan_00012_.mp4"]) == ["shot 1.5.mp4"]
    assert file_names("00007", ["b.mp4", "a.png", "latent"]) == [
        "00007~1.mp4",
        "00007~2.png",
        "00007~3",
    ]
    assert file_names("x", ["a.m/../../p4", "."]) == ["x~1", "x~2"]


def test_only_files_that_would_be_replaced_are_in_the_way(tmp_path: Path) -> None:
    store = OutputStore(tmp_path)
    for name in (
        "00001.mp4",
        "00001~2.png",
        "SHOT_1.mp4",
        "shot.png",
        "00001_notes.txt",
        "journal.sqlite",
    ):
        (tmp_path / name).touch()
    (tmp_path / "00002").mkdir()
    (tmp_path / "00009.mp4").mkdir()
    (tmp_path / "00008.mp4").symlink_to("nowhere")
    assert store.foreign_files(["00008", "00009"]) == ["00008.mp4", "00009.mp4"], (
        "a folder, and a link to nothing"
    )
    (tmp_path / "shot 1.5").touch()
    (tmp_path / "shot 2.5~3").touch()
    assert store.foreign_files(["shot 1.5", "shot 2.5"]) == ["shot 1.5", "shot 2.5~3"], (
        "files of these stems without suffix"
    )
    assert store.foreign_files(["00001", "00002", "shot_1"]) == [
        "00001.mp4",
        "00001~2.png",
        "SHOT_1.mp4",
    ]


@pytest.mark.parametrize("kept_times", [False, True])
def test_another_file_of_the_same_size_is_noticed_and_only_touched_ones_are_read(
    tmp_path: Path, kept_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OutputStore(tmp_path)
    picture(store.part_path("a.png"))
    placed = store.place([store.check_file(store.part_path("a.png"))])
    assert placed is not None
    path, read = tmp_path / "a.png", []
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


def test_a_name_that_comes_into_use_is_occupied(tmp_path: Path) -> None:
    store = OutputStore(tmp_path)
    (tmp_path / "a.mp4").mkdir()
    (tmp_path / "b.mp4").symlink_to("nowhere")
    (tmp_path / "c.mp4").touch()
    former = [KeptFile(name="c.mp4", size=0, sha256="")]
    assert store.occupied(["a.mp4", "b.mp4", "c.mp4", "d.mp4"], former) == ["a.mp4", "b.mp4"]


@pytest.mark.parametrize("lines", [None, [2]])
def test_half_a_video_does_not_stay_with_the_latent_that_is_kept(
    tmp_path: Path, lines: list[int] | None
) -> None:
    store = OutputStore(tmp_path)
    folder = store.backend_folder / "id" / "video"
    folder.mkdir(parents=True)
    for name in ("save_00001_.latent", "save_00001_.mp4.part"):
        (folder / name).touch()
    assert store.remove_leftovers(lambda prompt_id: lines) == [
        (folder / "save_00001_.latent", lines)
    ]
    assert [path.name for path in folder.iterdir()] == ["save_00001_.latent"]
