"""Runs behind the nodes: sampling, decoding, benchmarks, and the files they write."""

from __future__ import annotations

from .benchmark import TrialTimes, tensor_digest, with_steps
from .preview import PREVIEW_PIXELS
from .video_file import write_mp4

__all__ = [
    "PREVIEW_PIXELS",
    "TrialTimes",
    "tensor_digest",
    "with_steps",
    "write_mp4",
]
