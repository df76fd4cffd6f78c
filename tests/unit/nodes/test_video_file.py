from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import av
import pytest
import torch

from wanstream.nodes.runs.video_file import (
    FORMATS,
    Sound,
    VideoFileError,
    available_formats,
    write_video,
)

GREY = torch.full((5, 32, 48, 3), 0.5)


def read_frames(path: Path) -> torch.Tensor:
    with av.open(str(path)) as container:
        pixels = [
            torch.from_numpy(frame.to_ndarray(format="rgb24"))
            for frame in container.decode(video=0)
        ]
    return torch.stack(pixels).float() / 255


def test_the_file_holds_the_frames_the_rate_and_the_graph(tmp_path: Path) -> None:
    frames = torch.linspace(0, 1, 9).view(9, 1, 1, 1).expand(9, 32, 48, 3)
    graph = {
        "sampler": {
            "class_type": "WanStreamSampler",
            "inputs": {"seed": 7, "text": "caf\u00e9 = \u00bd; #1"},
        }
    }

    write_video(
        tmp_path / "a.mp4",
        frames,
        fps=16,
        crf=10,
        metadata={"prompt": graph, "workflow": {"nodes": []}},
    )

    with av.open(str(tmp_path / "a.mp4")) as container:
        (stream,) = container.streams
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.frames, stream.average_rate) == (48, 32, 9, 16)
        assert json.loads(container.metadata["prompt"]) == graph
        assert json.loads(container.metadata["workflow"]) == {"nodes": []}
    assert (read_frames(tmp_path / "a.mp4") - frames).abs().max() < 0.03
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("kind", [each for each in available_formats() if "10 bit" in each])
def test_ten_bits_keep_levels_that_eight_merge(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{FORMATS[kind].suffix}"
    frames = torch.linspace(0.4, 0.6, 512).view(1, 1, 512, 1).expand(3, 64, 512, 3)
    write_video(path, frames, fps=16, crf=1, metadata={"prompt": {"a": 1}}, kind=kind)
    with av.open(str(path)) as container:
        assert json.loads(container.metadata["prompt"]) == {"a": 1}
        first = next(container.decode(video=0)).reformat(format="gray10le").to_ndarray()
    assert len(set(first[32].tolist())) > 60


@pytest.mark.parametrize(("channels", "rate"), [(1, 44100), (2, 44100), (2, 192_000), (1, 5000)])
def test_sound_ends_with_the_frames_each_time(tmp_path: Path, channels: int, rate: int) -> None:
    wave = torch.sin(torch.arange(3 * rate) * 2000 / rate).expand(1, channels, -1)
    sound = Sound(wave, rate)
    for _ in range(2):  # a decoding is repeated with smaller tiles if memory runs out
        write_video(tmp_path / "a.mp4", GREY, fps=5, crf=20, metadata={}, sound=sound)
        with av.open(str(tmp_path / "a.mp4")) as container:
            (stream,) = container.streams.audio
            assert float(stream.duration * stream.time_base) == pytest.approx(1, abs=0.03)
            heard = [frame.to_ndarray() for frame in container.decode(audio=0)]
        assert heard[5].shape[0] == channels
        assert abs(heard[5]).max() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("waveform", "reason"),
    [
        (torch.zeros(1, 6, 100), r"not \[1, 6, 100\]"),
        (torch.zeros(2, 100), r"not \[2, 100\]"),
        (torch.full((1, 1, 100), float("nan")), "not finite"),
    ],
)
def test_sound_that_is_none_is_refused(waveform: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sound(waveform, 48000)


def test_metadata_comes_before_the_pictures(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", GREY, fps=16, crf=20, metadata={"prompt": {}})
    content = (tmp_path / "a.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"prompt") < content.index(b"mdat")


@pytest.mark.parametrize(
    "colour", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.8, 0.4, 0.1)]
)
def test_colours_survive_and_are_tagged(tmp_path: Path, colour: tuple[float, ...]) -> None:
    frames = torch.tensor(colour).expand(2, 32, 32, 3)
    write_video(tmp_path / "a.mp4", frames, fps=16, crf=1, metadata={})
    with av.open(str(tmp_path / "a.mp4")) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.colorspace, codec.color_primaries, codec.color_trc, codec.color_range) == (
            1,
            1,
            1,
            1,
        )
    assert (read_frames(tmp_path / "a.mp4") - frames).abs().max() < 0.02


