"""From latent to MP4."""

from __future__ import annotations

import torch

from ..host import host, io, search_words, ui
from ..plan import WorkersRef
from . import sockets
from .decode_inputs import dtype_input, memory_input, tile_size_input, tiling_refusal, vae_input
from .decode_run import decode_images
from .decode_settings import DecodeSettings
from .expert_inputs import said_once
from .latent_file import keep_latent_until_done
from .saved_video import graph_of, name_refusal, rate_refusal, saving_inputs, shown
from .video_file import write_mp4


class WanStreamVAEDecode(io.ComfyNode):
    """Turns a latent into frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamVAEDecode",
            display_name="Wan VAE Decode",
            category="WanStream/video",
            **search_words("tiled vae", "vae"),
            description="Decodes a Wan latent, a few frames at a time, into images.",
            inputs=[
                vae_input(),
                io.Latent.Input(
                    "latent", tooltip="From Wan Sampler. A copy lies in output/latents until the images are there."
                ),
                tile_size_input(),
                sockets.Workers.Input(
                    "workers",
                    optional=True,
                    tooltip="From Wan Workers (many GPUs): they share the tiles. With tile_size 0 these are as large "
                    "as the memory of each allows, and as many as there are workers or more. The images are those of "
                    "one device with the same tiles.",
                ),
                memory_input(),
                dtype_input(),
            ],
            outputs=[io.Image.Output(display_name="images")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, tile_size: int | None = None) -> bool | str:
        return tiling_refusal(tile_size)

    @classmethod
    def execute(
        cls,
        vae: str,
        latent: dict[str, torch.Tensor],
        tile_size: int = 0,
        workers: WorkersRef | None = None,
        memory_gb: float = 0.0,
        compute_dtype: str = "fp32",
    ) -> io.NodeOutput:
        settings = DecodeSettings.of(vae, latent["samples"], tile_size, memory_gb, compute_dtype)
        with host.ledger().phase("decode", host.device()):
            videos, told = decode_images(settings, latent["samples"], workers, node_id=cls.hidden.unique_id)
        return io.NodeOutput(videos.flatten(0, 1), ui=ui.PreviewText("\n".join(told)) if told else None)


class WanStreamSaveVideo(io.ComfyNode):
    """Writes an MP4 that restores its graph when it is dropped on the canvas."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSaveVideo",
            display_name="Wan Save Video",
            category="WanStream/video",
            **search_words("mp4", "h264", "export video", "video combine"),
            description="Writes an MP4 (H.264). Drop the file on the canvas to get the graph back.",
            inputs=[
                io.Image.Input("images", tooltip="From Wan VAE Decode, or any images of one size."),
                *saving_inputs(),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Kept if the video cannot be written, for example on a full disk: in output/latents, or in "
                    "the temp folder where that has no room for it.",
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None, fps: float | None = None) -> bool | str:
        named = name_refusal(filename_prefix)
        return said_once(rate_refusal(fps) if named is True else named)

    @classmethod
    def execute(
        cls,
        images: torch.Tensor,
        fps: float,
        filename_prefix: str,
        crf: int,
        latent: dict[str, torch.Tensor] | None = None,
    ) -> io.NodeOutput:
        _, height, width, _ = images.shape
        # After a Cancel the images and the latent are still in the cache of the host.
        keep = keep_latent_until_done(latent["samples"] if latent else None, after_cancel=False)
        with host.ledger().phase("save", host.device()), keep:
            file = host.output_file(filename_prefix, "mp4", width=width, height=height)
            write_mp4(file.path, images, fps=fps, crf=crf, metadata=graph_of(cls.hidden))
        return io.NodeOutput(ui=shown(file))
