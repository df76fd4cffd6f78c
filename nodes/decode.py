"""Nodes that decode latents, show them during a run, and save videos."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from ..host import SAVING_NODE, OutputFile, current_host, io, search_aliases, ui
from ..sampling import RequestError
from ..schema import FRAMES_PER_LATENT, PIXELS_PER_LATENT, WorkersRef
from ..wan import BY_FILE_NAME, LATENT_SCALES, VAE_DTYPES
from . import sockets
from .runs.decode import (
    DecodeSettings,
    decode_images,
    decode_to_file,
    requested_tiling,
)
from .runs.file_checks import (
    DECODER_FOLDERS,
    ENCODER_FOLDERS,
    PREVIEW_FOLDERS,
    check_decoder,
    check_preview_vae,
    reports_ui,
)
from .runs.file_node import FileNode
from .runs.latent_backup import keep_latent_until_done
from .runs.preview import PreviewSettings, check_frames
from .runs.video_file import video_size, write_mp4

VAE_TOOLTIP = (
    "wan_2.1_vae.safetensors, for Wan2.2 5B wan2.2_vae.safetensors, or the diffusers pipeline folder with the VAE. "
    "Loaded for this node alone (0.5 GB, for 5B 2.8 GB)."
)


def vae_input() -> io.Input:
    """Return the input for the file or folder of a VAE that encodes."""
    # Not a constant: the files in the folders may change until the next schema.
    return io.Combo.Input("vae", options=current_host().model_names(*ENCODER_FOLDERS), tooltip=VAE_TOOLTIP)


def decoder_input() -> io.Input:
    """Return the input for the file or folder of a VAE that decodes; it may be a tiny one."""
    return io.Combo.Input(
        "vae",
        options=current_host().model_names(*DECODER_FOLDERS),
        tooltip=f"{VAE_TOOLTIP} For drafts a tiny VAE of vae_approx (0.05 GB): lighttaew2_1, taew2_1, for 5B "
        "lighttaew2_2 or taew2_2, with a twentieth of the compute (5B: a two-hundredth) and less detail.",
    )


SCALE_INPUT = io.Combo.Input(
    "latent_scale",
    options=list(LATENT_SCALES),
    default=BY_FILE_NAME,
    optional=True,
    tooltip="For a tiny VAE: the latents that it was trained on. by file name: raw for lighttae*, normalised for "
    "taew*; files with other names need a choice. The wrong one gives wrong colours. Costs nothing.",
)


TILE_SIZE_INPUT = io.Int.Input(
    "tile_size",
    default=0,
    min=0,
    max=4096,
    step=PIXELS_PER_LATENT,
    optional=True,
    tooltip="Width of the tiles in pixels; 0: whole frames if they fit in memory, else the tiles that fit with "
    "the least compute. 256 decodes a fourteenth of a 1280x720 frame at once, at 1.65 times the compute in "
    "all, because tiles overlap by a quarter, where they are blended. For Wan2.2 5B a multiple of 16, 128 or "
    "more.",
)

MEMORY_INPUT = io.Float.Input(
    "memory_gb",
    default=0.0,
    min=0.0,
    max=1024.0,
    step=0.1,
    optional=True,
    tooltip="Memory for decoding, in addition to the VAE's weights; 0: the free memory. Whole frames of 1280x720 "
    "take 21 GB, tiles of 256 pixels 1.5 GB; with the VAE of Wan2.2 5B 22 GB and 1.6 GB. If memory still runs "
    "out, smaller tiles are tried.",
)

DTYPE_INPUT = io.Combo.Input(
    "compute_dtype",
    options=list(VAE_DTYPES),
    default="fp32",
    optional=True,
    tooltip="Compute dtype of the VAE. bf16 takes half the memory, also of the VAE itself, and less time if the "
    "device supports it; colours are rounded, in places by a few of 255 levels. fp16: the same, only for tiny VAEs.",
)

MIN_FPS, MAX_FPS = 0.01, 1000.0
"""Limits of `fps`, in frames per second."""

SAVING_INPUTS: tuple[io.Input, ...] = (
    io.Float.Input(
        "fps",
        default=16.0,
        min=MIN_FPS,
        max=MAX_FPS,
        step=0.01,
        tooltip="Wan2.2 A14B generates 16 frames per second, 5B 24; another number changes the speed of the motion.",
    ),
    io.String.Input(
        "filename_prefix",
        default="video/WanStream",
        tooltip="Name below the output folder; a counter is appended. %width%, %height%, %year% ... "
        "%second% and %date:yyyy-MM-dd% are filled in.",
    ),
    io.Int.Input(
        "crf",
        default=18,
        # 0 would be lossless, in a profile of H.264 that browsers do not play.
        min=1,
        max=51,
        tooltip="Quality of H.264: 18 looks lossless, 6 more halve the size of the file.",
    ),
)
"""Inputs for frame rate, file name and quality."""


def check_name(filename_prefix: str | None) -> None:
    """Raise OutsideFolderError or OutputNameError for a bad name, before hours of sampling; a linked name is None."""
    if filename_prefix is not None:
        current_host().check_output(filename_prefix)


def check_rate(fps: float | None) -> None:
    """Raise RequestError for a bad frame rate; a linked value is None."""
    # isfinite: hosts let NaN pass, which is neither below the minimum nor above the maximum.
    if fps is not None and not (math.isfinite(fps) and MIN_FPS <= fps <= MAX_FPS):
        raise RequestError(f"{fps} frames per second: give a number from {MIN_FPS} to {MAX_FPS:g}")


def graph_of(hidden: io.HiddenHolder) -> dict[str, object]:
    """Return the metadata from which ComfyUI restores the graph of a dropped file; empty if the user disabled it."""
    if not current_host().graph_in_files():
        return {}
    graph = dict(hidden.extra_pnginfo or {})
    return graph if hidden.prompt is None else {**graph, "prompt": hidden.prompt, SAVING_NODE: hidden.unique_id}


def video_preview(file: OutputFile) -> ui.PreviewVideo:
    """Return the preview of the video on its node."""
    return ui.PreviewVideo([ui.SavedResult(file.filename, file.subfolder, io.FolderType.output)])


class WanStreamDecodeVideo(FileNode):
    """Decoder that writes its frames straight into an MP4."""

    FILES: ClassVar = {"vae": DECODER_FOLDERS}
    LISTED_INPUTS = ("vae", "compute_dtype", "latent_scale")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamDecodeVideo",
            display_name="Wan Decode to Video",
            category="WanStream/video",
            **search_aliases("mp4", "h264", "long video", "vae", "video combine"),
            description="Decodes a Wan latent straight into an MP4 (H.264), without images in RAM. Drop the file on "
            "the canvas to get the graph back.",
            inputs=[
                decoder_input(),
                io.Latent.Input(
                    "latent",
                    tooltip="From Wan Sampler. A copy is in output/latents until the video is complete.",
                ),
                *SAVING_INPUTS,
                TILE_SIZE_INPUT,
                MEMORY_INPUT,
                DTYPE_INPUT,
                SCALE_INPUT,
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
    ) -> bool:
        check_name(filename_prefix)
        check_rate(fps)
        requested_tiling(tile_size)
        check_decoder(vae, compute_dtype, latent_scale)
        return True

    @classmethod
    def execute(
        cls,
        vae: str,
        latent: dict[str, torch.Tensor],
        filename_prefix: str,
        tile_size: int = 0,
        memory_gb: float = 0.0,
        compute_dtype: str = "fp32",
        latent_scale: str = BY_FILE_NAME,
        **encoding: Any,
    ) -> io.NodeOutput:
        report = check_decoder(vae, compute_dtype, latent_scale)
        settings = DecodeSettings.of(vae, latent["samples"], tile_size, memory_gb, compute_dtype, latent_scale)
        with current_host().ledger().phase("decode", current_host().device()):
            file, notes = decode_to_file(
                settings,
                latent["samples"],
                filename_prefix,
                node_id=cls.hidden.unique_id,
                metadata=graph_of(cls.hidden),
                **encoding,
            )
        return io.NodeOutput(ui={**video_preview(file).as_dict(), **(reports_ui(report, notes=notes) or {})})


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
            **search_aliases("tiled vae", "vae"),
            description="Decodes a Wan latent, a few frames at a time, into images.",
            inputs=[
                decoder_input(),
                io.Latent.Input(
                    "latent",
                    tooltip="From Wan Sampler. A copy is in output/latents until the images are complete.",
                ),
                TILE_SIZE_INPUT,
                sockets.Workers.Input(
                    "workers",
                    optional=True,
                    tooltip="From Wan Workers (many GPUs), which share the tiles. With tile_size 0 the tiles are as "
                    "large as the memory of each worker allows, and at least as many as workers. The images are "
                    "those of one device with the same tiles.",
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
        check_decoder(vae, compute_dtype, latent_scale)
        return True

    @classmethod
    def execute(
        cls,
        vae: str,
        latent: dict[str, torch.Tensor],
        tile_size: int = 0,
        workers: WorkersRef | None = None,
        memory_gb: float = 0.0,
        compute_dtype: str = "fp32",
        latent_scale: str = BY_FILE_NAME,
    ) -> io.NodeOutput:
        report = check_decoder(vae, compute_dtype, latent_scale)
        settings = DecodeSettings.of(vae, latent["samples"], tile_size, memory_gb, compute_dtype, latent_scale)
        with current_host().ledger().phase("decode", current_host().device()):
            videos, notes = decode_images(settings, latent["samples"], workers, node_id=cls.hidden.unique_id)
        return io.NodeOutput(videos.flatten(0, 1), ui=reports_ui(report, notes=notes))


class WanStreamPreview(FileNode):
    """Settings of moving previews, with the file of the tiny VAE checked."""

    FILES: ClassVar = {"vae": PREVIEW_FOLDERS}
    LISTED_INPUTS = ("vae", "latent_scale")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamPreview",
            display_name="Wan Moving Preview",
            category="WanStream/sampling",
            **search_aliases("taehv", "taesd", "taew", "lighttae", "live preview", "latent preview", "draft"),
            description="Shows the first frames of the video, moving, on the sampler while it runs. Needs the file of "
            "a tiny VAE in models/vae_approx or models/vae.",
            inputs=[
                io.Combo.Input(
                    "vae",
                    options=current_host().model_names(*PREVIEW_FOLDERS),
                    tooltip="lighttaew2_1 or taew2_1, for Wan2.2 5B lighttaew2_2 or taew2_2. Takes 0.02 to 0.04 GB of "
                    "device memory during the run.",
                ),
                SCALE_INPUT,
                io.Int.Input(
                    "frames",
                    default=33,
                    min=1,
                    max=1025,
                    step=FRAMES_PER_LATENT,
                    optional=True,
                    tooltip="Frames to show, from the start of the video: a multiple of 4 plus 1. Time is proportional "
                    "to it. 1: a still picture.",
                ),
                io.Float.Input(
                    "every_s",
                    default=5.0,
                    min=0.0,
                    max=3600.0,
                    step=0.5,
                    optional=True,
                    tooltip="Fewest seconds between two previews. The first one has 5 frames at most; all others "
                    "together take at most a twentieth of the run's time, so they come less often where decoding is "
                    "slow. Nothing is decoded while nobody is connected to the server.",
                ),
            ],
            outputs=[sockets.Preview.Output(display_name="preview")],
        )

    @classmethod
    def validate_inputs(
        cls, vae: str | None = None, latent_scale: str | None = BY_FILE_NAME, frames: int | None = None
    ) -> bool:
        if isinstance(frames, int):  # a linked value is None until the run
            check_frames(frames)
        check_preview_vae(vae, latent_scale)
        return True

    @classmethod
    def execute(cls, vae: str, **settings: Any) -> io.NodeOutput:
        chosen = PreviewSettings(vae=current_host().model_path(vae, *PREVIEW_FOLDERS), **settings)
        # Opened here so that a bad file is reported on this node and not on the sampler. Only its header is read.
        chosen.open(current_host().device()).close()
        return io.NodeOutput(chosen, ui=reports_ui(check_preview_vae(vae, chosen.latent_scale)))


class WanStreamSaveVideo(io.ComfyNode):
    """Writer of an MP4 that restores its graph when it is dropped on the canvas."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSaveVideo",
            display_name="Wan Save Video",
            category="WanStream/video",
            **search_aliases("mp4", "h264", "export video", "video combine"),
            description="Writes an MP4 (H.264). Drop the file on the canvas to get the graph back.",
            inputs=[
                io.Image.Input("images", tooltip="From Wan VAE Decode, or any images of one size."),
                *SAVING_INPUTS,
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Kept in output/latents if the video cannot be written, for example on a full disk, or in "
                    "the temp folder if there is no room.",
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None, fps: float | None = None) -> bool:
        check_name(filename_prefix)
        check_rate(fps)
        return True

    @classmethod
    def execute(
        cls,
        images: torch.Tensor,
        fps: float,
        filename_prefix: str,
        crf: int,
        latent: dict[str, torch.Tensor] | None = None,
    ) -> io.NodeOutput:
        height, width = video_size(*images.shape[1:3])
        # No copy is kept after a Cancel: the images and the latent are still in the cache of the host.
        keep = keep_latent_until_done(latent["samples"] if latent else None, after_cancel=False)
        with current_host().ledger().phase("save", current_host().device()), keep:
            file = current_host().output_file(filename_prefix, "mp4", width=width, height=height)
            stop = current_host().raise_if_stopped
            write_mp4(file.path, images, fps=fps, crf=crf, metadata=graph_of(cls.hidden), check=stop)
        notes = []
        if (height, width) != tuple(images.shape[1:3]):
            notes.append(
                f"The images are {images.shape[2]}x{images.shape[1]}, and H.264 needs even sides: the video is "
                f"{width}x{height}, with the last column or row repeated"
            )
        return io.NodeOutput(ui={**video_preview(file).as_dict(), **(reports_ui(notes=notes) or {})})
