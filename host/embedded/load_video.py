"""LoadVideo and GetVideoComponents for workflows with a control or source video."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import av
import torch

from ..api import current_host
from ..folders import OutsideFolderError
from . import io
from .adapter import EmbeddedHost

_VIDEOS = (".avi", ".mkv", ".mov", ".mp4", ".webm")


class VideoInputError(ValueError):
    """The file has no frames that can be decoded."""


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
        return f"Invalid video file: {file} is not in {host.folders.input}: put it there (or see --input)"

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
        """Return IMAGE [frames, H, W, 3] float32 in 0..1, None for the sound, and the frames per second."""
        try:
            with av.open(str(video.path)) as container:
                stream = container.streams.video[0]
                frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
                rate = stream.average_rate
        except (av.FFmpegError, IndexError) as err:
            raise VideoInputError(f"{video.path.name} cannot be decoded ({err}): choose a video file") from err
        if not frames:
            raise VideoInputError(f"{video.path.name} has no frames: choose another video file")
        return io.NodeOutput(torch.stack(frames).float() / 255.0, None, float(rate) if rate else 1.0)


def _host() -> EmbeddedHost:
    host = current_host()
    assert isinstance(host, EmbeddedHost), f"the embedded LoadVideo is running in {host.name()}"
    return host
