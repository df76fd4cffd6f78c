import ctypes
import json
import sys
from pathlib import Path

import av
import pytest
import torch

from wanstream.nodes.runs import video_file

GREY = torch.full((5, 32, 48, 3), 0.5)


@pytest.fixture
def write(tmp_path):
    """`write(frames, name="a.mp4", **options)` writes a video and returns the path."""

    def write(frames=GREY, name="a.mp4", **options):
        video_file.write_video(
            tmp_path / name, frames, **{"fps": 16, "crf": 1, "metadata": {}, **options}
        )
        return tmp_path / name

    return write


def read_frames(path: Path) -> torch.Tensor:
    with av.open(str(path)) as container:
        decoded = (frame.to_ndarray(format="rgb24") for frame in container.decode(video=0))
        return torch.stack([torch.from_numpy(each) for each in decoded]).float() / 255


def test_file_has_the_frames_the_rate_and_the_graph(write, tmp_path):
    frames = torch.linspace(0, 1, 9).view(9, 1, 1, 1).expand(9, 32, 48, 3)
    graph = {"sampler": {"inputs": {"seed": 7, "text": "caf\u00e9 = \u00bd; #1"}}}
    metadata = {"prompt": graph, "workflow": {"nodes": []}}
    path = write(frames, crf=10, metadata=metadata)
    with av.open(str(path)) as container:
        (stream,) = container.streams
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.frames, stream.average_rate) == (48, 32, 9, 16)
        assert {name: json.loads(container.metadata[name]) for name in metadata} == metadata
    assert (read_frames(path) - frames).abs().max() < 0.03
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"prompt") < content.index(b"mdat")


@pytest.mark.parametrize(
    "kind", [each for each in video_file.available_formats() if "10 bit" in each]
)
def test_ten_bits_keep_levels_that_eight_merge(write, kind):
    frames = torch.linspace(0.4, 0.6, 512).view(1, 1, 512, 1).expand(3, 64, 512, 3)
    path = write(
        frames, f"a.{video_file.FORMATS[kind].suffix}", metadata={"prompt": {"a": 1}}, kind=kind
    )
    with av.open(str(path)) as container:
        assert json.loads(container.metadata["prompt"]) == {"a": 1}
        first = next(container.decode(video=0)).reformat(format="gray10le").to_ndarray()
    assert len(set(first[32].tolist())) > 60


@pytest.mark.parametrize(("channels", "rate"), [(1, 44100), (2, 44100), (2, 192_000), (1, 5000)])
def test_sound_ends_with_the_frames_each_time(write, channels, rate):
    wave = torch.sin(torch.arange(3 * rate) * 2000 / rate).expand(1, channels, -1)
    sound = video_file.Sound(wave, rate)
    for _ in range(2):  # a decoding is repeated with smaller tiles if memory runs out
        with av.open(str(write(fps=5, sound=sound))) as container:
            (stream,) = container.streams.audio
            assert float(stream.duration * stream.time_base) == pytest.approx(1, abs=0.03)
            heard = [frame.to_ndarray() for frame in container.decode(audio=0)]
        assert heard[5].shape[0] == channels
        assert abs(heard[5]).max() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("colour", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.8, 0.4, 0.1)])
def test_colours_survive_and_are_tagged(write, colour):
    frames = torch.tensor(colour, dtype=torch.float32).expand(2, 32, 32, 3)
    path = write(frames)
    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context
        tags = (codec.colorspace, codec.color_primaries, codec.color_trc, codec.color_range)
    assert tags == (1, 1, 1, 1)
    assert (read_frames(path) - frames).abs().max() < 0.02


def test_values_outside_the_range_are_clamped(write):
    frames = read_frames(write(torch.cat([GREY - 5, GREY + 5])))
    assert frames[0].max() < 0.02
    assert frames[-1].min() > 0.98


@pytest.mark.parametrize(("height", "width"), [(79, 105), (79, 104), (80, 105), (1, 1), (33, 2)])
def test_odd_sides_repeat_their_last_row_and_column(write, height, width):
    frames = torch.rand(3, height, width, 3, generator=torch.Generator().manual_seed(0))
    rows, columns = (torch.arange(side + side % 2).clamp(max=side - 1) for side in (height, width))
    odd = write(frames, "odd.mp4")
    even = write(frames[:, rows][:, :, columns], "even.mp4")
    assert odd.read_bytes() == even.read_bytes()


@pytest.mark.parametrize("fps", [23.976, 0.5])
def test_frame_rates_need_not_be_whole(write, fps):
    with av.open(str(write(fps=fps))) as container:
        assert float(container.streams.video[0].average_rate) == pytest.approx(fps, rel=1e-3)


M_PERTURB = -6
"""Option for glibc's mallopt: fill pattern for uninitialised memory."""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is filled by glibc")
@pytest.mark.parametrize(("height", "width"), [(64, 80), (96, 208)])
def test_equal_frames_give_equal_bytes(write, height, width):
    libc = ctypes.CDLL(None)
    drawn = torch.Generator().manual_seed(0)
    squares = torch.rand(height // 8, width // 8, 3, generator=drawn)
    squares = squares.repeat_interleave(8, 0).repeat_interleave(8, 1)
    moving = torch.stack([torch.roll(squares, 3 * at, 1) for at in range(9)])
    frames = 0.8 * moving + 0.2 * torch.rand(9, height, width, 3, generator=drawn)
    made = set()
    try:
        for filled_with in (1, 85, 170):
            libc.mallopt(M_PERTURB, filled_with)
            made.add(write(frames, crf=18).read_bytes())
    finally:
        libc.mallopt(M_PERTURB, 0)
    assert len(made) == 1


def test_impossible_frames_or_sound_are_refused(write, tmp_path):
    for shape in ((0, 32, 32, 3), (5, 32, 32, 4), (32, 32, 3)):
        with pytest.raises(ValueError, match="needs frames"):
            write(torch.zeros(shape))
    for waveform, reason in (
        (torch.zeros(1, 6, 100), r"not \[1, 6, 100\]"),
        (torch.zeros(2, 100), r"not \[2, 100\]"),
        (torch.full((1, 1, 100), float("nan")), "not finite"),
    ):
        with pytest.raises(ValueError, match=reason):
            video_file.Sound(waveform, 48000)
    with pytest.raises(FileNotFoundError, match="weights"):  # while the first frame is made
        write(map(Path.read_bytes, [tmp_path / "weights"]))
    with pytest.raises(
        video_file.VideoFileError, match=r"gone/a\.mp4 could not be written: No such file"
    ):
        write(name="gone/a.mp4")
    assert list(tmp_path.iterdir()) == []
