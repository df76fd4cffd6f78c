"""LoadVideo and GetVideoComponents for workflows with a control or source video."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import av
import numpy as np
import torch

from ...sampling.steps import check_ram
from ...shapes import FP32_BYTES
from ..events import Events
from .input_node import EmbeddedNode, InputFileNode
from .workflow import io

logger = logging.getLogger(__name__)


class VideoInputError(ValueError):
    """The file has no decodable frames, or frames with several sizes."""


@dataclass(frozen=True)
class VideoFile:
    """A VIDEO: a file in the input folder, decoded when frames are needed."""

    path: Path


class LoadVideo(InputFileNode):
    """Choose a video from the input folder."""

    KIND = "video"
    ENDINGS = (".avi", ".mkv", ".mov", ".mp4", ".webm")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadVideo",
            display_name="Load Video",
            category="image/video",
            inputs=[io.Combo.Input("file", options=cls.input_names(), upload=io.UploadType.video)],
            outputs=[io.Video.Output()],
        )

    @classmethod
    def validate_inputs(cls, file: str) -> bool | str:
        return cls.check(file)

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        """Return a VIDEO."""
        return io.NodeOutput(VideoFile(cls.files().input_path(file)))


class GetVideoComponents(EmbeddedNode):
    """Decode the frames and the sound in a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GetVideoComponents",
            display_name="Get Video Components",
            category="image/video",
            inputs=[io.Video.Input("video")],
            outputs=[
                io.Image.Output(display_name="images"),
                io.Audio.Output(display_name="audio"),
                io.Float.Output(display_name="fps"),
            ],
        )

    @classmethod
    def execute(cls, video: VideoFile) -> io.NodeOutput:
        """Return IMAGE [frames, H, W, 3] float32 in 0..1, AUDIO or None, and frames per second.

        Raises:
            VideoInputError: the file cannot be decoded, has no frames, or the frame size changes.
            InsufficientMemoryError: the frames do not fit into RAM.
            Exception: the host's interrupt.
        """
        events = cls.events()
        shape, rate = _measured(video.path, events)
        frames, height, width, _ = shape
        check_ram(
            prod(shape) * FP32_BYTES,
            subject=f"the {frames} frames of {video.path.name} ({width}x{height}) take",
            remedy="cut or scale down the video",
        )
        images = torch.empty(shape)
        with _opened(video.path) as (container, stream):
            decoded = (frame for frame in _decoded(container, stream, events) if frame is not None)
            for image, frame in zip(images, decoded, strict=True):
                image.copy_(torch.from_numpy(_upright(frame))).div_(255.0)
        return io.NodeOutput(images, _sound(video.path), rate)


def _sound(path: Path) -> dict[str, object] | None:
    """Return AUDIO with the first sound stream in a file, mono or stereo, or None without one."""
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        layout = "mono" if stream.channels == 1 else "stereo"
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=stream.rate)
        frames = [
            torch.from_numpy(part.to_ndarray())
            # None flushes the resampler.
            for frame in (*container.decode(stream), None)
            for part in resampler.resample(frame)
        ]
        return {"waveform": torch.cat(frames, dim=1)[None], "sample_rate": stream.rate}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """Open the first video stream in a file.

    Raises VideoInputError for files FFmpeg cannot decode.
    """
    try:
        with av.open(str(path)) as container:
            yield container, container.streams.video[0]
    except (av.FFmpegError, IndexError) as err:
        raise VideoInputError(
            f"{path.name} cannot be decoded ({err}): choose a video file"
        ) from err


def _decoded(
    container: av.container.InputContainer, stream: av.VideoStream, events: Events
) -> Iterator[av.VideoFrame | None]:
    """Yield the frames in order, and None for each damaged packet instead of frames."""
    for packet in container.demux(stream):
        events.raise_if_stopped()
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            yield None
        else:
            yield from frames


def _measured(path: Path, events: Events) -> tuple[tuple[int, int, int, int], float]:
    """Return a video's shape [frames, H, W, 3] and frames per second."""
    # This decodes all frames once more. Containers may lack a frame count or have a wrong one,
    # and keeping the frames would take a quarter more RAM.
    with _opened(path) as (container, stream):
        frames = _decoded(container, stream, events)
        found = [frame and _upright_size(frame) for frame in frames]
        rate = stream.average_rate or 1.0
    sizes = [size for size in found if size is not None]
    if not sizes:
        raise VideoInputError(
            f"{path.name} has no frames that can be decoded: choose another video file"
        )
    _check_sizes(sizes, path.name)
    damaged = found.count(None)
    if damaged:
        logger.warning(
            "%s: %d damaged packets skipped, %d frames decoded", path.name, damaged, len(sizes)
        )
    return (len(sizes), *sizes[0], 3), float(rate)


def _check_sizes(sizes: Sequence[tuple[int, int]], name: str) -> None:
    """Raise VideoInputError for frames with several sizes: one tensor cannot hold them.

    Sizes are (height, width).
    """
    height, width = sizes[0]
    for index, other in enumerate(sizes):
        if other != sizes[0]:
            raise VideoInputError(
                f"{name} changes its size from {width}x{height} to {other[1]}x{other[0]} at frame "
                f"{index}: convert it to one size"
            )


def _quarter_turns(frame: av.VideoFrame) -> int:
    """Return the anticlockwise quarter turns to upright.

    As in ComfyUI, angles in between are rounded down.
    """
    return int(frame.rotation // 90)


def _upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    """Return (height, width) after turning a frame upright."""
    if _quarter_turns(frame) % 2:
        return frame.width, frame.height
    return frame.height, frame.width


def _upright(frame: av.VideoFrame) -> np.ndarray:
    """Return a frame turned upright, uint8 [H, W, 3]."""
    # torch cannot wrap an array view with negative strides.
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), k=_quarter_turns(frame)))
