"""From latent to MP4 in one go, without the images between."""

from __future__ import annotations

from typing import Any

import torch

from ..host import host, io, search_words
from .decode_inputs import dtype_input, memory_input, tile_size_input, tiling_refusal, vae_input
from .decode_run import decode_to_file
from .decode_settings import DecodeSettings
from .expert_inputs import said_once
from .saved_video import graph_of, name_refusal, rate_refusal, saving_inputs, shown


class WanStreamDecodeVideo(io.ComfyNode):
    """Decodes straight into the encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamDecodeVideo",
            display_name="Wan Decode to Video",
            category="WanStream/video",
            **search_words("mp4", "h264", "long video", "vae", "video combine"),
            description="Decodes a Wan latent straight into an MP4 (H.264), with no images in RAM between. Drop the "
            "file on the canvas to get the graph back.",
            inputs=[
                vae_input(),
                io.Latent.Input(
                    "latent",
                    tooltip="From Wan Sampler. A copy lies in output/latents until the video is there.",
                ),
                *saving_inputs(),
                tile_size_input(),
                memory_input(),
                dtype_input(),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(
        cls, filename_prefix: str | None = None, fps: float | None = None, tile_size: int | None = None
    ) -> bool | str:
        judged = (name_refusal(filename_prefix), rate_refusal(fps), tiling_refusal(tile_size))
        return said_once(next((refusal for refusal in judged if refusal is not True), True))

    @classmethod
    def execute(
        cls,
        vae: str,
        latent: dict[str, torch.Tensor],
        filename_prefix: str,
        tile_size: int = 0,
        memory_gb: float = 0.0,
        compute_dtype: str = "fp32",
        **encoding: Any,
    ) -> io.NodeOutput:
        settings = DecodeSettings.of(vae, latent["samples"], tile_size, memory_gb, compute_dtype)
        with host.ledger().phase("decode", host.device()):
            file = decode_to_file(
                settings,
                latent["samples"],
                filename_prefix,
                node_id=cls.hidden.unique_id,
                metadata=graph_of(cls.hidden),
                **encoding,
            )
        return io.NodeOutput(ui=shown(file))
