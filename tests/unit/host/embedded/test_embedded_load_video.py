"""LoadVideo and GetVideoComponents without ComfyUI."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from wanstream.host import io
from wanstream.host.embedded.load_video import VideoInputError
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.runs import write_video
from wanstream.nodes.runs.video_file import Sound
from wanstream.sampling.steps import InsufficientMemoryError, errors
from wanstream.tests.support.embedded import embedded_host

# Decodes a video in a separate process and prints the peak memory in KiB.
PEAK = """
import sys
from pathlib import Path

from wanstream.host.embedded.load_video import GetVideoComponents, VideoFile


def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak counts from here
before = status("VmRSS")
GetVideoComponents.execute(VideoFile(Path(sys.argv[1])))
print(status("VmHWM") - before)
"""


class Sink(io.ComfyNode):
    """Output node, to load images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Sink", inputs=[io.Image.Input("image")], is_output_node=True)

    @classmethod
    def execute(cls, image: torch.Tensor) -> io.NodeOutput:
        return io.NodeOutput()


@pytest.fixture
def load(run: Callable[..., History]) -> Callable[[str], tuple[Any, ...]]:
    def load(name: str) -> tuple[Any, ...]:
        prompt = {
            "1": {"class_type": "LoadVideo", "inputs": {"file": name}},
            "2": {"class_type": "GetVideoComponents", "inputs": {"video": ["1", 0]}},
            "3": {"class_type": "Sink", "inputs": {"image": ["2", 0]}},
        }
        return run(prompt, nodes=[Sink], keep=["2"]).results["2"]

    return load


def test_every_frame_is_decoded_in_order(
    load: Callable[[str], tuple[Any, ...]], tmp_path: Path
) -> None:
    frames = torch.linspace(0.1, 0.9, 7).view(7, 1, 1, 1).expand(7, 32, 48, 3)
    write_video(tmp_path / "input" / "a.mp4", frames, fps=12, crf=1, metadata={})
    images, audio, rate = load("a.mp4")
    assert images.shape == (7, 32, 48, 3)
    assert images.dtype == torch.float32
    assert torch.allclose(images, frames, atol=0.03)
    assert audio is None
    assert rate == 12.0


def test_sound_is_decoded_with_the_frames(
    load: Callable[[str], tuple[Any, ...]], tmp_path: Path
) -> None:
    sound = Sound(torch.sin(torch.arange(16000) / 5).expand(1, 2, -1), 16000)
    frames = torch.full((4, 32, 48, 3), 0.5)
    path = tmp_path / "input" / "a.mp4"
    write_video(path, frames, fps=4, crf=1, metadata={}, sound=sound)
    _, audio, _ = load("a.mp4")
    assert audio["sample_rate"] == 16000
    channels, samples = audio["waveform"].shape[1:]
    assert (channels, samples) == (2, pytest.approx(16000, abs=2048))
    assert audio["waveform"].abs().max() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", ["none.mp4", "../outside.mp4"])
def test_a_file_that_is_not_there_is_refused(
    load: Callable[[str], tuple[Any, ...]], tmp_path: Path, name: str
) -> None:
    (tmp_path / "outside.mp4").touch()
    with pytest.raises(InvalidWorkflowError, match="Invalid video file"):
        load(name)


def test_what_is_no_video_is_refused(
    load: Callable[[str], tuple[Any, ...]], tmp_path: Path
) -> None:
    (tmp_path / "input" / "a.mp4").write_bytes(b"no video")
    with pytest.raises(NodeFailedError, match=r"a\.mp4 cannot be decoded") as failed:
        load("a.mp4")
    assert isinstance(failed.value.__cause__, VideoInputError)


def _write_jpegs(path: Path, frames: Sequence[tuple[int, int] | bytes]) -> None:
    """Write an MJPEG video: a picture (width, height) or packet bytes for each frame."""
    with av.open(path, "w") as file:
        stream = file.add_stream("mjpeg", rate=12, width=48, height=32, pix_fmt="yuvj420p")
        for index, frame in enumerate(frames):
            if isinstance(frame, bytes):
                packet = av.Packet(frame)
            else:
                encoder = av.CodecContext.create("mjpeg", "w")
                encoder.width, encoder.height = frame
                encoder.pix_fmt, encoder.time_base = "yuvj420p", Fraction(1, 12)
                (packet,) = encoder.encode(av.VideoFrame(*frame, "yuvj420p"))
            packet.stream, packet.time_base, packet.pts, packet.dts = (
                stream,
                Fraction(1, 12),
                index,
                index,
            )
            file.mux(packet)


