"""What all nodes that write a video file have in common: its inputs, the graph inside it, and what is shown of it."""

from __future__ import annotations

import math

from ..host import OutputFile, OutputNameError, OutsideFolderError, host, io, ui
from ..host.door import SAVING_NODE

SLOWEST, FASTEST = 0.01, 1000.0
"""Frames per second."""


def saving_inputs() -> list[io.Input]:
    """Frame rate, name and quality."""
    return [
        io.Float.Input(
            "fps",
            default=16.0,
            min=SLOWEST,
            max=FASTEST,
            step=0.01,
            tooltip="Wan2.2 A14B makes 16 frames per second of motion, 5B 24; another number speeds it up or slows it "
            "down.",
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
    ]


def name_refusal(filename_prefix: str | None) -> bool | str:
    """For `validate_inputs`: the reason why no file can have that name, True if one can; None is not known yet.

    Name and place are judged now, not after hours of sampling.
    """
    try:
        if filename_prefix is not None:
            host.check_output(filename_prefix)
    except (OutsideFolderError, OutputNameError) as err:
        return str(err)
    return True


def rate_refusal(fps: float | None) -> bool | str:
    """For `validate_inputs`: the reason why no video can have that frame rate, True if one can; None is not known yet.

    Hosts let NaN pass, which is neither too small nor too large.
    """
    if fps is None or (math.isfinite(fps) and SLOWEST <= fps <= FASTEST):
        return True
    return f"{fps} frames per second: give a number from {SLOWEST} to {FASTEST:g}"


def graph_of(hidden: io.HiddenHolder) -> dict[str, object]:
    """What ComfyUI looks for in a file that is dropped on its canvas; nothing where users want no graph in files."""
    if not host.graph_in_files():
        return {}
    graph = dict(hidden.extra_pnginfo or {})
    return graph if hidden.prompt is None else {**graph, "prompt": hidden.prompt, SAVING_NODE: hidden.unique_id}


def shown(file: OutputFile) -> ui.PreviewVideo:
    """The video, below its node."""
    return ui.PreviewVideo([ui.SavedResult(file.filename, file.subfolder, io.FolderType.output)])
