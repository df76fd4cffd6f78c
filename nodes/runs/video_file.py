"""Video writer: encodes frames one by one and leaves no partial file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TypedDict

import av
import torch

from ...sampling.steps import RequestError
from .whole_file import whole_file

# H.273 code point for BT.709. Some players read untagged files as BT.601 and others as BT.709,
# which shifts colours.
_BT709 = 1
_LIMITED_RANGE = 1

# Without the first flag the container drops every key unknown to QuickTime, including `prompt`
# and `workflow`. The second puts the metadata in front: ComfyUI's canvas only searches the first
# 64 MB.
_MOVFLAGS = "use_metadata_tags+faststart"

X264_CRF = 51
"""Highest `crf` of x264, whose scale all formats have."""


class VideoFileError(OSError):
    """The video could not be written. `errno` comes from the failed call."""


@dataclass(frozen=True, kw_only=True)
class VideoFormat:
    """Container and encoder of a video."""

    suffix: str
    encoder: str
    """Encoder of PyAV."""
    pixels: str
    """Pixel format of the file."""
    highest_crf: int = 0
    """Highest quality number of the encoder, 0 if it has none."""
    highest_fps: float = 1000.0
    options: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    """Codec tag, where players need another one than the container's default."""

    def encoder_options(self, crf: int) -> dict[str, str]:
        if not self.highest_crf:
            return dict(self.options)
        scaled = round(crf * self.highest_crf / X264_CRF)
        return {**self.options, "crf": str(scaled)}


H264 = "h264"
FORMATS: Mapping[str, VideoFormat] = {
    H264: VideoFormat(suffix="mp4", encoder="libx264", pixels="yuv420p", highest_crf=X264_CRF),
    "h265 10 bit": VideoFormat(
        suffix="mp4",
        encoder="libx265",
        pixels="yuv420p10le",
        highest_crf=51,
        # x265 writes to stderr itself, past the log level of FFmpeg.
        options={"x265-params": "log-level=error"},
        tag="hvc1",  # QuickTime does not play hev1
    ),
    "av1 10 bit": VideoFormat(
        suffix="mp4",
        encoder="libsvtav1",
        pixels="yuv420p10le",
        highest_crf=63,
        highest_fps=240.0,
        # Presets start at 0, the slowest.
        options={"preset": "8"},
    ),
    "prores 10 bit": VideoFormat(
        suffix="mov", encoder="prores_ks", pixels="yuv422p10le", options={"profile": "hq"}
    ),
}


def available_formats() -> tuple[str, ...]:
    """Return the formats whose encoder this PyAV has."""
    return tuple(name for name, each in FORMATS.items() if each.encoder in av.codecs_available)


def video_size(height: int, width: int) -> tuple[int, int]:
    """Return the video height and width for this frame size: even, as chroma planes require.

    An odd side is extended with a copy of the last row or column.
    """
    return height + height % 2, width + width % 2


COMMON_RATE = 48_000
"""Sample rate for audio whose own rate AAC does not have, such as 192 kHz."""


