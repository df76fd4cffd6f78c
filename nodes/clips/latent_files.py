"""Nodes that save a latent to a file and load it again: to decode it later, or to continue or branch from it."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...host import LATENT, LATENT_FOLDER, current_host, io, search_aliases
from ...sampling import LEFTOVER_KEY, leftover_mark, leftover_sigma
from ...schema import FRAMES_PER_LATENT, Notice
from ...wan import check_latents, read_latent, space_of, write_latent
from ..decode import check_name, graph_of
from ..inputs import show_notices

NONE = "none"


class NoSavedLatentError(ValueError):
    """No file was chosen."""


def load_latent(name: str) -> dict[str, Any]:
    """Return the LATENT of a saved file, with its noise level if it has one.

    Raises:
        NoSavedLatentError: the name is not a text.
        OutsideFolderError: the name leads out of the output and input folders.
        LatentFileError: see `read_latent`.
    """
    if not isinstance(name, str):  # a null, which ComfyUI does not tell from a link before the run
        raise NoSavedLatentError(f"the file is {name!r}, not a name: choose a latent, or save one with Wan Save Latent")
    stored = read_latent(current_host().latent_path(name))
    return {"samples": stored.samples, LEFTOVER_KEY: leftover_mark(stored.samples, stored.sigma)}


def check_latent_name(name: str | None) -> None:
    """Refuse a missing or malformed file before any node runs; a linked name is None.

    Raises as `load_latent`.
    """
    if name is not None and name != NONE:
        load_latent(name)


def latent_stamp(name: str | None) -> tuple[str | None, int, int]:
    """Return a cache key of a file: its name, size and modification time; the name alone for none or a linked name."""
    if name is None or name == NONE:
        return name, 0, 0
    try:
        found = os.stat(current_host().latent_path(name))
    except (OSError, ValueError):
        return name, 0, 0  # the node itself raises the error
    return name, found.st_size, found.st_mtime_ns


def latent_text(samples: torch.Tensor) -> str:
    """Describe raw samples [B, 16 or 48, T, h, w]: model, size and number of frames."""
    videos, channels, frames, height, width = samples.shape
    space = space_of(channels)
    size = f"{width * space.pixels} x {height * space.pixels}, {(frames - 1) * FRAMES_PER_LATENT + 1} frames"
    return f"{space.models}: {size}" + (f", {videos} videos" if videos > 1 else "")


class WanStreamSaveLatent(io.ComfyNode):
    """Writer of a latent file with model, size and graph in its metadata."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSaveLatent",
            display_name="Wan Save Latent",
            category="WanStream/video",
            **search_aliases("export latent", "continue video", "checkpoint"),
            description="Saves a latent, to decode it later, or to continue or branch from it. ComfyUI's LoadLatent "
            "reads the file too.",
            inputs=[
                io.Latent.Input("latent", tooltip="From Wan Sampler. 81 frames of 832x480 take 8 MB."),
                io.String.Input(
                    "filename_prefix",
                    default=f"{LATENT_FOLDER}/WanStream",
                    tooltip="Name below the output folder; a counter is appended. Files in latents/ are listed by Wan "
                    "Load Latent and Wan Continue Video.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool:
        check_name(filename_prefix)
        return True

    @classmethod
    def execute(cls, latent: dict[str, Any], filename_prefix: str) -> io.NodeOutput:
        samples = latent["samples"]
        check_latents(samples)
        file = current_host().output_file(filename_prefix, LATENT)
        write_latent(file.path, samples, sigma=leftover_sigma(latent) or 0.0, metadata=graph_of(cls.hidden))
        saved = {"filename": file.filename, "subfolder": file.subfolder, "type": io.FolderType.output.value}
        return io.NodeOutput(latent, ui={"latents": [saved], **show_notices(Notice.of(latent_text(samples)))})


class WanStreamLoadLatent(io.ComfyNode):
    """Reader of a saved latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLoadLatent",
            display_name="Wan Load Latent",
            category="WanStream/video",
            **search_aliases("import latent", "decode later", "branch"),
            description="Loads a latent of Wan Save Latent or of ComfyUI's SaveLatent, to decode it or to continue it.",
            inputs=[
                saved_latent_input(
                    "file", "A file in output/latents or in the input folder. 81 frames of 832x480 take 8 MB of RAM."
                )
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None) -> bool:
        check_latent_name(file)
        return True

    @classmethod
    def fingerprint_inputs(cls, file: str | None = None) -> object:
        return latent_stamp(file)

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        if file == NONE:
            raise NoSavedLatentError("no file is chosen: save a latent with Wan Save Latent, then choose it here")
        latent = load_latent(file)
        return io.NodeOutput(latent, ui=show_notices(Notice.of(latent_text(latent["samples"]))))


def saved_latent_input(name: str, tooltip: str, *, optional: bool = False) -> io.Input:
    """Return the input for a saved latent."""
    # Not a constant: the files in the folders change.
    return io.Combo.Input(
        name,
        options=[NONE, *current_host().latent_names()],
        default=NONE,
        optional=optional,
        tooltip=f"{tooltip} Any file below the output folder can be named, or with [input] one below the input folder.",
    )
