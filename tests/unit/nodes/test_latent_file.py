"""Safety copy for a latent: written before the video, removed only after success."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from wanstream.host import io
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import NodeFailedError
from wanstream.nodes.decode import WanStreamSaveVideo
from wanstream.nodes.runs import latent_backup as latent_file
from wanstream.nodes.runs.latent_backup import (
    VideoFailedError,
    VideoNotSavedError,
    VideoRefusedError,
    keep_latent_until_done,
)
from wanstream.nodes.runs.video_file import VideoFileError
from wanstream.schema import Cancelled
from wanstream.tests.support.embedded import embedded_host, run_workflow, validate_workflow
from wanstream.wan.vae.memory import VaeMemoryError
from wanstream.wan.vae.vae import DecodeOutOfMemoryError

LATENT = torch.arange(512.0).view(1, 16, 2, 4, 4)


class Made(io.ComfyNode):
    """Five grey frames, their latent, and a frame rate and name no widget can give."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Made",
            inputs=[],
            outputs=[io.Image.Output(), io.Latent.Output(), io.Float.Output(), io.String.Output()],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(
            torch.full((5, 32, 48, 3), 0.5), {"samples": LATENT}, float("nan"), "x" * 300
        )


def graph(**inputs: Any) -> dict[str, Any]:
    saving = {
        "images": ["made", 0],
        "latent": ["made", 1],
        "fps": 16.0,
        "filename_prefix": "video/x",
        "crf": 20,
    }
    return {
        "made": {"class_type": "Made", "inputs": {}},
        "save": {"class_type": "WanStreamSaveVideo", "inputs": {**saving, **inputs}},
    }


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


@pytest.fixture
def save(tmp_path: Path, output: Path) -> Callable[..., None]:
    """Run Wan Save Video with these inputs."""

    def run(**inputs: Any) -> None:
        run_workflow(
            graph(**inputs),
            nodes=[Made, WanStreamSaveVideo],
            models=tmp_path,
            output=output,
            input_dir=tmp_path,
        )

    return run


@pytest.fixture
def opened(tmp_path: Path, output: Path) -> Iterator[Path]:
    """Open the embedded host and yield the output folder."""
    with embedded_host.opened(Folders(models=tmp_path, output=output, input=tmp_path)):
        yield output


def refusals(output: Path, **inputs: Any) -> list[str]:
    nodes = [Made, WanStreamSaveVideo]
    return validate_workflow(
        graph(**inputs), nodes, models=output, input_dir=output, output=output
    ).lines()


def kept_in(output: Path) -> Path:
    (kept,) = output.rglob("*.latent")
    assert torch.equal(load_file(kept)["latent_tensor"], LATENT)
    assert "latent_format_version_0" in load_file(kept)
    return kept


def test_images_of_an_odd_size_make_a_video_with_a_note(tmp_path: Path, output: Path) -> None:
    class Odd(Made):
        @classmethod
        def execute(cls) -> io.NodeOutput:
            return io.NodeOutput(torch.full((2, 79, 105, 3), 0.5), {"samples": LATENT}, 16.0, "")

    history = run_workflow(
        graph(filename_prefix="%width%x%height%"),
        nodes=[Odd, WanStreamSaveVideo],
        models=tmp_path,
        output=output,
        input_dir=tmp_path,
    )
    (shown,) = history.outputs.values()
    assert "105x79, and h264 needs even sides: the video is 106x80" in shown["text"][0]
    assert [notice["level"] for notice in shown["wanstream_notices"]] == ["note"], (
        "it is on the node"
    )
    assert [file["filename"] for file in shown["images"]] == ["106x80_00001_.mp4"]
    assert [path.name for path in output.iterdir()] == ["106x80_00001_.mp4"]


@pytest.mark.parametrize(
    ("linked", "reason"),
    [
        ({"audio": {"waveform": torch.zeros(2, 9), "sample_rate": 16000}}, r"not \[2, 9\]"),
        ({"format": "vp6"}, "'vp6' cannot be written here"),
    ],
)
def test_a_linked_value_that_is_refused_keeps_the_latent(
    opened: Path, linked: dict[str, Any], reason: str
) -> None:
    images = torch.full((2, 32, 48, 3), 0.5)
    latent = {"samples": LATENT}
    with pytest.raises(VideoRefusedError, match=reason):
        WanStreamSaveVideo.execute(images, 8.0, "x", 18, latent=latent, **linked)
    kept_in(opened)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"format": "av1 10 bit", "fps": 241.0}, "at most 240 frames per second"),
        ({"format": "vp6"}, "'vp6' cannot be written here: choose h264"),
    ],
)
def test_a_format_that_cannot_be_written_is_refused_first(
    output: Path, changed: dict[str, Any], reason: str
) -> None:
    assert any(reason in line for line in refusals(output, **changed))


