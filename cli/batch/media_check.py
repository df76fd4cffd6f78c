"""Whether a file that a batch has made is whole: videos and sounds are decoded to their end, pictures are loaded."""

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
    """A file is empty, cut off or not what its name says."""


def check_media(path: Path) -> None:
    """Raise UnreadableFileError unless the file can be read to its end; of other kinds of files only an empty one is
    refused.
    """
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
    # What Pillow raises for a broken file is an OSError, a ValueError, or, of PNG, a SyntaxError; for one of too many
    # pixels, an error that is none of them.
    except (av.FFmpegError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as err:
        raise UnreadableFileError(f"{path.name} cannot be read to its end: {err}") from err


def stored_prompt(path: Path) -> tuple[object, object]:
    """Return the API workflow that ComfyUI and this pack store in videos and PNG files, and the id of the saving node.

    ComfyUI's own nodes do not store the second. Each is None if the file does not have it.
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
            raise UnreadableFileError(f"there is no {kind} in it")
        promised = streams[0].frames if kind == "video" else 0
        found = sum(1 for _ in container.decode(streams[0]))
    if not found or found < promised:
        raise UnreadableFileError(f"{found} frames, {promised or 'some'} promised")


def _load(path: Path) -> None:
    with Image.open(path) as picture:
        for frame in ImageSequence.Iterator(picture):
            frame.load()
