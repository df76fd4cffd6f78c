"""Owns the MP4 on disk: frames go to the encoder one by one, and no unfinished file is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import av
import torch

# H.273 code point of BT.709. Untagged files are read as BT.601 by some players and as BT.709 by others: colours shift.
_BT709 = 1
_LIMITED_RANGE = 1

# Without the first flag the container drops every key that QuickTime does not know, `prompt` and `workflow` included.
# The second puts the metadata in front: ComfyUI's canvas looks for it in the first 64 MB only.
_MOVFLAGS = "use_metadata_tags+faststart"


class VideoFileError(OSError):
    """The video could not be written; `errno` is that of the failed call."""


def write_mp4(path: Path, frames: torch.Tensor, *, fps: float, crf: int, metadata: Mapping[str, object]) -> None:
    """Write `frames` ([N, H, W, 3], 0..1, H and W even) to `path` as H.264, 4:2:0, 8 bit.

    `metadata` goes into the container as one JSON text per key, where ComfyUI looks for `prompt` and `workflow`.
    The file appears under its name only when it is complete. Raises `ValueError` for frames that H.264 cannot hold and
    `VideoFileError` when the file cannot be written.
    """
    _check_frames(frames)
    unfinished = path.with_name(path.name + ".part")
    try:
        _encode(unfinished, frames, fps=fps, crf=crf, metadata=metadata)
        unfinished.replace(path)
    except OSError as err:
        raise VideoFileError(err.errno, f"{path} could not be written: {err.strerror}") from err
    finally:
        unfinished.unlink(missing_ok=True)


def _check_frames(frames: torch.Tensor) -> None:
    if frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) == 0:
        raise ValueError(f"a video needs frames [N, H, W, 3], not {list(frames.shape)}")
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise ValueError(f"H.264 needs an even width and height, not {width}x{height}: crop or scale the images")


def _encode(path: Path, frames: torch.Tensor, *, fps: float, crf: int, metadata: Mapping[str, object]) -> None:
    _, height, width, _ = frames.shape
    with av.open(str(path), "w", format="mp4", options={"movflags": _MOVFLAGS}) as container:
        for key, value in metadata.items():
            container.metadata[key] = json.dumps(value)
        stream = container.add_stream("libx264", rate=Fraction(round(fps * 1000), 1000), options={"crf": str(crf)})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        _tag_bt709(stream.codec_context)
        for frame in _video_frames(frames):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _tag_bt709(codec: av.VideoCodecContext) -> None:
    codec.colorspace = codec.color_primaries = codec.color_trc = _BT709
    codec.color_range = _LIMITED_RANGE


def _video_frames(frames: torch.Tensor) -> Iterable[av.VideoFrame]:
    for frame in frames:
        pixels = frame.float().clamp(0, 1).mul(255).round().to("cpu", torch.uint8).numpy()
        picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        yield picture.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
