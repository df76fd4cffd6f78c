"""Integrity check of output files: videos and sounds are decoded to their end, images are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import av
from PIL import Image, ImageSequence

from ...host import SAVING_NODE

_VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
_SOUNDS = (".flac", ".mp3", ".wav", ".opus", ".ogg", ".m4a")
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class UnreadableFileError(ValueError):
    """A file is empty, truncated, or not of the format of its suffix."""


def check_media(path: Path) -> None:
    """Raise UnreadableFileError if a video, sound or image cannot be decoded to its end, or if any file is empty."""
    suffix = path.suffix.lower()
    if not path.stat().st_size:
        raise UnreadableFileError(f"{path.name} is empty")
    try:
        if suffix in _VIDEOS:
            _decode(path, "video")
        elif suffix in _SOUNDS:
            _decode(path, "audio")
        elif suffix in _PICTURES:
            _load(path)
    # For a broken file Pillow raises OSError, ValueError or, for PNG, SyntaxError; for too many pixels, an error that
    # is a subclass of none of these.
    except (av.FFmpegError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as err:
        raise UnreadableFileError(f"{path.name} cannot be read to its end: {err}") from err


def stored_prompt(path: Path) -> tuple[object, object]:
    """Return the API workflow in the metadata of a video or PNG file, and the id of the node that saved it.

    Each is None if the file does not contain it; ComfyUI's own nodes do not store the id.
    """
    suffix = path.suffix.lower()
    texts: Mapping[str, str] = {}
    try:
        if suffix in _VIDEOS:
            with av.open(str(path)) as container:
                texts = dict(container.metadata)
        elif suffix == ".png":
            with Image.open(path) as picture:
                texts = dict(picture.info)
        prompt, node_id = (json.loads(texts[key]) if key in texts else None for key in ("prompt", SAVING_NODE))
    # A file that cannot be opened, or whose text is not JSON, is a file without a workflow.
    except (av.FFmpegError, OSError, ValueError, TypeError, SyntaxError, RecursionError, Image.DecompressionBombError):
        return None, None
    return prompt, node_id


def _decode(path: Path, kind: str) -> None:
    with av.open(str(path)) as container:
        streams = container.streams.video if kind == "video" else container.streams.audio
        if not streams:
            raise UnreadableFileError(f"it has no {kind} stream")
        expected = streams[0].frames if kind == "video" else 0
        found = sum(1 for _ in container.decode(streams[0]))
    if not found or found < expected:
        raise UnreadableFileError(f"{found} frames, {expected or 'some'} expected")


def _load(path: Path) -> None:
    with Image.open(path) as picture:
        for frame in ImageSequence.Iterator(picture):
            frame.load()
