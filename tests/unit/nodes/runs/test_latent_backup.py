"""Safety copy for a latent: written before the video, removed only after success."""

import errno
import logging
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from wanstream.host import io
from wanstream.host.embedded.run import NodeFailedError
from wanstream.nodes.decode import WanStreamSaveVideo
from wanstream.nodes.runs import latent_backup
from wanstream.nodes.runs.video_file import VideoFileError, write_video
from wanstream.schema import Cancelled
from wanstream.tests.support.full_disk import largest_file
from wanstream.tests.support.host.embedded import embedded_host, validate_workflow
from wanstream.tests.support.host.given_nodes import constant
from wanstream.tests.support.host.shipped import node
from wanstream.wan.vae import DecodeOutOfMemoryError, VaeMemoryError

LATENT = torch.arange(512.0).view(1, 16, 2, 4, 4)
SAVED = {"fps": 16.0, "filename_prefix": "video/x", "crf": 20}
WARNINGS = {"level": logging.WARNING, "logger": "wanstream.nodes"}


def images(height=32, width=48):
    """Return a node with grey frames."""
    return constant("Images", io.Image.Output(), torch.full((5, height, width, 3), 0.5))


MADE = [images(), constant("Latent", io.Latent.Output(), {"samples": LATENT})]


def graph(**inputs):
    links = {"images": ["images", 0], "latent": ["latent", 0]}
    save = node("WanStreamSaveVideo", **{**links, **SAVED, **inputs})
    return {"images": node("Images"), "latent": node("Latent"), "save": save}


@pytest.fixture
def output(output):
    output.mkdir()
    return output


def kept_in(output):
    (kept,) = output.rglob("*.latent")
    tensors = load_file(kept)
    assert torch.equal(tensors["latent_tensor"], LATENT)
    assert "latent_format_version_0" in tensors
    return kept


def test_copy_is_removed_once_the_video_is_saved(run, output):
    """Odd sides make a video with a note."""
    nodes = graph(filename_prefix="%width%x%height%")
    history = run(nodes, more_nodes=[images(79, 105), *MADE[1:]])
    (shown,) = history.outputs.values()
    assert "105x79, and h264 needs even sides: the video is 106x80" in shown["text"][0]
    assert [notice["level"] for notice in shown["wanstream_notices"]] == ["note"], "on the node"
    assert [file["filename"] for file in shown["images"]] == ["106x80_00001_.mp4"]
    assert [path.name for path in output.iterdir()] == ["106x80_00001_.mp4"]


RATE = "frames per second: give a number from 0.01 to 1000"
RATES = [float("nan"), float("inf"), 0.0, -1.0, 1e9]
REFUSED = [
    *(({"fps": fps}, RATE) for fps in RATES),
    *(({"filename_prefix": prefix}, "") for prefix in ("video/a\0b", "x" * 300, "video/x")),
    ({"format": "av1 10 bit", "fps": 241.0}, "at most 240 frames per second"),
    ({"format": "vp6"}, "'vp6' cannot be written here: choose h264"),
]


@pytest.mark.parametrize(("inputs", "reason"), REFUSED)
def test_impossible_video_is_refused_first(output, inputs, reason):
    (output / "video").touch()
    places = {"models": output, "input_dir": output, "output": output}
    given = {"filename_prefix": "x", **inputs}
    lines = validate_workflow(graph(**given), [*MADE, WanStreamSaveVideo], **places).lines()
    assert any(reason in line for line in lines)


REFUSAL = latent_backup.VideoRefusedError


@pytest.mark.parametrize(
    ("linked", "error", "reason"),
    [
        ({"fps": float("nan")}, REFUSAL, "NaN"),
        ({"filename_prefix": "x" * 300}, latent_backup.VideoNotSavedError, "File name too long"),
        ({"audio": {"waveform": torch.zeros(2, 9), "sample_rate": 9}}, REFUSAL, r"not \[2, 9\]"),
        ({"format": "vp6"}, REFUSAL, "'vp6' cannot be written here"),
    ],
)
def test_impossible_linked_value_keeps_the_latent(opened, linked, error, reason):
    assert WanStreamSaveVideo.validate_inputs(None, None, None) is True, "a link has no value yet"
    given = {"images": torch.full((2, 32, 48, 3), 0.5), "latent": {"samples": LATENT}, **SAVED}
    with pytest.raises(error, match=reason) as failed:
        WanStreamSaveVideo.execute(**{**given, **linked})
    assert f"The latent is kept in {kept_in(opened)}" in str(failed.value)
    assert not [*opened.rglob("*.mp4*")]


def test_file_in_the_way_keeps_the_latent(run, output, monkeypatch):
    written = latent_backup.write_latent

    def block(path, samples):
        written(path, samples)
        (output / "video").touch()

    monkeypatch.setattr(latent_backup, "write_latent", block)
    with pytest.raises(NodeFailedError, match="The latent is kept in") as failed:
        run(graph(), more_nodes=MADE)
    assert isinstance(failed.value.__cause__, latent_backup.VideoNotSavedError)
    assert failed.value.__cause__.errno == errno.EEXIST
    assert str(kept_in(output)) in str(failed.value)


