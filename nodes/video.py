"""From latent to MP4."""

from __future__ import annotations

import torch

from ..host import OutsideFolderError, host, io, ui
from ..plan import WorkersRef
from ..plan.shapes import PIXELS_PER_LATENT
from ..plan.vae_tiles import Tiling, TilingError
from ..wan.vae import open_vae
from . import sockets
from .latent_file import keep_latent_on_failure
from .shared_decode import decode_shared
from .video_file import write_mp4


class WanStreamVAEDecode(io.ComfyNode):
    """Turns a latent into frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamVAEDecode",
            display_name="Wan VAE Decode",
            category="WanStream",
            description="Decodes a Wan latent, a few frames at a time, into images.",
            inputs=[
                io.Combo.Input(
                    "vae",
                    options=host.model_names("diffusers", "vae"),
                    tooltip="wan_2.1_vae.safetensors, or the diffusers pipeline folder that holds the VAE. It is "
                    "loaded for this node alone (0.5 GB).",
                ),
                io.Latent.Input("latent", tooltip="From Wan Sampler."),
                io.Int.Input(
                    "tile_size",
                    default=0,
                    min=0,
                    max=4096,
                    step=PIXELS_PER_LATENT,
                    optional=True,
                    tooltip="Width of the tiles that are decoded one by one; 0: whole frames. 256 computes a "
                    "fourteenth of a 1280x720 frame at once, and 1.65 times as much in all, because tiles overlap by a "
                    "quarter, over which they are blended.",
                ),
                sockets.Workers.Input(
                    "workers",
                    optional=True,
                    tooltip="From Wan Workers (many GPUs): they share the tiles, so tile_size is needed. The images "
                    "are those of one device with the same tiles.",
                ),
            ],
            outputs=[io.Image.Output(display_name="images")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, tile_size: int | None = None) -> bool | str:
        try:
            _tiling(tile_size)
        except TilingError as err:
            return str(err)
        return True

    @classmethod
    def execute(
        cls,
        vae: str,
        latent: dict[str, torch.Tensor],
        tile_size: int = 0,
        workers: WorkersRef | None = None,
    ) -> io.NodeOutput:
        path, device, tiling = host.model_path(vae, "diffusers", "vae"), host.device(), _tiling(tile_size)
        with host.ledger().phase("decode", device):
            if workers is not None:
                videos = decode_shared(workers, path, latent["samples"], tiling, node_id=cls.hidden.unique_id)
            else:
                with open_vae(path) as opened:
                    videos = opened.decode(latent["samples"], device=device, tiling=tiling)
        return io.NodeOutput(videos.flatten(0, 1))


def _tiling(tile_size: int | None) -> Tiling | None:
    """None: whole frames; a link, which is not known yet, is taken for that."""
    return Tiling.of(tile_size) if tile_size else None


class WanStreamSaveVideo(io.ComfyNode):
    """Writes an MP4 that restores its graph when it is dropped on the canvas."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSaveVideo",
            display_name="Wan Save Video",
            category="WanStream",
            description="Writes an MP4 (H.264). Drop the file on the canvas to get the graph back.",
            inputs=[
                io.Image.Input("images", tooltip="From Wan VAE Decode, or any images of one size."),
                io.Float.Input(
                    "fps",
                    default=16.0,
                    min=0.01,
                    max=1000.0,
                    step=0.01,
                    tooltip="Wan2.2 A14B makes 16 frames per second of motion; another number speeds it up or slows "
                    "it down.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default="video/WanStream",
                    tooltip="Name below the output folder; a counter is appended. %width%, %height% and %year% ... "
                    "%second% are filled in.",
                ),
                io.Int.Input(
                    "crf",
                    default=18,
                    # 0 would be lossless, in a profile of H.264 that browsers do not play.
                    min=1,
                    max=51,
                    tooltip="Quality of H.264: 18 looks lossless, 6 more halve the size of the file.",
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Kept if the video cannot be written, for example on a full disk: in the output folder, or "
                    "in the temp folder where that has no room for it.",
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        """Refuse a name outside the output folder now, not after hours of sampling; None is a name not known yet."""
        try:
            if filename_prefix is not None:
                host.check_output(filename_prefix)
        except OutsideFolderError as err:
            return str(err)
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
        _, height, width, _ = images.shape
        file = host.output_file(filename_prefix, "mp4", width=width, height=height)
        graph = _graph(cls.hidden) if host.graph_in_files() else {}
        samples = latent["samples"] if latent else None
        keep = keep_latent_on_failure(samples, file.path.with_suffix(".latent"), spare_folder=host.temp_folder)
        with host.ledger().phase("save", host.device()), keep:
            write_mp4(file.path, images, fps=fps, crf=crf, metadata=graph)
        saved = ui.SavedResult(file.filename, file.subfolder, io.FolderType.output)
        return io.NodeOutput(ui=ui.PreviewVideo([saved]))


def _graph(hidden: io.HiddenHolder) -> dict[str, object]:
    """What ComfyUI looks for in a file that is dropped on its canvas."""
    graph = dict(hidden.extra_pnginfo or {})
    return graph if hidden.prompt is None else {**graph, "prompt": hidden.prompt}
