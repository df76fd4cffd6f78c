"""Nodes that save a latent to a file and load it again.

A loaded latent is decoded later, or continued or branched from.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from ...host import LATENT, LATENT_FOLDER, Files, current_host, io, search_aliases, ui
from ...sampling.inputs import leftover_sigma, marked_latent
from ...schema.records import Notice
from ...shapes import FRAMES_PER_LATENT
from ...wan.latents import read_latent, space_of, write_latent
from ...wan.vae import check_latents
from ..decode import check_name, graph_of
from ..inputs import prefix_input
from ..runs.file_checks import NONE
from ..runs.notices import show_notices


class NoSavedLatentError(ValueError):
    """No file was chosen."""


def load_latent(files: Files, name: str) -> dict[str, Any]:
    """Return the LATENT in a saved file, with the noise level if any.

    Raises:
        NoSavedLatentError: the name is not a text.
        OutsideFolderError: the name leads out of the output and input folders.
        LatentFileError: see `read_latent`.
    """
    if not isinstance(name, str):  # a null, which ComfyUI treats like a link before the run
        raise NoSavedLatentError(
            f"the file is {name!r}, not a name: choose a latent, or save one with Wan Save Latent"
        )
    stored = read_latent(files.latent_path(name))
    return marked_latent(stored.samples, stored.sigma)


def check_latent_name(files: Files, name: str | None) -> None:
    """Refuse a missing or malformed file before any node runs. A linked name is None.

    Raises as `load_latent`.
    """
    if name is not None and name != NONE:
        load_latent(files, name)


def latent_stamp(files: Files, name: str | None) -> tuple[str | None, int, int]:
    """Return a cache key for a file: name, size and modification time.

    Without a file or for a linked name, size and time are 0.
    """
    if name is not None and name != NONE:
        with suppress(OSError, ValueError):  # the node itself raises the error
            # A latent written again under the same name must be read again.
            found = os.stat(files.latent_path(name))
            return name, found.st_size, found.st_mtime_ns
    return name, 0, 0


def latent_text(samples: torch.Tensor) -> str:
    """Describe raw samples [B, 16 or 48, T, h, w]: model, size and number of frames."""
    videos, channels, frames, height, width = samples.shape
    space = space_of(channels)
    text = (
        f"{space.models}: {width * space.pixels} x {height * space.pixels}, "
        f"{(frames - 1) * FRAMES_PER_LATENT + 1} frames"
    )
    if videos > 1:
        text += f", {videos} videos"
    return text


class WanStreamSaveLatent(io.ComfyNode):
    """Writer for a latent file with model, size and graph in the metadata."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSaveLatent",
            display_name="Wan Save Latent",
            category="WanStream/video",
            **search_aliases("export latent, continue video, checkpoint"),
            description="Saves a latent, to decode it later, or to continue or branch from it. "
            "ComfyUI's LoadLatent reads the file too.",
            inputs=[
                io.Latent.Input(
                    "latent", tooltip="From Wan Sampler. 81 frames of 832x480 take 8 MB."
                ),
                prefix_input(
                    f"{LATENT_FOLDER}/WanStream",
                    "Files in latents/ are listed by Wan Load Latent and Wan Continue Video.",
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool:
        check_name(current_host().files, filename_prefix)
        return True

    @classmethod
    def execute(cls, latent: dict[str, Any], filename_prefix: str) -> io.NodeOutput:
        host = current_host()
        samples = latent["samples"]
        check_latents(samples)
        file = host.files.output_file(filename_prefix, LATENT)
        write_latent(
            file.path,
            samples,
            sigma=leftover_sigma(latent) or 0.0,
            metadata=graph_of(host, cls.hidden),
        )
        saved = ui.SavedResult(file.filename, file.subfolder, io.FolderType.output)
        return io.NodeOutput(
            latent, ui={"latents": [saved], **show_notices(host, Notice.of(latent_text(samples)))}
        )


class WanStreamLoadLatent(io.ComfyNode):
    """Reader for a saved latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamLoadLatent",
            display_name="Wan Load Latent",
            category="WanStream/video",
            **search_aliases("import latent, decode later, branch"),
            description="Loads a latent of Wan Save Latent or of ComfyUI's SaveLatent, to decode "
            "it or to continue it.",
            inputs=[
                saved_latent_input(
                    current_host().files,
                    "file",
                    "A file in output/latents or in the input folder. 81 frames of 832x480 take 8 "
                    "MB of RAM.",
                )
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None) -> bool:
        check_latent_name(current_host().files, file)
        return True

    @classmethod
    def fingerprint_inputs(cls, file: str | None = None) -> object:
        return latent_stamp(current_host().files, file)

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        if file == NONE:
            raise NoSavedLatentError(
                "no file is chosen: save a latent with Wan Save Latent, then choose it here"
            )
        host = current_host()
        latent = load_latent(host.files, file)
        return io.NodeOutput(
            latent, ui=show_notices(host, Notice.of(latent_text(latent["samples"])))
        )


def saved_latent_input(
    files: Files, name: str, tooltip: str, *, optional: bool = False
) -> io.Input:
    """Return the input for a saved latent."""
    # Not a constant, because the files in the folders change.
    return io.Combo.Input(
        name,
        options=[NONE, *files.latent_names()],
        default=NONE,
        optional=optional,
        tooltip=f"{tooltip} Any file below the output folder can be named, or with [input] one "
        "below the input folder.",
    )