@pytest.fixture
def short_video(tmp_path: Path) -> str:
    """Write 7 frames at 48x32."""
    write_video(tmp_path / "input" / "a.mp4", torch.rand(7, 32, 48, 3), fps=12, crf=1, metadata={})
    return "a.mp4"


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures in /proc")
def test_the_frames_are_in_memory_once(tmp_path: Path) -> None:
    write_video(
        tmp_path / "a.mp4",
        torch.zeros(1, 1, 1, 3).expand(100, 240, 320, 3),
        fps=12,
        crf=30,
        metadata={},
    )
    command = [sys.executable, "-c", PEAK, str(tmp_path / "a.mp4")]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    frames = 100 * 240 * 320 * 3 * 4 / 1024
    assert frames < peak < 1.3 * frames


def test_frames_for_which_there_is_too_little_ram_are_refused(
    load: Callable[[str], tuple[Any, ...]], short_video: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        errors, "insufficient_ram", lambda nbytes: asked.append(nbytes) or 2_000_000_000
    )
    with pytest.raises(
        NodeFailedError, match=r"the 7 frames of a\.mp4 \(48x32\) take .* and 2\.00 GB are free"
    ) as no:
        load(short_video)
    assert isinstance(no.value.__cause__, InsufficientMemoryError)
    assert asked == [7 * 32 * 48 * 3 * 4]


@pytest.mark.parametrize(
    "packets", [1, 8 + 3], ids=["while they are counted", "while they are decoded"]
)
def test_a_run_can_be_stopped_at_every_packet(
    load: Callable[[str], tuple[Any, ...]],
    short_video: str,
    monkeypatch: pytest.MonkeyPatch,
    packets: int,
) -> None:
    class Stop(Exception):
        pass

    polls: list[str | None] = []

    def poll() -> None:
        polls.append(embedded_host.events.executing().node_id)
        if polls.count("2") == packets:
            raise Stop

    monkeypatch.setattr(embedded_host.events, "raise_if_stopped", poll)
    with pytest.raises(NodeFailedError) as stopped:
        load(short_video)
    assert isinstance(stopped.value.__cause__, Stop)
    assert polls.count("2") == packets


@pytest.mark.parametrize(
    ("rotation", "size", "corner"),
    [
        (0, (32, 48), (0, 0)),
        (-90, (48, 32), (0, -1)),
        (180, (32, 48), (-1, -1)),
        (90, (48, 32), (-1, 0)),
    ],
)
def test_a_rotated_video_is_turned_upright(
    load: Callable[[str], tuple[Any, ...]],
    tmp_path: Path,
    rotation: int,
    size: tuple[int, int],
    corner: tuple[int, int],
) -> None:
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:16, :24] = 255
    with av.open(tmp_path / "input" / "a.mp4", "w") as file:
        stream = file.add_stream("libx264", rate=12, width=48, height=32, pix_fmt="yuv420p")
        stream.set_display_rotation(rotation)
        file.mux([*stream.encode(av.VideoFrame.from_ndarray(picture)), *stream.encode()])
    (image,) = load("a.mp4")[0]
    assert image.shape == (*size, 3)
    bright = [at for at in ((0, 0), (0, -1), (-1, -1), (-1, 0)) if image[at].min() > 0.9]
    assert bright == [corner]


def test_damaged_packets_are_skipped(
    load: Callable[[str], tuple[Any, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_jpegs(tmp_path / "input" / "a.mkv", [(48, 32), (48, 32), b"damaged" * 20, (48, 32)])
    with caplog.at_level(logging.WARNING):
        images, _, _ = load("a.mkv")
    assert images.shape == (3, 32, 48, 3)
    assert "a.mkv: 1 damaged packets skipped, 3 frames decoded" in caplog.text


def test_a_video_of_damaged_packets_only_is_refused(
    load: Callable[[str], tuple[Any, ...]], tmp_path: Path
) -> None:
    _write_jpegs(tmp_path / "input" / "a.mkv", [b"damaged" * 20])
    with pytest.raises(NodeFailedError, match=r"a\.mkv has no frames that can be decoded"):
        load("a.mkv")


def test_a_video_that_changes_its_size_is_refused(
    load: Callable[[str], tuple[Any, ...]], tmp_path: Path
) -> None:
    _write_jpegs(tmp_path / "input" / "a.mkv", [(48, 32), (48, 32), (64, 16)])
    with pytest.raises(
        NodeFailedError, match=r"changes its size from 48x32 to 64x16 at frame 2"
    ) as failed:
        load("a.mkv")
    assert isinstance(failed.value.__cause__, VideoInputError)
