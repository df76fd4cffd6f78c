"""LoadVideo and GetVideoComponents without ComfyUI."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from wanstream.host.embedded.load_video import VideoInputError
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.runs import write_video
from wanstream.nodes.runs.video_file import Sound
from wanstream.sampling.steps import InsufficientMemoryError
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import Shown
from wanstream.tests.support.host.shipped import node

# Decodes a video in a separate process and prints the peak memory.
PEAK = """
import sys
from pathlib import Path
from wanstream.host.embedded.load_video import GetVideoComponents, VideoFile
from wanstream.tests.support.wan.process_counters import memory_bytes

Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = memory_bytes("VmRSS")
GetVideoComponents.execute(VideoFile(Path(sys.argv[1])))
print(memory_bytes("VmHWM") - before)
"""


@pytest.fixture
def load(run: Callable[..., History]):
    def load(name: str):
        parts = {"2": node("GetVideoComponents", video=["1", 0])}
        prompt = {"1": node("LoadVideo", file=name), **parts, "3": node("Shown", value=["2", 0])}
        return run(prompt, nodes=[Shown], keep=["2"]).results["2"]

    return load


def test_frames_and_sound_are_decoded(load, tmp_path):
    path = tmp_path / "input" / "a.mp4"
    frames = torch.linspace(0.1, 0.9, 7).view(7, 1, 1, 1).expand(7, 32, 48, 3)
    write_video(path, frames, fps=12, crf=1, metadata={})
    images, audio, rate = load("a.mp4")
    assert images.shape == (7, 32, 48, 3)
    assert torch.allclose(images, frames, atol=0.03)
    assert (audio, rate) == (None, 12.0)
    sound = Sound(torch.sin(torch.arange(16000) / 5).expand(1, 2, -1), 16000)
    write_video(path, frames, fps=7, crf=1, metadata={}, sound=sound)
    _, audio, _ = load("a.mp4")
    assert audio["sample_rate"] == 16000
    assert audio["waveform"].shape[1:] == (2, pytest.approx(16000, abs=2048))
    assert audio["waveform"].abs().max() == pytest.approx(1, abs=0.1)


def test_missing_file_or_one_outside_is_refused(load, tmp_path):
    (tmp_path / "outside.mp4").touch()
    for name in ("none.mp4", "../outside.mp4"):
        with pytest.raises(InvalidWorkflowError, match="Invalid video file"):
            load(name)


Frames = list[tuple[int, int] | bytes]


def _write_jpegs(path: Path, frames: Frames) -> None:
    """Write an MJPEG video: a picture (width, height) or packet bytes for each frame."""
    tick = Fraction(1, 12)
    with av.open(path, "w") as file:
        stream = file.add_stream("mjpeg", rate=12, width=48, height=32, pix_fmt="yuvj420p")
        for index, frame in enumerate(frames):
            if isinstance(frame, bytes):
                packet = av.Packet(frame)
            else:
                encoder = av.CodecContext.create("mjpeg", "w")
                encoder.width, encoder.height = frame
                encoder.pix_fmt = "yuvj420p"
                encoder.time_base = tick
                (packet,) = encoder.encode(av.VideoFrame(*frame, "yuvj420p"))
            packet.stream = stream
            packet.time_base = tick
            packet.pts = packet.dts = index
            file.mux(packet)


SMALL = (48, 32)
DAMAGED = b"damaged" * 20
UNUSABLE: list[tuple[Frames | None, str]] = [
    (None, r"a\.mkv cannot be decoded"),
    ([DAMAGED], r"a\.mkv has no frames that can be decoded"),
    ([SMALL, SMALL, (64, 16)], "changes its size from 48x32 to 64x16 at frame 2"),
]


@pytest.mark.parametrize(("frames", "reason"), UNUSABLE)
def test_unusable_video_is_refused(load, tmp_path, frames, reason):
    path = tmp_path / "input" / "a.mkv"
    if frames is None:
        path.write_bytes(b"no video")
    else:
        _write_jpegs(path, frames)
    with pytest.raises(NodeFailedError, match=reason) as failed:
        load("a.mkv")
    assert isinstance(failed.value.__cause__, VideoInputError)


def test_damaged_packets_are_skipped(load, tmp_path, caplog):
    _write_jpegs(tmp_path / "input" / "a.mkv", [SMALL, SMALL, DAMAGED, SMALL])
    with caplog.at_level(logging.WARNING):
        images, _, _ = load("a.mkv")
    assert images.shape == (3, 32, 48, 3)
    assert "a.mkv: 1 damaged packets skipped, 3 frames decoded" in caplog.text


@pytest.fixture
def short_video(tmp_path: Path) -> str:
    """Write 7 frames at 48x32."""
    write_video(tmp_path / "input" / "a.mp4", torch.rand(7, 32, 48, 3), fps=12, crf=1, metadata={})
    return "a.mp4"


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures in /proc")
def test_frames_are_in_memory_once(tmp_path):
    zeros = torch.zeros(1, 1, 1, 3).expand(100, 240, 320, 3)
    write_video(tmp_path / "a.mp4", zeros, fps=12, crf=30, metadata={})
    command = [sys.executable, "-c", PEAK, str(tmp_path / "a.mp4")]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    frames = 100 * 240 * 320 * 3 * 4
    assert frames < peak < 1.3 * frames


def test_too_little_ram_is_refused(load, short_video, asked_ram):
    message = r"the 7 frames of a\.mp4 \(48x32\) take .* and 2\.00 GB are free"
    with pytest.raises(NodeFailedError, match=message) as failed:
        load(short_video)
    assert isinstance(failed.value.__cause__, InsufficientMemoryError)
    assert asked_ram == [7 * 32 * 48 * 3 * 4]


@pytest.mark.parametrize("packets", [1, 8 + 3], ids=["counted", "decoded"])
def test_run_can_be_stopped_at_every_packet(load, short_video, monkeypatch, packets):
    polls: list[str | None] = []

    def poll() -> None:
        polls.append(embedded_host.events.executing().node_id)
        if polls.count("2") == packets:
            raise LookupError

    monkeypatch.setattr(embedded_host.events, "raise_if_stopped", poll)
    with pytest.raises(NodeFailedError) as stopped:
        load(short_video)
    assert isinstance(stopped.value.__cause__, LookupError)
    assert polls.count("2") == packets


CORNERS = {0: (0, 0), -90: (0, -1), 180: (-1, -1), 90: (-1, 0)}


@pytest.mark.parametrize("rotation", CORNERS)
def test_rotated_video_is_turned_upright(load, tmp_path, rotation):
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, :24] = 255
    with av.open(tmp_path / "input" / "a.mp4", "w") as file:
        stream = file.add_stream("libx264", rate=12, width=48, height=32, pix_fmt="yuv420p")
        stream.set_display_rotation(rotation)
        file.mux([*stream.encode(av.VideoFrame.from_ndarray(picture)), *stream.encode()])
    (image,) = load("a.mp4")[0]
    assert image.shape == ((32, 48, 3) if rotation in (0, 180) else (48, 32, 3))
    bright = [corner for corner in CORNERS.values() if image[corner].min() > 0.9]
    assert bright == [CORNERS[rotation]]
