"""The progress bar of one node where there is no ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class EmbeddedBar:
    """Hands every change on; shows no previews."""

    report: Callable[[int, int], None]
    """Is given how much is done, and of how much."""
    total: int

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """See `Progress.update`."""
        self.report(done, self.total)
