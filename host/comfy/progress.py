"""Progress of a node in ComfyUI: its bar, the latent preview next to it, and a line on the console."""

from __future__ import annotations

from functools import cache
from typing import Any

import comfy.latent_formats
import comfy.utils
import latent_preview
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from ...wan import WAN21, WAN22, space_of

FORMATS = {WAN21: comfy.latent_formats.Wan21, WAN22: comfy.latent_formats.Wan22}


class NodeBar:
    """ComfyUI's progress bar, with previews; an update raises ComfyUI's interrupt if the user has pressed Cancel.

    Args:
        total: number of steps.
        node_id: id of the node; None: the executing one.
        unit: name of a step on the console, which shows a line like that of ComfyUI's own samplers; None: no line.
    """

    def __init__(self, total: int, node_id: str | None, unit: str | None) -> None:
        self._bar = comfy.utils.ProgressBar(total, node_id=node_id)
        shown = unit is not None and comfy.utils.PROGRESS_BAR_ENABLED
        # disable=None disables it if stderr is not a terminal: a line for every step would fill a log.
        self._line = tqdm(total=total, unit=unit, disable=None if shown else True)
        self._total = total
        self._previewer = cache(_previewer)  # of this bar, because the user may choose another method for the next run

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """See `ProgressBar.update`."""
        self._line.update(done - self._line.n)
        if done >= self._total:
            self._line.close()
        previewer = None if denoised is None else self._previewer(denoised.device, denoised.shape[1])
        image = None if previewer is None else previewer.decode_latent_to_preview_image("JPEG", denoised)
        self._bar.update_absolute(done, self._total, image)


def _previewer(device: torch.device, channels: int) -> Any:
    """Return the previewer of the method that the user has chosen in ComfyUI; None, the default, for no previews.

    latent2rgb multiplies the first frame's latent [C, h, w] with a C x 3 matrix; taesd decodes that frame with the
    small VAE of `vae_approx`.
    """
    return latent_preview.get_previewer(device, FORMATS[space_of(channels)]())
