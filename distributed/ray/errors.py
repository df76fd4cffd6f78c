"""What can be wrong with Ray.

ValueError
  RaySetupError      workers cannot be had as they were asked for; the message says what to change
    RayMissingError  Ray is not installed
    LostAtStartError a worker, or its machine, is gone before it has answered
    LateRayletError  a Ray of this machine took longer to start than it gives itself
"""

from __future__ import annotations

import sys


class RaySetupError(ValueError):
    """Workers cannot be had as they were asked for; the message says why, and what to change."""


class RayMissingError(RaySetupError):
    """Ray is not installed here."""

    def __init__(self) -> None:
        super().__init__(
            'several workers need Ray, which is not installed: pip install "ray>=2.52" (or "wanstream[distributed]") '
            f"for the Python at {sys.executable}, or set the cluster of the workers to in-process for one worker "
            "without it"
        )


class LostAtStartError(RaySetupError):
    """The process of a worker, or its machine, is gone before it has answered; the message says what is known."""


class LateRayletError(RaySetupError):
    """A Ray of this machine took longer to start than it gives itself; another try may succeed."""
