"""Node progress in ComfyUI: a bar, the latent preview next to it, and a console line."""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any

import comfy.latent_formats
import comfy.utils
import latent_preview
import torch
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from tqdm import tqdm  # type: ignore[import-untyped]

from ....wan.latents import WAN21, WAN22, space_of
from .. import versions

LOG_EVERY_S = 10.0
"""Shortest interval between two progress lines where stderr is not a terminal."""

FORMATS = {WAN21: comfy.latent_formats.Wan21, WAN22: comfy.latent_formats.Wan22}


class NodeBar:
    """ComfyUI's progress bar, with previews.

    An update raises ComfyUI's interrupt if the user has pressed Cancel.

    Args:
        total: number of steps.
        node_id: node id, or None for the executing node.
        unit: name for a step in a console line like that of ComfyUI's own samplers. None for no
            line.
    """

    def __init__(self, total: int, node_id: str | None, unit: str | None) -> None:
        self._bar = comfy.utils.ProgressBar(total, node_id=node_id)
        shown = unit is not None and versions.shows_progress_bars()
        # Shown even if stderr is a file or a journal, as ComfyUI's own samplers do, but there not
        # for every step.
        least_s = 0.1 if sys.stderr.isatty() else LOG_EVERY_S
        self._line = tqdm(total=total, unit=unit, mininterval=least_s, disable=not shown)
        # A context variable, so `advance` would not find it on another thread.
        context = get_executing_context()
        self._node_id = node_id or (context and context.node_id)
        self._lock = threading.Lock()
        self._done: float = 0
        self._total = total
        # Per bar, because the user may choose another method for the next run.
        self._previewer = cache(_previewer)

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """See `ProgressBar.update`."""
        self._line.update(done - self._line.n)
        image = None
        if denoised is not None:
            previewer = self._previewer(denoised.device, denoised.shape[1])
            image = previewer and previewer.decode_latent_to_preview_image("JPEG", denoised)
        with self._lock:
            self._done = done
        self._bar.update_absolute(done, self._total, image)

    def advance(self, done: float) -> None:
        """See `ProgressBar.advance`."""
        # Not through `ProgressBar`: it raises and clears the user's interrupt, which would be
        # lost on another thread.
        with self._lock:
            if self._node_id is None or done <= self._done:
                return
            self._done = done
            get_progress_state().update_progress(self._node_id, done, self._total)

    def close(self) -> None:
        """See `ProgressBar.close`."""
        self._line.close()


def _previewer(device: torch.device, channels: int) -> Any:
    """Return the previewer for the method chosen in ComfyUI.

    Return None, the default, for no previews.

    latent2rgb multiplies the first frame's latent [C, h, w] by a C x 3 matrix. taesd decodes the
    frame with the small VAE from `vae_approx`.
    """
    return latent_preview.get_previewer(device, FORMATS[space_of(channels)]())