@pytest.mark.parametrize("fps", [float("nan"), float("inf"), 0.0, -1.0, 1e9])
def test_a_frame_rate_that_no_video_can_have_is_refused_before_anything_runs(
    output: Path, fps: float
) -> None:
    assert any(
        "frames per second: give a number from 0.01 to 1000" in line
        for line in refusals(output, fps=fps)
    )


@pytest.mark.parametrize("prefix", ["video/a\0b", "x" * 300, "video/x"])
def test_a_name_that_no_file_can_have_is_refused_before_anything_runs(
    output: Path, prefix: str
) -> None:
    (output / "video").touch()
    assert refusals(output, filename_prefix=prefix)


@pytest.mark.parametrize("inputs", [{"fps": ["made", 2]}, {"filename_prefix": ["made", 3]}])
def test_a_value_that_only_the_run_knows_costs_the_video_but_not_the_latent(
    save: Callable[..., None], output: Path, inputs: dict[str, Any]
) -> None:
    with pytest.raises(NodeFailedError, match="The latent is kept in") as failed:
        save(**inputs)
    assert str(kept_in(output)) in str(failed.value)
    assert not [*output.rglob("*.mp4*")]


def test_a_file_that_gets_in_the_way_costs_the_video_but_not_the_latent(
    save: Callable[..., None], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = latent_file.write_latent

    def block(path: Path, samples: torch.Tensor) -> None:
        written(path, samples)
        (output / "video").touch()

    monkeypatch.setattr(latent_file, "write_latent", block)
    with pytest.raises(NodeFailedError, match="The latent is kept in") as failed:
        save()
    assert isinstance(failed.value.__cause__, VideoNotSavedError)
    assert failed.value.__cause__.errno == errno.EEXIST
    assert str(kept_in(output)) in str(failed.value)


def test_an_output_folder_that_is_gone_leaves_the_latent_in_the_temp_folder(
    opened: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_host.files, "temp_folder", lambda: tmp_path / "temp")
    (tmp_path / "temp").mkdir()
    opened.rmdir()
    opened.touch()
    with (
        pytest.raises(VideoNotSavedError, match=r"The latent is kept in .*temp"),
        keep_latent_until_done(embedded_host, LATENT),
    ):
        embedded_host.files.output_file("video/x", "mp4")
    kept_in(tmp_path / "temp")


def test_the_copy_goes_once_the_video_is_saved(save: Callable[..., None], output: Path) -> None:
    save()
    assert [str(path.relative_to(output)) for path in sorted(output.rglob("*"))] == [
        "video",
        "video/x_00001_.mp4",
    ]


ERRORS = {
    "a full disk": (
        VideoFileError(errno.ENOSPC, "x could not be written: no room"),
        VideoNotSavedError,
        "no room",
    ),
    "a refusal": (ValueError("odd size"), VideoRefusedError, "odd size"),
    "a fault": (TypeError("None has no shape"), VideoFailedError, "TypeError: None has no shape"),
    "no memory": (torch.OutOfMemoryError("none left"), DecodeOutOfMemoryError, "none left"),
    "no memory for a tile": (VaeMemoryError("too little"), DecodeOutOfMemoryError, "too little"),
}


@pytest.mark.parametrize(("error", "raised", "reason"), ERRORS.values(), ids=ERRORS)
def test_every_error_names_the_place_of_the_latent(
    opened: Path, error: Exception, raised: type[Exception], reason: str
) -> None:
    with pytest.raises(raised) as not_saved, keep_latent_until_done(embedded_host, LATENT):
        raise error
    assert not_saved.value.__cause__ is error
    assert str(not_saved.value).startswith(
        reason if raised is not VideoNotSavedError else "x could not be written"
    )
    assert f"The latent is kept in {kept_in(opened)}" in str(not_saved.value)
    assert getattr(not_saved.value, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize(
    "end", [Cancelled("stopped"), KeyboardInterrupt()], ids=["cancel", "ctrl-c"]
)
def test_a_cancel_stays_a_cancel(
    opened: Path, caplog: pytest.LogCaptureFixture, end: BaseException
) -> None:
    with caplog.at_level(logging.WARNING, "wanstream.nodes"):
        with pytest.raises(type(end)) as ended, keep_latent_until_done(embedded_host, LATENT):
            raise end
    assert ended.value is end
    assert f"its latent is kept in {kept_in(opened)}" in caplog.text


def test_a_cancel_of_saving_leaves_no_latent(
    save: Callable[..., None], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"a Cancel": Cancelled("stopped"), "an error": ValueError("odd size")}
    for name, end in ends.items():

        def stop(*_: object, end: Exception = end, **__: object) -> None:
            raise end

        monkeypatch.setattr("wanstream.nodes.runs.video_file.write_video", stop)
        with pytest.raises(Exception, match=str(end)):
            save()
        assert len([*output.rglob("*.latent")]) == (name == "an error"), name


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr
)
def test_without_memory_for_the_copy_the_video_is_made_all_the_same(
    opened: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def save(tensors: object, **_: object) -> bytes:
        raise error

    monkeypatch.setattr("safetensors.torch.save", save)
    done = False
    with (
        caplog.at_level(logging.WARNING, "wanstream.nodes"),
        keep_latent_until_done(embedded_host, LATENT),
    ):
        done = True
    assert done
    assert "could not be saved before the video is made" in caplog.text
    assert not [*opened.rglob("*.latent")]


def test_without_a_place_for_the_copy_the_video_is_made_all_the_same(
    opened: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded_host.files, "temp_folder", lambda: tmp_path / "gone")
    (opened / "latents").touch()
    done = False
    with caplog.at_level(logging.WARNING, "wanstream.nodes"):
        with keep_latent_until_done(embedded_host, LATENT):
            done = True
        with (
            pytest.raises(VaeMemoryError, match=r"^too little$"),
            keep_latent_until_done(embedded_host, LATENT),
        ):
            raise VaeMemoryError("too little")
    assert done
    assert caplog.text.count("could not be saved before the video is made") == 2


@pytest.mark.parametrize("there", [True, False])
def test_only_a_folder_of_our_own_goes_with_the_copy(opened: Path, there: bool) -> None:
    folder = opened / "latents"
    if there:
        folder.mkdir()
    with keep_latent_until_done(embedded_host, LATENT):
        kept_in(opened)
    assert folder.exists() == there
    with keep_latent_until_done(embedded_host, LATENT):
        (folder / "other.latent").touch()
    assert [path.name for path in folder.iterdir()] == ["other.latent"]


# A limit on the file size acts like a full disk: the write fails in the same way.
SAVE_WITH_LITTLE_ROOM = """
import resource, sys
from pathlib import Path
import torch
from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.host.embedded.files import Folders
from wanstream.nodes.runs.latent_backup import keep_latent_until_done
from wanstream.nodes.runs.video_file import write_video

folder, room = Path(sys.argv[1]), int(sys.argv[2])
noise = torch.rand(30, 64, 64, 3)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    host = EmbeddedHost()
    with host.opened(Folders(models=folder, output=folder, input=folder)):
        with keep_latent_until_done(host, torch.arange(512.0).view(1, 16, 2, 4, 4)):
            write_video(folder / "a.mp4", noise, fps=16, crf=1, metadata={})
except OSError as err:
    print(type(err).__name__, err.errno, err)
"""


def save_with_little_room(folder: Path, room: int) -> str:
    command = [sys.executable, "-c", SAVE_WITH_LITTLE_ROOM, str(folder), str(room)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.integration
def test_a_full_disk_costs_the_video_but_not_the_latent(tmp_path: Path) -> None:
    said = save_with_little_room(tmp_path, 20_000)

    assert said.startswith(f"VideoNotSavedError {errno.EFBIG} ")
    assert f"The latent is kept in {kept_in(tmp_path)}" in said
    assert [path.name for path in tmp_path.iterdir()] == ["latents"]


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.integration
def test_no_room_even_for_the_latent_leaves_nothing_behind(tmp_path: Path) -> None:
    said = save_with_little_room(tmp_path, 1_000)
    assert said.startswith(f"VideoFileError {errno.EFBIG} ")
    assert list(tmp_path.iterdir()) == []