def test_values_outside_the_range_are_clamped(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", torch.cat([GREY - 5, GREY + 5]), fps=16, crf=1, metadata={})
    frames = read_frames(tmp_path / "a.mp4")
    assert frames[0].max() < 0.02
    assert frames[-1].min() > 0.98


@pytest.mark.parametrize(("height", "width"), [(79, 105), (79, 104), (80, 105), (1, 1), (33, 2)])
def test_odd_sides_repeat_their_last_row_and_column(
    tmp_path: Path, height: int, width: int
) -> None:
    frames = torch.rand(3, height, width, 3, generator=torch.Generator().manual_seed(0))
    rows, columns = (torch.arange(side + side % 2).clamp(max=side - 1) for side in (height, width))
    for name, given in (("odd", frames), ("even", frames[:, rows][:, :, columns])):
        write_video(tmp_path / f"{name}.mp4", given, fps=16, crf=1, metadata={})
    assert (tmp_path / "odd.mp4").read_bytes() == (tmp_path / "even.mp4").read_bytes()


@pytest.mark.parametrize("fps", [16, 23.976, 0.5])
def test_frame_rates_need_not_be_whole(tmp_path: Path, fps: float) -> None:
    write_video(tmp_path / "a.mp4", GREY, fps=fps, crf=20, metadata={})
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert float(container.streams.video[0].average_rate) == pytest.approx(fps, rel=1e-3)


M_PERTURB = -6
"""Option for glibc's mallopt: fill pattern for uninitialised memory."""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is filled by glibc")
@pytest.mark.parametrize(("height", "width"), [(64, 80), (96, 208)])
def test_equal_frames_give_equal_bytes_whatever_memory_holds(
    tmp_path: Path, height: int, width: int
) -> None:
    libc, drawn = ctypes.CDLL(None), torch.Generator().manual_seed(0)
    squares = (
        torch.rand(height // 8, width // 8, 3, generator=drawn)
        .repeat_interleave(8, 0)
        .repeat_interleave(8, 1)
    )
    moving = torch.stack([torch.roll(squares, 3 * at, 1) for at in range(9)])
    frames = 0.8 * moving + 0.2 * torch.rand(9, height, width, 3, generator=drawn)
    made = set()
    for filled_with in (1, 85, 170):
        libc.mallopt(M_PERTURB, filled_with)
        try:
            write_video(tmp_path / "a.mp4", frames, fps=16, crf=18, metadata={})
        finally:
            libc.mallopt(M_PERTURB, 0)
        made.add((tmp_path / "a.mp4").read_bytes())
    assert len(made) == 1


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((0, 32, 32, 3), "needs frames"),
        ((5, 32, 32, 4), "needs frames"),
        ((32, 32, 3), "needs frames"),
    ],
)
def test_frames_that_make_no_video_are_refused(
    tmp_path: Path, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        write_video(tmp_path / "a.mp4", torch.zeros(shape), fps=16, crf=20, metadata={})
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_first_frame_is_not_one_of_writing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="weights"):
        write_video(
            tmp_path / "a.mp4",
            map(Path.read_bytes, [tmp_path / "weights"]),
            fps=16,
            crf=20,
            metadata={},
        )
    assert not [*tmp_path.iterdir()]


def test_a_missing_folder_is_reported_by_path(tmp_path: Path) -> None:
    with pytest.raises(VideoFileError, match=r"gone/a\.mp4 could not be written: No such file"):
        write_video(tmp_path / "gone" / "a.mp4", GREY, fps=16, crf=20, metadata={})