class Sound:
    """Audio for a video.

    Args:
        waveform: samples [B, C, T] in -1..1, mono or stereo. The first of the batch is used.
        sample_rate: samples per second.

    Raises:
        ValueError: another shape, or samples that are not finite.
    """

    def __init__(self, waveform: torch.Tensor, sample_rate: int) -> None:
        shape = tuple(waveform.shape)
        if len(shape) != 3 or not shape[0] or shape[1] not in (1, 2):
            raise ValueError(f"audio is [batch, 1 or 2 channels, samples], not {list(shape)}")
        self.layout = "mono" if shape[1] == 1 else "stereo"
        # PyAV reads planar float samples from a contiguous array, [C, T].
        self.samples = waveform[0].detach().float().cpu().contiguous()
        if not self.samples.isfinite().all():
            raise ValueError("the audio has samples that are not finite numbers")
        self.sample_rate = int(sample_rate)
        # The encoder refuses other rates when it opens.
        if self.sample_rate not in av.Codec("aac", "w").audio_rates:
            self.samples = self._resampled()
            self.sample_rate = COMMON_RATE

    def _resampled(self) -> torch.Tensor:
        frame = av.AudioFrame.from_ndarray(self.samples.numpy(), format="fltp", layout=self.layout)
        frame.sample_rate = self.sample_rate
        resampler = av.AudioResampler(format="fltp", layout=self.layout, rate=COMMON_RATE)
        # None flushes the resampler.
        parts = [*resampler.resample(frame), *resampler.resample(None)]
        return torch.cat([torch.from_numpy(part.to_ndarray()) for part in parts], dim=1)

    def between(self, start_s: float, end_s: float) -> Iterator[av.AudioFrame]:
        """Yield the samples between two times, at most one frame of them."""
        start = round(start_s * self.sample_rate)
        end = min(round(end_s * self.sample_rate), self.samples.shape[1])
        if end <= start:
            return
        samples = self.samples[:, start:end].contiguous().numpy()
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=self.layout)
        frame.sample_rate = self.sample_rate
        # One tick per sample, so that `pts` counts samples.
        frame.time_base = Fraction(1, self.sample_rate)
        frame.pts = start
        yield frame


