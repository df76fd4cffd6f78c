"""Nodes that decode latents, show them during a run, and save videos."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, TypedDict

import torch

from ..host import SAVING_NODE, Files, Host, OutputFile, current_host, io, search_aliases, ui
from ..sampling.steps import RequestError
from ..schema.records import Notice
from ..schema.refs import WorkersRef
from ..shapes import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ..wan.vae import BY_FILE_NAME, LATENT_SCALES, VAE_DTYPES
from . import sockets
from .inputs import limits, prefix_input
from .runs.decode import DecodeSettings, decode_images, decode_to_file, requested_tiling
from .runs.file_checks import DECODER_FOLDERS, PREVIEW_FOLDERS, check_decoder, check_preview_vae
from .runs.file_node import FileNode
from .runs.latent_backup import keep_latent_until_done
from .runs.notices import noticed, show_notices
from .runs.preview import PreviewSettings, check_frames
from .runs.video_file import (
    H264,
    Audio,
    VideoEncoding,
    available_formats,
    check_format,
    video_size,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on

VAE_TOOLTIP = (
    "wan_2.1_vae.safetensors, for Wan2.2 5B wan2.2_vae.safetensors, or the diffusers pipeline "
    "folder with the VAE. Loaded for this node alone (0.5 GB, for 5B 2.8 GB)."
)


DECODER_TOOLTIP = (
    f"{VAE_TOOLTIP} For drafts a tiny VAE of vae_approx (0.05 GB): lighttaew2_1, taew2_1, for 5B "
    "lighttaew2_2 or taew2_2, with a twentieth of the compute (5B: a two-hundredth) and less "
    "detail."
)

SCALE_INPUT = io.Combo.Input(
    "latent_scale",
    options=list(LATENT_SCALES),
    default=BY_FILE_NAME,
    optional=True,
    tooltip="For a tiny VAE: the latents that it was trained on. by file name: raw for lighttae*, "
    "normalised for taew*; files with other names need a choice. The wrong one gives wrong "
    "colours. Costs nothing.",
)


TILE_SIZE_INPUT = io.Int.Input(
    "tile_size",
    default=0,
    **limits(0, 4096, step=PIXELS_PER_LATENT),
    optional=True,
    tooltip="Width of the tiles in pixels; 0: whole frames if they fit in memory, else the tiles "
    "that fit with the least compute. 256 decodes a fourteenth of a 1280x720 frame at once, at "
    "1.65 times the compute in all, because tiles overlap by a quarter, where they are "
    "blended. For Wan2.2 5B a multiple of 16, 128 or more.",
)

MEMORY_INPUT = io.Float.Input(
    "memory_gb",
    default=0.0,
    **limits(0.0, 1024.0, step=0.1),
    optional=True,
    tooltip="Memory for decoding, in addition to the VAE's weights; 0: the free memory. Whole "
    "frames of 1280x720 take 21 GB, tiles of 256 pixels 1.5 GB; with the VAE of Wan2.2 5B 22 "
    "GB and 1.6 GB. If memory still runs out, smaller tiles are tried.",
)

DTYPE_INPUT = io.Combo.Input(
    "compute_dtype",
    options=list(VAE_DTYPES),
    default="fp32",
    optional=True,
    tooltip="Compute dtype of the VAE. bf16 takes half the memory, also of the VAE itself, and "
    "less time if the device supports it; colours are rounded, in places by a few of 255 "
    "levels. fp16: the same, only for tiny VAEs.",
)


class DecodeWidgets(TypedDict, total=False):
    """Decoder widgets. Older workflows may lack some."""

    tile_size: int
    memory_gb: float
    compute_dtype: str
    latent_scale: str


MIN_FPS, MAX_FPS = 0.01, 1000.0
"""Limits for `fps`, in frames per second."""

SAVING_INPUTS: tuple[io.Input, ...] = (
    io.Float.Input(
        "fps",
        default=16.0,
        **limits(MIN_FPS, MAX_FPS, step=0.01),
        tooltip="Wan2.2 A14B generates 16 frames per second, 5B 24; another number changes the "
        "speed of the motion.",
    ),
    prefix_input(
        "video/WanStream",
        "%width%, %height%, %year% ... %second% and %date:yyyy-MM-dd% are filled in.",
    ),
    io.Int.Input(
        "crf",
        default=18,
        # 0 would be lossless, in an H.264 profile that browsers do not play.
        **limits(1, 51),
        tooltip="Quality of H.264: 18 looks lossless, 6 more halve the size of the file. h265 "
        "and av1 scale it to their range; prores has one quality.",
    ),
)
"""Inputs for frame rate, file name and quality."""

FORMAT_INPUTS: tuple[io.Input, ...] = (
    io.Combo.Input(
        "format",
        options=list(available_formats()),
        default=H264,
        optional=True,
        tooltip="h264: plays everywhere. h265 and av1: 10 bit, so that skies show no bands, and "
        "slower to write. prores: for editing, several times the size, and browsers do not play "
        "it.",
    ),
    io.Audio.Input(
        "audio",
        optional=True,
        tooltip="Mono or stereo, written as AAC. It ends with the video at the latest.",
    ),
)
"""Inputs for codec and sound. Last, so that saved graphs keep the places of their values."""


def check_name(files: Files, filename_prefix: str | None) -> None:
    """Raise OutsideFolderError or OutputNameError for a bad name, before hours of sampling.

    A linked name is None.
    """
    if filename_prefix is not None:
        files.check_output(filename_prefix)


def check_rate(fps: float | None) -> None:
    """Raise RequestError for a bad frame rate. A linked value is None."""
    # isfinite: hosts let NaN pass, as it is neither below the minimum nor above the maximum.
    if fps is not None and not (math.isfinite(fps) and MIN_FPS <= fps <= MAX_FPS):
        raise RequestError(f"{fps} frames per second: give a number from {MIN_FPS} to {MAX_FPS:g}")


def graph_of(host: Host, hidden: io.HiddenHolder) -> dict[str, object]:
    """Return the metadata from which ComfyUI restores the graph when the file is dropped.

    It is empty if the user disabled it.
    """
    if not host.settings().graph_in_files:
        return {}
    graph = dict(hidden.extra_pnginfo or {})
    if hidden.prompt is not None:
        # The prompt alone does not identify this node if several nodes save files.
        graph |= {"prompt": hidden.prompt, SAVING_NODE: hidden.unique_id}
    return graph


def _saved(host: Host, file: OutputFile, *notices: Notice) -> io.NodeOutput:
    """Return the video preview for the node, with notices."""
    result = ui.SavedResult(file.filename, file.subfolder, io.FolderType.output)
    shown = show_notices(host, *notices)
    return io.NodeOutput(ui={**ui.PreviewVideo([result]).as_dict(), **shown})


def _encoding(
    host: Host, hidden: io.HiddenHolder, fps: float, crf: int, kind: str, audio: Audio | None
) -> VideoEncoding:
    metadata = graph_of(host, hidden)
    return VideoEncoding(fps=fps, crf=crf, metadata=metadata, kind=kind, audio=audio)


def _size_notices(images: torch.Tensor, kind: str) -> list[Notice]:
    """Return a notice if the video is larger than the images."""
    height, width = images.shape[1:3]
    padded_height, padded_width = video_size(height, width)
    if (height, width) == (padded_height, padded_width):
        return []
    text = (
        f"The images are {width}x{height}, and {kind} needs even sides: the video is "
        f"{padded_width}x{padded_height}, with the last column or row repeated"
    )
    return [Notice.of(text)]


class WanStreamDecodeVideo(FileNode):
    """Decoder that writes frames directly into a video."""

    FILES: ClassVar = {"vae": DECODER_FOLDERS}
    LISTED_INPUTS = ("vae", "compute_dtype", "latent_scale")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamDecodeVideo",
            display_name="Wan Decode to Video",
            category="WanStream/video",
            **search_aliases("mp4, h264, h265, av1, prores, long video, vae, video combine"),
            description="Decodes a Wan latent straight into a video, without images in RAM. "
            "Drop the file on the canvas to get the graph back.",
            inputs=[
                cls.file_input("vae", tooltip=DECODER_TOOLTIP),
                io.Latent.Input(
                    "latent",
                    tooltip="From Wan Sampler. A copy is in output/latents until the video is "
                    "complete.",
                ),
                *SAVING_INPUTS,
                TILE_SIZE_INPUT,
                MEMORY_INPUT,
                DTYPE_INPUT,
                SCALE_INPUT,
                *FORMAT_INPUTS,
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(
        cls,
        filename_prefix: str | None = None,
        fps: float | None = None,
        tile_size: int | None = None,
        vae: str | None = None,
        compute_dtype: str | None = None,
        latent_scale: str | None = BY_FILE_NAME,
        format: str | None = H264,
    ) -> bool:
        check_name(current_host().files, filename_prefix)
        check_rate(fps)
        check_format(format, fps)
        requested_tiling(tile_size)
        check_decoder(current_host(), vae, compute_dtype, latent_scale)
        return True

    @classmethod
    def execute(
        cls,
        vae: str,
        latent: dict[str, torch.Tensor],
        *,
        fps: float,
        filename_prefix: str,
        crf: int,
        format: str = H264,
        audio: Audio | None = None,
        **widgets: Unpack[DecodeWidgets],
    ) -> io.NodeOutput:
        host = current_host()
        settings = DecodeSettings.of(host, vae, latent["samples"], **widgets)
        with host.events.ledger().phase("decode", host.memory.device()):
            file, notes = decode_to_file(
                host,
                settings,
                latent["samples"],
                filename_prefix,
                node_id=cls.hidden.unique_id,
                video=_encoding(host, cls.hidden, fps, crf, format, audio),
            )
        return _saved(host, file, *settings.notices, *notes)


class WanStreamVAEDecode(FileNode):
    """Decoder that returns images."""

    FILES: ClassVar = {"vae": DECODER_FOLDERS}
    LISTED_INPUTS = ("vae", "compute_dtype", "latent_scale")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamVAEDecode",
            display_name="Wan VAE Decode",
            category="WanStream/video",
            **search_aliases("tiled vae, vae"),
            description="Decodes a Wan latent, a few frames at a time, into images.",
            inputs=[
                cls.file_input("vae", tooltip=DECODER_TOOLTIP),
                io.Latent.Input(
                    "latent",
                    tooltip="From Wan Sampler. A copy is in output/latents until the images are "
                    "complete.",
                ),
                TILE_SIZE_INPUT,
                sockets.Workers.Input(
                    "workers",
                    optional=True,
                    tooltip="From Wan Workers (many GPUs), which share the tiles. With tile_size 0 "
                    "the tiles are as large as the memory of each worker allows, and at least "
                    "as many as workers. The images are those of one device with the same "
                    "tiles.",
                ),
                MEMORY_INPUT,
                DTYPE_INPUT,
                SCALE_INPUT,
            ],
            outputs=[io.Image.Output(display_name="images")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        tile_size: int | None = None,
        vae: str | None = None,
        compute_dtype: str | None = None,
        latent_scale: str | None = BY_FILE_NAME,
    ) -> bool:
        requested_tiling(tile_size)
        check_decoder(current_host(), vae, compute_dtype, latent_scale)
        return True

    @classmethod
    def execute(
        cls,
        vae: str,
        latent: dict[str, torch.Tensor],
        workers: WorkersRef | None = None,
        **widgets: Unpack[DecodeWidgets],
    ) -> io.NodeOutput:
        host = current_host()
        settings = DecodeSettings.of(host, vae, latent["samples"], **widgets)
        with host.events.ledger().phase("decode", host.memory.device()):
            videos, notes = decode_images(
                host, settings, latent["samples"], workers, node_id=cls.hidden.unique_id
            )
        # IMAGE has one batch dimension: [B, F, H, W, 3] becomes [B * F, H, W, 3].
        return noticed(host, videos.flatten(0, 1), notices=(*settings.notices, *notes))


class WanStreamPreview(FileNode):
    """Settings for moving previews, with a checked tiny VAE file."""

    FILES: ClassVar = {"vae": PREVIEW_FOLDERS}
    LISTED_INPUTS = ("vae", "latent_scale")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamPreview",
            display_name="Wan Moving Preview",
            category="WanStream/sampling",
            **search_aliases("taehv, taesd, taew, lighttae, live preview, latent preview, draft"),
            description="Shows the first frames of the video, moving, on the sampler while it "
            "runs. Needs the file of a tiny VAE in models/vae_approx or models/vae.",
            inputs=[
                cls.file_input(
                    "vae",
                    tooltip="lighttaew2_1 or taew2_1, for Wan2.2 5B lighttaew2_2 or taew2_2. Takes "
                    "0.02 to 0.04 GB of device memory during the run.",
                ),
                SCALE_INPUT,
                io.Int.Input(
                    "frames",
                    default=33,
                    **limits(1, 1025, step=FRAMES_PER_LATENT),
                    optional=True,
                    tooltip="Frames to show, from the start of the video: a multiple of 4 plus 1. "
                    "Time is proportional to it. 1: a still picture.",
                ),
                io.Float.Input(
                    "every_s",
                    default=5.0,
                    **limits(0.0, 3600.0, step=0.5),
                    optional=True,
                    tooltip="Fewest seconds between two previews. The first one has 5 frames at "
                    "most; all others together take at most a twentieth of the run's time, so "
                    "they come less often where decoding is slow. Nothing is decoded while "
                    "nobody is connected to the server.",
                ),
            ],
            outputs=[sockets.Preview.Output(display_name="preview")],
        )

    @classmethod
    def validate_inputs(
        cls,
        vae: str | None = None,
        latent_scale: str | None = BY_FILE_NAME,
        frames: int | None = None,
    ) -> bool:
        if isinstance(frames, int):  # a linked value is None until the run
            check_frames(frames)
        check_preview_vae(current_host(), vae, latent_scale)
        return True

    @classmethod
    def execute(
        cls, vae: str, latent_scale: str = BY_FILE_NAME, frames: int = 33, every_s: float = 5.0
    ) -> io.NodeOutput:
        host = current_host()
        path = host.files.model_path(vae, *PREVIEW_FOLDERS)
        chosen = PreviewSettings(
            vae=path, latent_scale=latent_scale, frames=frames, every_s=every_s
        )
        # Opened here so a bad file is reported on this node and not on the sampler. This reads only
        # the header.
        chosen.open(host.memory.device()).close()
        return noticed(host, chosen, notices=check_preview_vae(host, vae, latent_scale))


class WanStreamSaveVideo(io.ComfyNode):
    """Writer for a video that restores the graph when dropped on the canvas."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSaveVideo",
            display_name="Wan Save Video",
            category="WanStream/video",
            **search_aliases("mp4, h264, h265, av1, prores, export video, video combine"),
            description="Writes a video. Drop the file on the canvas to get the graph back.",
            inputs=[
                io.Image.Input("images", tooltip="From Wan VAE Decode, or any images of one size."),
                *SAVING_INPUTS,
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Kept in output/latents if the video cannot be written, for example on "
                    "a full disk, or in the temp folder if there is no room.",
                ),
                *FORMAT_INPUTS,
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(
        cls,
        filename_prefix: str | None = None,
        fps: float | None = None,
        format: str | None = H264,
    ) -> bool:
        check_name(current_host().files, filename_prefix)
        check_rate(fps)
        check_format(format, fps)
        return True

    @classmethod
    def execute(
        cls,
        images: torch.Tensor,
        fps: float,
        filename_prefix: str,
        crf: int,
        latent: dict[str, torch.Tensor] | None = None,
        format: str = H264,
        audio: Audio | None = None,
    ) -> io.NodeOutput:
        height, width = video_size(*images.shape[1:3])
        # No copy is kept after a Cancel: the images and the latent are still in the host's cache.
        host = current_host()
        samples = latent["samples"] if latent else None
        keep = keep_latent_until_done(host, samples, after_cancel=False)
        with host.events.ledger().phase("save", host.memory.device()), keep:
            # Inside `keep`: a refused format or file name must not cost the latent.
            video = _encoding(host, cls.hidden, fps, crf, format, audio)
            file = host.files.output_file(filename_prefix, video.suffix, width=width, height=height)
            video.write(file.path, images, host.events.raise_if_stopped)
        return _saved(host, file, *_size_notices(images, format))
