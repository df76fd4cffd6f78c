"""Node for context windows: long videos in windows of the length that Wan was trained on."""

from __future__ import annotations

from typing import Any

from ..host import io, search_aliases
from ..schema import BLENDS, FRAMES_PER_LATENT, ContextWindows
from . import sockets

WINDOW_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "frames",
        default=81,
        min=5,
        max=1025,
        step=FRAMES_PER_LATENT,
        tooltip="Frames per window, a multiple of 4 plus 1, at most those of the video. Attention costs grow with "
        "their square: two windows compute less than one of twice the length.",
    ),
    io.Int.Input(
        "overlap",
        default=16,
        min=0,
        max=1024,
        step=FRAMES_PER_LATENT,
        tooltip="Fewest frames that neighbouring windows share, a multiple of 4. Shared frames are computed in "
        "both; too few leave seams.",
    ),
    io.Int.Input(
        "stride",
        default=1,
        min=1,
        max=16,
        tooltip="1: windows of neighbouring frames only. 2, 4, 8, 16: also windows of every 2nd ... 16th frame of "
        "the latent, for a consistent video. Each of them costs as much as another window.",
    ),
    io.Combo.Input(
        "blend",
        options=list(BLENDS),
        default="linear",
        tooltip="Weighting of windows where they overlap. linear: falls towards the ends of a window, over the "
        "overlap. pyramid: falls from its middle. flat: the same everywhere. All cost the same.",
    ),
    io.Boolean.Input(
        "repeat_image",
        default=True,
        tooltip="With a start image. On: every window begins with it, which keeps its look and pulls each window "
        "back to it. Off: only windows with the first frame use it. Costs nothing.",
    ),
    io.Boolean.Input(
        "shift_windows",
        default=True,
        optional=True,
        tooltip="On: windows are shifted in every step, which hides seams. Off: they are fixed, so that a cache "
        "can skip whole steps; seams may show. Costs nothing.",
    ),
)


class WanStreamContextWindows(io.ComfyNode):
    """Overlapping windows of a long video, which share each pass over the weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamContextWindows",
            display_name="Wan Context Windows",
            category="WanStream/sampling",
            **search_aliases("long video", "context options", "sliding window", "freenoise"),
            description="For videos longer than the 81 frames of Wan's training: every step computes overlapping "
            "windows and blends them. The weights move once per step for all windows.",
            inputs=[*WINDOW_INPUTS],
            outputs=[sockets.Windows.Output(display_name="windows")],
        )

    @classmethod
    def validate_inputs(cls, frames: int | None = None, overlap: int | None = None, stride: int | None = None) -> bool:
        # A linked value is None until the run.
        values = {"frames": frames, "overlap": overlap, "stride": stride}
        windows_of(**{name: value for name, value in values.items() if isinstance(value, int)})
        return True

    @classmethod
    def execute(cls, **widgets: Any) -> io.NodeOutput:
        return io.NodeOutput(windows_of(**widgets))


def windows_of(*, frames: int = 81, overlap: int = 0, **settings: Any) -> ContextWindows:
    """Return windows from `frames` and `overlap` in video frames; raises ValueError for values that do not fit."""
    if frames % FRAMES_PER_LATENT != 1:
        nearest = round((frames - 1) / FRAMES_PER_LATENT) * FRAMES_PER_LATENT + 1
        raise ValueError(f"frames is {frames}, it must be a multiple of {FRAMES_PER_LATENT} plus 1: use {nearest}")
    if overlap % FRAMES_PER_LATENT:
        nearest = round(overlap / FRAMES_PER_LATENT) * FRAMES_PER_LATENT
        raise ValueError(f"overlap is {overlap}, it must be a multiple of {FRAMES_PER_LATENT}: use {nearest}")
    return ContextWindows(
        frames=(frames - 1) // FRAMES_PER_LATENT + 1, overlap=overlap // FRAMES_PER_LATENT, **settings
    )
