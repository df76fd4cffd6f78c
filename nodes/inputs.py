"""Inputs shared by several nodes, and notices on nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..host import NOTICES_EVENT, current_host, io
from ..schema import Notice
from . import sockets

EXPERTS_INPUT = sockets.Experts.Input("experts", tooltip="From Wan Experts (streamed) or Wan Model (single).")

POSITIVE_INPUT = io.Conditioning.Input(
    "positive", tooltip="From Wan Text Encode or CLIP Text Encode; with an image, from an image-to-video node."
)


def shift_input(tooltip: str) -> io.Input:
    return io.Float.Input("flow_shift", default=12.0, min=0.01, max=100.0, step=0.01, tooltip=tooltip)


SHIFT_INPUT = shift_input(
    "Higher: more steps at high noise, and so in the high-noise expert. 12 for text-to-video, 5 for image-to-video."
)

BOUNDARY_INPUT = io.Float.Input(
    "boundary_ratio",
    default=0.875,
    min=0.0,
    max=1.0,
    step=0.001,
    tooltip="The low-noise expert runs below this noise level: 0.875 for text-to-video, 0.9 for image-to-video. "
    "The switch itself costs nothing: the next expert's blocks are fetched ahead. Not used by a single model, "
    "which runs every step.",
)

POLICY_INPUT = sockets.Policy.Input(
    "policy",
    optional=True,
    tooltip="Device memory of the experts. Without a policy: layerwise, the smallest (1.4 GB in bf16).",
)

WORKERS_INPUT = sockets.Workers.Input(
    "workers",
    optional=True,
    tooltip="From Wan Workers (many GPUs), which compute the run with the same result. Starting them costs some "
    "seconds, once. Without workers: this process alone.",
)

GUIDANCE_INPUT = sockets.Guidance.Input(
    "guidance",
    optional=True,
    tooltip="From Wan Guidance: guidance for each step, or a negative prompt in steps without. Default: "
    "guidance_high and guidance_low.",
)

WINDOWS_INPUT = sockets.Windows.Input(
    "windows",
    optional=True,
    tooltip="From Wan Context Windows, for videos of more than 81 frames. Windows share the weights, not the "
    "compute. Default: the whole video at once.",
)

CACHE_INPUT = sockets.Cache.Input(
    "cache",
    optional=True,
    tooltip="From Wan Cache: skips steps that are similar to the one before. Saves their time and bytes, and "
    "costs quality. Without a cache, every step computes all blocks.",
)

PREVIEW_INPUT = sockets.Preview.Input(
    "preview",
    optional=True,
    tooltip="From Wan Moving Preview: the first frames of the video, on this node while it runs. After the first "
    "one, they take at most a twentieth of the time. They do not change the result. Without it: ComfyUI's own "
    "preview method.",
)

logger = logging.getLogger("wanstream.nodes")

NOTICES = "wanstream_notices"
"""History key for all notices, with their levels."""

WARNINGS = "wanstream_warnings"
"""History key for the warnings. The text on the node repeats them."""


class StrictError(ValueError):
    """A warning raised as an error in strict mode (`--strict`, or the setting in ComfyUI)."""


def show_notices(*notices: Notice, **values: str | float) -> dict[str, Any]:
    """Show notices on the executing node, log warnings, and return them as the node's UI output.

    Called even without notices: earlier ones on the node are removed.

    Args:
        values: input values concerned by all these notices. See `Notice.values`.

    Raises:
        StrictError: there are warnings and the host is strict.
    """
    host = current_host()
    warnings = [notice.text for notice in notices if notice.level != "note"]
    refuse_if_strict(warnings)
    for warning in warnings:
        logger.warning("%s", warning)
    about = [asdict(replace(notice, values={**values, **notice.values})) for notice in notices]
    host.announce(NOTICES_EVENT, {"prompt_id": host.run_id(), "node": host.executing_node(), "notices": about})
    if not notices:
        return {}
    lines = [notice.text if notice.level == "note" else f"Warning: {notice.text}" for notice in notices]
    return {"text": ["\n".join(lines)], NOTICES: about} | ({WARNINGS: warnings} if warnings else {})


def refuse_if_strict(warnings: Sequence[str]) -> None:
    """Raise StrictError if there are warnings and the host is strict."""
    if warnings and current_host().strict():
        raise StrictError(f"{'; '.join(warnings)}. This is an error because the run is strict")
