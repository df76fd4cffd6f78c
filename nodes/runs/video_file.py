"""MP4 writer: encodes frames one by one and leaves no partial file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import torch

# H.273 code point for BT.709. Some players read untagged files as BT.601 and others as BT.709, which shifts colours.
_BT709 = 1
_LIMITED_RANGE = 1

# Without the first flag the container drops every key unknown to QuickTime, `prompt` and `workflow` included. The
# second puts the metadata in front: ComfyUI's canvas looks for it in the first 64 MB only.
_MOVFLAGS = "use_metadata_tags+faststart"


class VideoFileError(OSError):
    """The video could not be written. `errno` comes from the failed call."""


def write_mp4(
    path: Path,
    frames: Iterable[torch.Tensor],
    *,
    fps: float,
    crf: int,
    metadata: Mapping[str, object],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write frames [H, W, 3], in 0..1 or uint8, to `path` as H.264, 4:2:0, 8 bit, in the size from `video_size`.

    Frames are consumed one by one, so a generator may still be computing them. Equal frames give equal bytes.
    `metadata` is written as one JSON text per key, where ComfyUI looks for `prompt` and `workflow`. The file appears
    under the final name only when complete. `check` is called before every frame and may raise to end the writing.

    Raises:
        ValueError: H.264 cannot encode frames in this shape.
        VideoFileError: the file could not be written.
    """
    # The first frame before the file: an error in reading VAE weights is not a video error.
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ValueError("a video needs frames [H, W, 3], but there are none")
    height, width = video_size(*_size(first))
    # Renamed when complete: a killed process leaves a .part file and no broken video.
    unfinished = path.with_name(path.name + ".part")
    try:
        with av.open(str(unfinished), "w", format="mp4", options={"movflags": _MOVFLAGS}) as container:
            for key, value in metadata.items():
                container.metadata[key] = json.dumps(value)
            options = {"crf": str(crf), **_without_avx512()}
            stream = container.add_stream("libx264", rate=Fraction(round(fps * 1000), 1000), options=options)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            codec = stream.codec_context
            codec.colorspace = codec.color_primaries = codec.color_trc = _BT709
            codec.color_range = _LIMITED_RANGE
            for frame in chain([first], frames):
                check()
                container.mux(stream.encode(_picture(frame)))
            container.mux(stream.encode(None))
        unfinished.replace(path)
    except OSError as err:
        raise VideoFileError(err.errno, f"{path} could not be written: {err.strerror}") from err
    finally:
        unfinished.unlink(missing_ok=True)


def video_size(height: int, width: int) -> tuple[int, int]:
    """Return height and width of a video for this frame size: even, as H.264 needs them.

    An odd side is extended by a copy of the last row or column.
    """
    return height + height % 2, width + width % 2


def _size(first: torch.Tensor) -> tuple[int, int]:
    """Return height and width of the first frame. Raises ValueError for a tensor that is not a frame."""
    if first.ndim != 3 or first.shape[-1] != 3:
        raise ValueError(f"a video needs frames [H, W, 3], not {list(first.shape)}")
    height, width, _ = first.shape
    return height, width


def _without_avx512() -> dict[str, str]:
    """Return encoder options with which equal frames give equal bytes on this CPU."""
    # With AVX-512, x264's mbtree reads macroblocks sixteen at a time. If the width is not a multiple of 256 pixels, it
    # reads uninitialised memory past the end of a row. With AVX2 it does not, and takes no longer.
    return {"x264-params": "asm=avx2"} if _has_avx512() else {}


def _has_avx512() -> bool:
    """Return True on a CPU with AVX-512, as x264 detects it."""
    # Not get_cpu_capability(): it obeys ATEN_CPU_CAPABILITY, which x264 does not read.
    query = getattr(torch.cpu, "_is_avx512_supported", None)
    return bool(query()) if query else torch.backends.cpu.get_cpu_capability() == "AVX512"


def _picture(frame: torch.Tensor) -> av.VideoFrame:
    pixels = frame if frame.dtype == torch.uint8 else frame.float().clamp(0, 1).mul(255).round().to("cpu", torch.uint8)
    if pixels.shape[0] % 2:
        pixels = torch.cat([pixels, pixels[-1:]])
    if pixels.shape[1] % 2:
        pixels = torch.cat([pixels, pixels[:, -1:]], dim=1)
    picture = av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")
    return picture.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