def write_video(
    path: Path,
    frames: Iterable[torch.Tensor],
    *,
    fps: float,
    crf: int,
    metadata: Mapping[str, object],
    kind: str = H264,
    sound: Sound | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write frames [H, W, 3], in 0..1 or uint8, to `path`.

    Frames are consumed one by one, so a generator may still be computing them. Equal frames give
    equal bytes. The file appears under the final name only when complete.

    Args:
        path: path with the suffix of the format.
        frames: frames, float for more than 8 bits.
        fps: frames per second.
        crf: quality on the scale of x264, 1 (best) to 51.
        metadata: written as one JSON text per key, where ComfyUI looks for `prompt` and
            `workflow`.
        kind: name of one of `FORMATS`.
        sound: audio, which ends with the frames at the latest.
        check: called before every frame. It may raise to end the writing.

    Raises:
        ValueError: the frames have another shape.
        VideoFileError: the file could not be written.
    """
    # Read the first frame before opening the file: failing to read VAE weights is not a video
    # error.
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise ValueError("a video needs frames [H, W, 3], but there are none")
    _check_shape(first)
    video = FORMATS[kind]
    flags = {"movflags": _MOVFLAGS}
    with (
        whole_file(path, VideoFileError) as unfinished,
        av.open(str(unfinished), "w", format=video.suffix, options=flags) as container,
    ):
        for key, value in metadata.items():
            # Before the first packet: PyAV writes the header, with the metadata, in front of it.
            container.metadata[key] = json.dumps(value)
        options = video.encoder_options(crf) | _without_avx512(video.encoder)
        # FFmpeg's fractions have 32 bits, too few for the exact value of a float such as 23.976.
        rate = Fraction(round(fps * 1000), 1000)
        stream = container.add_stream(video.encoder, rate=rate, options=options)
        stream.height, stream.width = video_size(*first.shape[:2])
        stream.pix_fmt = video.pixels
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = _BT709
        codec.color_range = _LIMITED_RANGE
        if video.tag:
            codec.codec_tag = video.tag
        audio = None
        if sound is not None:
            # All streams before the first packet, because the header lists them.
            audio = container.add_stream("aac", rate=sound.sample_rate, layout=sound.layout)
        for number, frame in enumerate(chain([first], frames)):
            check()
            container.mux(stream.encode(_picture(frame, video.pixels)))
            if audio is not None and sound is not None:
                # Next to the picture, so that players need not read ahead for the sound.
                for samples in sound.between(float(number / rate), float((number + 1) / rate)):
                    container.mux(audio.encode(samples))
        # None flushes the frames that the encoder still holds.
        container.mux(stream.encode(None))
        if audio is not None:
            container.mux(audio.encode(None))


class Audio(TypedDict):
    """Value of an AUDIO socket. Nodes of other packs may add keys."""

    waveform: torch.Tensor
    sample_rate: int


@dataclass(frozen=True, kw_only=True)
class VideoEncoding:
    """Values of a saving node.

    Linked values are checked when they are used, where the latent is kept if one is refused.
    """

    fps: float
    crf: int
    metadata: Mapping[str, object]
    kind: str = H264
    audio: Audio | None = None

    @property
    def suffix(self) -> str:
        """Suffix of the file name. Raises RequestError as `check_format`."""
        check_format(self.kind, self.fps)
        return FORMATS[self.kind].suffix

    def write(self, path: Path, frames: Iterable[torch.Tensor], check: Callable[[], None]) -> None:
        """Write the frames. Raises the errors of `write_video` and `Sound`."""
        audio = self.audio
        write_video(
            path,
            frames,
            fps=self.fps,
            crf=self.crf,
            metadata=self.metadata,
            kind=self.kind,
            sound=Sound(audio["waveform"], audio["sample_rate"]) if audio is not None else None,
            check=check,
        )


def check_format(kind: str | None, fps: float | None) -> None:
    """Raise RequestError for a format that cannot be written here, or not at this rate.

    A linked value is None.
    """
    if kind is None:
        return
    available = available_formats()
    if kind not in available:
        raise RequestError(f"{kind!r} cannot be written here: choose {', '.join(available)}")
    highest = FORMATS[kind].highest_fps
    if fps is not None and fps > highest:
        raise RequestError(f"{kind} has at most {highest:g} frames per second, and fps is {fps:g}")


def _check_shape(first: torch.Tensor) -> None:
    """Raise ValueError for a tensor that is not a frame."""
    if first.ndim != 3 or first.shape[-1] != 3:
        raise ValueError(f"a video needs frames [H, W, 3], not {list(first.shape)}")


def _without_avx512(encoder: str) -> dict[str, str]:
    """Return encoder options with which equal frames give equal bytes on this CPU."""
    # With AVX-512, x264's mbtree reads macroblocks sixteen at a time. If the width is not a
    # multiple of 256 pixels, it reads uninitialised memory past the end of a row. With AVX2 it does
    # not, and takes no longer.
    if encoder == "libx264" and _has_avx512():
        return {"x264-params": "asm=avx2"}
    return {}


def _has_avx512() -> bool:
    """Return True on a CPU with AVX-512, as x264 detects it."""
    # Not get_cpu_capability(): it obeys ATEN_CPU_CAPABILITY, which x264 does not read.
    query = getattr(torch.cpu, "_is_avx512_supported", None)
    return bool(query()) if query else torch.backends.cpu.get_cpu_capability() == "AVX512"


def _pixels(frame: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a frame as integers of 8 bits, or of 16 in int32."""
    if frame.dtype == torch.uint8:
        return frame
    highest = 2**bits - 1
    dtype = torch.uint8 if bits == 8 else torch.int32
    return frame.float().clamp(0, 1).mul(highest).round().to("cpu", dtype)


def _picture(frame: torch.Tensor, pixel_format: str) -> av.VideoFrame:
    # `reformat` reduces 16 bits to 10. Frames in uint8 have only 8 bits anyway.
    bits = 16 if "10" in pixel_format and frame.dtype != torch.uint8 else 8
    pixels = _pixels(frame, bits)
    if pixels.shape[0] % 2:
        pixels = torch.cat([pixels, pixels[-1:]])
    if pixels.shape[1] % 2:
        pixels = torch.cat([pixels, pixels[:, -1:]], dim=1)
    # From numpy, because torch has few operations for uint16.
    if bits == 16:
        picture = av.VideoFrame.from_ndarray(pixels.numpy().astype("uint16"), format="rgb48le")
    else:
        picture = av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")
    return picture.reformat(format=pixel_format, dst_colorspace="ITU709", dst_color_range="MPEG")
