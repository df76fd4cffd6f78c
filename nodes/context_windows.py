"""Node for context windows: long videos in windows as long as the videos Wan was trained on."""

from __future__ import annotations

from dataclasses import replace

from ..host import io, search_aliases
from ..shapes import BLENDS, FRAMES_PER_LATENT, ContextWindows
from . import sockets
from .inputs import known, limits
from .runs.preview import check_frames

MAX_FRAMES = 1025
WINDOW_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "frames",
        default=81,
        **limits(5, MAX_FRAMES, step=FRAMES_PER_LATENT),
        tooltip="Frames per window, a multiple of 4 plus 1, at most those of the video. Attention "
        "costs grow with their square: two windows compute less than one of twice the length.",
    ),
    io.Int.Input(
        "overlap",
        default=16,
        **limits(0, 1024, step=FRAMES_PER_LATENT),
        tooltip="Fewest frames that neighbouring windows share, a multiple of 4. Shared frames are "
        "computed in both; too few leave seams.",
    ),
    io.Int.Input(
        "stride",
        default=1,
        **limits(1, 16),
        tooltip="1: windows of neighbouring frames only. 2, 4, 8, 16: also windows of every 2nd "
        "... 16th frame of the latent, for a consistent video. Each of them costs as much as "
        "another window.",
    ),
    io.Combo.Input(
        "blend",
        options=list(BLENDS),
        default="linear",
        tooltip="Weighting of windows where they overlap. linear: falls towards the ends of a "
        "window, over the overlap. pyramid: falls from its middle. flat: the same everywhere. "
        "All cost the same.",
    ),
    io.Boolean.Input(
        "repeat_image",
        default=True,
        tooltip="With a start image. On: every window begins with it, which keeps its look and "
        "pulls each window back to it. Off: only windows with the first frame use it. Costs "
        "nothing.",
    ),
    io.Boolean.Input(
        "shift_windows",
        default=True,
        optional=True,
        tooltip="On: windows are shifted in every step, which hides seams. Off: they are fixed, so "
        "that a cache can skip whole steps; seams may show. Costs nothing.",
    ),
)


class WanStreamContextWindows(io.ComfyNode):
    """Overlapping windows for a long video. They share each pass over the weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamContextWindows",
            display_name="Wan Context Windows",
            category="WanStream/sampling",
            **search_aliases("long video, context options, sliding window, freenoise"),
            description="For videos longer than the 81 frames of Wan's training: every step "
            "computes overlapping windows and blends them. The weights move once per step for "
            "all windows.",
            inputs=[*WINDOW_INPUTS],
            outputs=[sockets.Windows.Output(display_name="windows")],
        )

    @classmethod
    def validate_inputs(
        cls, frames: int | None = None, overlap: int | None = None, stride: int | None = None
    ) -> bool:
        given = known(int, frames=frames, overlap=overlap, stride=stride)
        # Placeholders for linked values refuse nothing. `execute` checks the real ones.
        windows_of(**{"frames": MAX_FRAMES, "overlap": 0, "stride": 1, **given})
        return True

    @classmethod
    def execute(
        cls,
        frames: int,
        overlap: int,
        stride: int,
        blend: str,
        repeat_image: bool,
        # ComfyUI passes only inputs in the workflow, so older workflows need this default.
        shift_windows: bool = True,
    ) -> io.NodeOutput:
        windows = windows_of(frames=frames, overlap=overlap, stride=stride)
        chosen = replace(
            windows, blend=blend, repeat_image=repeat_image, shift_windows=shift_windows
        )
        return io.NodeOutput(chosen)


def windows_of(*, frames: int, overlap: int, stride: int) -> ContextWindows:
    """Return windows from `frames` and `overlap` in video frames.

    Raises ValueError for values that do not fit.
    """
    check_frames(frames)
    if overlap % FRAMES_PER_LATENT:
        nearest = round(overlap / FRAMES_PER_LATENT) * FRAMES_PER_LATENT
        raise ValueError(
            f"overlap is {overlap}, it must be a multiple of {FRAMES_PER_LATENT}: use {nearest}"
        )
    return ContextWindows(
        frames=(frames - 1) // FRAMES_PER_LATENT + 1,
        overlap=overlap // FRAMES_PER_LATENT,
        stride=stride,
    )
