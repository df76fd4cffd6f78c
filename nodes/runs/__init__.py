"""Runs behind the nodes: sampling, decoding, benchmarks, and their files."""

from .preview import PREVIEW_PIXELS
from .video_file import write_video

__all__ = ["PREVIEW_PIXELS", "write_video"]
