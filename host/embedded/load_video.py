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

from ...devices import insufficient_ram
from ...sampling import InsufficientMemoryError
from ...schema import FP32_BYTES, format_need
from ..api import current_host
from ..folders import OutsideFolderError
from . import io
from .adapter import EmbeddedHost

logger = logging.getLogger(__name__)

_VIDEOS = (".avi", ".mkv", ".mov", ".mp4", ".webm")


class VideoInputError(ValueError):
    """The file has no frames that can be decoded, or frames of several sizes."""


@dataclass(frozen=True)
class VideoFile:
    """A VIDEO: a file of the input folder, which is decoded when its frames are needed."""

    path: Path


class LoadVideo(io.ComfyNode):
    """Choose a video of the input folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        videos = [name for name in _host().input_names() if name.lower().endswith(_VIDEOS)]
        return io.Schema(
            node_id="LoadVideo",
            display_name="Load Video",
            category="image/video",
            inputs=[io.Combo.Input("file", options=videos, upload=io.UploadType.video)],
            outputs=[io.Video.Output()],
        )

    @classmethod
    def validate_inputs(cls, file: str) -> bool | str:
        host = _host()
        try:
            if host.input_path(file).is_file():
                return True
        except OutsideFolderError as err:
            return f"Invalid video file: {err}"
        return f"Invalid video file: {host.missing_file(file, _VIDEOS)}"

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        """Return a VIDEO."""
        return io.NodeOutput(VideoFile(_host().input_path(file)))


class GetVideoComponents(io.ComfyNode):
    """Decode the frames of a video, without its sound."""

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
        """Return IMAGE [frames, H, W, 3] float32 in 0..1, None for the sound, and the frames per second.

        Raises:
            VideoInputError: the file cannot be decoded, has no frames, or changes their size.
            InsufficientMemoryError: the frames do not fit into RAM.
            Exception: the host's interrupt.
        """
        shape, rate = _measured(video.path)
        _check_ram(shape, video.path.name)
        images = torch.empty(shape)
        with _opened(video.path) as (container, stream):
            frames = (frame for frame in _decoded(container, stream) if frame is not None)
            for image, frame in zip(images, frames, strict=True):
                image.copy_(torch.from_numpy(_upright(frame))).div_(255.0)
        return io.NodeOutput(images, None, rate)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """Open the first video stream of a file; raises VideoInputError for what FFmpeg cannot decode."""
    try:
        with av.open(str(path)) as container:
            yield container, container.streams.video[0]
    except (av.FFmpegError, IndexError) as err:
        raise VideoInputError(f"{path.name} cannot be decoded ({err}): choose a video file") from err


def _decoded(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame | None]:
    """Yield the frames in order, and None for each packet that is damaged, whose frames are missing."""
    host = current_host()
    for packet in container.demux(stream):
        host.raise_if_stopped()
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            yield None
        else:
            yield from frames


def _measured(path: Path) -> tuple[tuple[int, int, int, int], float]:
    """Return the shape [frames, H, W, 3] of a video and its frames per second."""
    # The frames are decoded once more for this: containers may have no count of them, or a wrong one, and keeping them
    # would take a fourth more RAM.
    with _opened(path) as (container, stream):
        found = [None if frame is None else _upright_size(frame) for frame in _decoded(container, stream)]
        rate = stream.average_rate
    sizes = [size for size in found if size is not None]
    if not sizes:
        raise VideoInputError(f"{path.name} has no frames that can be decoded: choose another video file")
    _check_sizes(sizes, path.name)
    if damaged := found.count(None):
        logger.warning("%s: %d damaged packets skipped, %d frames decoded", path.name, damaged, len(sizes))
    return (len(sizes), *sizes[0], 3), float(rate) if rate else 1.0


def _check_sizes(sizes: Sequence[tuple[int, int]], name: str) -> None:
    """Raise VideoInputError for frames of several sizes (height, width), which do not fit into one tensor."""
    height, width = sizes[0]
    for index, other in enumerate(sizes):
        if other != sizes[0]:
            raise VideoInputError(
                f"{name} changes its size from {width}x{height} to {other[1]}x{other[0]} at frame {index}: "
                "convert it to one size"
            )


def _quarter_turns(frame: av.VideoFrame) -> int:
    """Return the anticlockwise quarter turns to upright; as in ComfyUI, angles in between are rounded down."""
    return int(frame.rotation // 90)


def _upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    """Return (height, width) of a frame turned upright."""
    return (frame.width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, frame.width)


def _upright(frame: av.VideoFrame) -> np.ndarray:
    """Return a frame turned upright, uint8 [H, W, 3]."""
    # A view with negative strides has no tensor.
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), k=_quarter_turns(frame)))


def _check_ram(shape: tuple[int, int, int, int], name: str) -> None:
    """Raise InsufficientMemoryError for frames whose allocation would make the system kill the process."""
    needed = prod(shape) * FP32_BYTES
    lacking = insufficient_ram(needed)
    if lacking is not None:
        frames, height, width, _ = shape
        raise InsufficientMemoryError(
            f"the {frames} frames of {name} ({width}x{height}) take {format_need(needed)} of RAM, and "
            f"{format_need(lacking)} are free (swap included): cut or scale down the video"
        )


def _host() -> EmbeddedHost:
    host = current_host()
    assert isinstance(host, EmbeddedHost), f"the embedded LoadVideo is running in {host.name()}"
    return host