def test_without_an_output_folder_the_copy_is_in_the_temp_folder(
    opened, tmp_path_factory, monkeypatch
):
    temp = tmp_path_factory.mktemp("temp")
    monkeypatch.setattr(embedded_host.files, "temp_folder", lambda: temp)
    opened.rmdir()
    opened.touch()
    with pytest.raises(latent_backup.VideoNotSavedError, match=r"The latent is kept in .*temp"):
        with latent_backup.keep_latent_until_done(embedded_host, LATENT):
            embedded_host.files.output_file("video/x", "mp4")
    kept_in(temp)


NO_SHAPE = "TypeError: None has no shape"
FULL = VideoFileError(errno.ENOSPC, "x could not be written: no room")
ERRORS: list[tuple[Exception, type[Exception], str]] = [
    (FULL, latent_backup.VideoNotSavedError, "x could not be written"),
    (ValueError("odd size"), latent_backup.VideoRefusedError, "odd size"),
    (TypeError("None has no shape"), latent_backup.VideoFailedError, NO_SHAPE),
    (torch.OutOfMemoryError("none left"), DecodeOutOfMemoryError, "none left"),
    (VaeMemoryError("too little"), DecodeOutOfMemoryError, "too little"),
]


@pytest.mark.parametrize(("error", "raised", "reason"), ERRORS)
def test_every_error_names_the_place_of_the_latent(opened, error, raised, reason):
    with pytest.raises(raised) as failed:
        with latent_backup.keep_latent_until_done(embedded_host, LATENT):
            raise error
    assert failed.value.__cause__ is error
    assert str(failed.value).startswith(reason)
    assert f"The latent is kept in {kept_in(opened)}" in str(failed.value)
    assert getattr(failed.value, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize("end", [Cancelled("stopped"), KeyboardInterrupt()], ids=repr)
def test_cancel_stays_a_cancel(opened, caplog, end):
    with caplog.at_level(**WARNINGS), pytest.raises(type(end)) as ended:
        with latent_backup.keep_latent_until_done(embedded_host, LATENT):
            raise end
    assert ended.value is end
    assert f"its latent is kept in {kept_in(opened)}" in caplog.text


@pytest.mark.parametrize(("end", "kept"), [(Cancelled("end"), 0), (ValueError("end"), 1)])
def test_cancelled_save_leaves_no_latent(run, output, monkeypatch, end, kept):
    monkeypatch.setattr("wanstream.nodes.runs.video_file.write_video", mock.Mock(side_effect=end))
    with pytest.raises(Exception, match="end"):
        run(graph(), more_nodes=MADE)
    assert len([*output.rglob("*.latent")]) == kept


NO_MEMORY = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("error", [*NO_MEMORY, None], ids=repr)
def test_video_is_made_without_memory_or_place_for_the_copy(
    opened, tmp_path, monkeypatch, caplog, error
):
    if error is None:
        monkeypatch.setattr(embedded_host.files, "temp_folder", lambda: tmp_path / "gone")
        (opened / "latents").touch()
    else:
        monkeypatch.setattr("safetensors.torch.save", mock.Mock(side_effect=error))
    done = False
    with caplog.at_level(**WARNINGS), pytest.raises(VaeMemoryError, match=r"^too little$"):
        with latent_backup.keep_latent_until_done(embedded_host, LATENT):
            done = True
        with latent_backup.keep_latent_until_done(embedded_host, LATENT):
            raise VaeMemoryError("too little")
    assert done
    assert caplog.text.count("could not be saved before the video is made") == 2
    assert not [*opened.rglob("*.latent")]


@pytest.mark.parametrize("there", [True, False])
def test_only_a_new_and_empty_folder_is_removed(opened, there):
    folder = opened / "latents"
    if there:
        folder.mkdir()
    with latent_backup.keep_latent_until_done(embedded_host, LATENT):
        kept_in(opened)
    assert folder.exists() == there
    with latent_backup.keep_latent_until_done(embedded_host, LATENT):
        (folder / "other.latent").touch()
    assert [path.name for path in folder.iterdir()] == ["other.latent"]


def test_full_disk_keeps_the_latent_or_leaves_nothing(opened):
    noise = torch.rand(30, 64, 64, 3)

    def refusal(room: int, kind: type[OSError]) -> str:
        with largest_file(room), pytest.raises(kind) as failed:
            with latent_backup.keep_latent_until_done(embedded_host, LATENT):
                write_video(opened / "a.mp4", noise, fps=16, crf=1, metadata={})
        assert failed.value.errno == errno.EFBIG
        return str(failed.value)

    refusal(1_000, VideoFileError)
    assert list(opened.iterdir()) == []
    said = refusal(20_000, latent_backup.VideoNotSavedError)
    assert f"The latent is kept in {kept_in(opened)}" in said
    assert [path.name for path in opened.iterdir()] == ["latents"]
