"""Errors of Ray's setup.

ValueError
  RaySetupError      workers cannot be started as configured; the message says what to change
    RayMissingError  Ray is not installed
    LostAtStartError a worker, or its machine, was lost before it was ready
    LateRayletError  a Ray on this machine did not start within Ray's own timeout
"""

from __future__ import annotations

import sys


class RaySetupError(ValueError):
    """Workers cannot be started as configured; the message says why, and what to change."""


class RayMissingError(RaySetupError):
    """Ray is not installed in this Python."""

    def __init__(self) -> None:
        super().__init__(
            'several workers need Ray, which is not installed: pip install "ray>=2.52" (or "wanstream[distributed]") '
            f"for the Python at {sys.executable}, or set the cluster of the workers to in-process for one worker "
            "without it"
        )


class LostAtStartError(RaySetupError):
    """A worker, or its machine, was lost before it was ready; the message contains the known cause."""


class LateRayletError(RaySetupError):
    """A Ray on this machine did not start within Ray's own timeout; another try may succeed."""
