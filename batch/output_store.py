"""Batch output folder: complete files only, checked before they get their names.

fetch into part_path(name) -> check_file(part): decoded, synced -> journal entry -> place(files):
renamed

If the process is killed between two stages, the next one can resume from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import av
import safetensors
from PIL import Image, ImageSequence

from ..devices.machine import sync_folder
from ..host import LATENT, SAVING_NODE
from .folder.names import FILE_NAME, OF_SEVERAL, SUFFIX, name_key
from .folder.own_files import (
    MADE,
    PARTS,
    WORK_FOLDER,
    check_work_folder,
    own_entries,
    own_files,
    remove_tree,
)
from .journal.entry import KeptFile
from .rows.continued import FOLDER as CONTINUED

_VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
_SOUNDS = (".flac", ".mp3", ".wav", ".opus", ".ogg", ".m4a")
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")

_PIECE = 1 << 20

_UNREADABLE = (
    av.FFmpegError,
    OSError,
    ValueError,
    SyntaxError,
    Image.DecompressionBombError,
    safetensors.SafetensorError,
)
"""Errors for a broken file. Pillow raises OSError, ValueError or, for PNG, SyntaxError. For too
many pixels, it raises an error outside all these classes."""


class UnreadableFileError(ValueError):
    """A file is empty, truncated, or not in the format of the suffix."""


def check_media(path: Path) -> None:
    """Raise UnreadableFileError for an empty file, or media that cannot be decoded to the end.

    Media are videos, sounds and images.
    """
    suffix = path.suffix.lower()
    if not path.stat().st_size:
        raise UnreadableFileError(f"{path.name} is empty")
    try:
        if suffix in (*_VIDEOS, *_SOUNDS):
            _decode(path, "video" if suffix in _VIDEOS else "audio")
        elif suffix in _PICTURES:
            with Image.open(path) as picture:
                for frame in ImageSequence.Iterator(picture):
                    # Opening reads the header only.
                    frame.load()
        elif suffix == LATENT:
            with safetensors.safe_open(path, framework="pt") as file:
                # safetensors compares the offsets with the file size when it opens a file, so a
                # truncated file raises here.
                file.keys()
    except _UNREADABLE as err:
        raise UnreadableFileError(f"{path.name} cannot be read to its end: {err}") from err


def stored_prompt(path: Path) -> tuple[object, object]:
    """Return the API workflow in the metadata of a video, PNG or latent, and the saving node's id.

    Each is None if the file does not contain it. ComfyUI's own nodes do not store the id.
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
        elif suffix == LATENT:
            with safetensors.safe_open(path, framework="pt") as file:
                texts = file.metadata() or {}
        prompt, node_id = (json.loads(texts.get(key, "null")) for key in ("prompt", SAVING_NODE))
    # A file that cannot be opened, or has a text other than JSON, is a file without a workflow.
    # TypeError: Pillow's `info` may have values other than text.
    except (*_UNREADABLE, TypeError, RecursionError):
        return None, None
    return prompt, node_id


def _decode(path: Path, kind: str) -> None:
    with av.open(str(path)) as container:
        stream = next((each for each in container.streams if each.type == kind), None)
        if stream is None:
            raise UnreadableFileError(f"it has no {kind} stream")
        # `frames` is 0 if the format stores no count, as in WebM.
        expected = stream.frames * (kind == "video")
        # To the end, because a truncated file opens without an error.
        found = sum(1 for _ in container.decode(stream))
    if not found or found < expected:
        raise UnreadableFileError(f"{found} frames, {expected or 'some'} expected")


def file_names(stem: str, saved: Sequence[str]) -> list[str]:
    """Return the names of a row's files: stem, number if several, and the suffix in `saved`."""
    suffixes = [Path(name).suffix for name in saved]
    # A server may report any name.
    suffixes = [suffix * bool(SUFFIX.fullmatch(suffix)) for suffix in suffixes]
    if len(saved) == 1:
        return [stem + suffixes[0]]
    return [f"{stem}{OF_SEVERAL}{number}{suffix}" for number, suffix in enumerate(suffixes, 1)]


class OutputStore:
    """A folder for finished files, with a hidden subfolder for unfinished ones."""

    def __init__(self, folder: Path) -> None:
        """Create the folders.

        Raises OSError, or ForeignFileError if they contain foreign things.
        """
        check_work_folder(folder)
        self.folder = folder
        self.work_folder = folder / WORK_FOLDER
        self.backend_folder = self.backend_folder_of(folder)
        """Output folder for an embedded host, with a subfolder for each prompt id."""
        self._parts = self.work_folder / PARTS
        self._parts.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def backend_folder_of(folder: Path) -> Path:
        """Return the `backend_folder` for a store in `folder`, which may not exist yet."""
        return folder / WORK_FOLDER / MADE

    def part_path(self, name: str) -> Path:
        """Return the temporary path for the file `name`."""
        return self._parts / name

    def check_file(self, path: Path) -> KeptFile:
        """Check a part or a finished file, sync it to disk.

        Raises UnreadableFileError, or OSError for a full disk.
        """
        check_media(path)
        # Opened for writing, because Windows does not sync a file opened for reading.
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        # A crash may lose a name in a folder that was not synced.
        sync_folder(path.parent)
        return KeptFile(name=path.name, size=path.stat().st_size, sha256=sha256_of(path))

    def place(self, files: Sequence[KeptFile]) -> list[KeptFile] | None:
        """Rename checked parts to their final names.

        Idempotent. Returns the files with their stamps.

        Returns None if both part and file are missing.
        """
        for file in files:
            if not self.can_place([file]):
                return None
            part = self.part_path(file.name)
            if part.exists():
                part.replace(self.folder / file.name)
        sync_folder(self.folder)
        return [replace(file, stamp=self._stamp(file)) for file in files]

    def can_place(self, files: Iterable[KeptFile]) -> bool:
        """Return True if `place` would succeed. Changes nothing."""
        # No digest is needed for a part: parts are written only before the journal has an entry for
        # them.
        return all(self.part_path(file.name).exists() or self.is_intact([file]) for file in files)

    def is_intact(self, files: Iterable[KeptFile]) -> bool:
        """Return True if all these files are in the folder, with their digests."""
        return all(
            self._stamp(file) and sha256_of(self.folder / file.name) == file.sha256
            for file in files
        )

    def compared(self, files: Sequence[KeptFile]) -> list[KeptFile] | None:
        """Return the files with new stamps, or None if one is missing or was changed.

        Reads only files with other times, or another place on the disk, than at the last
        comparison.
        """
        found = [replace(file, stamp=self._stamp(file)) for file in files]
        changed = [new for old, new in zip(files, found, strict=True) if new.stamp != old.stamp]
        if all(file.stamp for file in found) and self.is_intact(changed):
            return found
        return None

    def conflicts(self, files: Iterable[KeptFile]) -> list[str]:
        """Return the names of checked parts that another file in the folder has already."""
        return [
            file.name
            for file in files
            if self.part_path(file.name).exists()
            and (self.folder / file.name).exists()
            and not self.is_intact([file])
        ]

    def has(self, files: Iterable[KeptFile]) -> bool:
        """Return True if all these files are in the folder, with their sizes."""
        return all(self._stamp(file) for file in files)

    def _stamp(self, file: KeptFile) -> str:
        """Return a file's times and number, or "" if it is missing, a link, or of another size."""
        try:
            found = os.lstat(self.folder / file.name)
        except OSError:
            return ""
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
            return ""
        return f"{found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"

    def finished(self) -> list[tuple[str, list[Path]]]:
        """Return file sets that may be complete for a row, with their stem.

        Single files come first. A set with several files counts only if the first one is in the
        folder: all parts were checked before.
        """
        found: list[tuple[str, list[Path]]] = []
        several: dict[str, dict[int, Path]] = {}
        for folder in (self.folder, self._parts):
            for path in sorted(folder.iterdir()):
                if path.is_symlink() or not path.is_file():
                    continue
                stem, number = _split(path.stem)
                if not (FILE_NAME.fullmatch(stem) and SUFFIX.fullmatch(path.suffix)):
                    continue
                if number is None:
                    found.append((stem, [path]))
                else:
                    # The first one found counts, so a file in the output folder wins over a part.
                    several.setdefault(stem, {}).setdefault(number, path)
        for stem, paths in several.items():
            # Two or more, without a gap.
            numbers = list(range(1, max(2, len(paths)) + 1))
            if sorted(paths) == numbers and paths[1].parent == self.folder:
                found.append((stem, [paths[number] for number in numbers]))
        return found

    def remove_leftovers(
        self, lines_left: Callable[[str], list[int] | None]
    ) -> list[tuple[Path, list[int] | None]]:
        """Remove the embedded host's files.

        Keep latents of unfinished rows, and return them with their lines.

        `lines_left` returns the lines of unfinished rows under a prompt id, None for an unknown id.
        """
        kept: list[tuple[Path, list[int] | None]] = []
        for folder in own_entries(self.backend_folder):
            latents = unfinished_latents(folder)
            lines = lines_left(folder.name)
            # None means an unknown id. Such latents are kept, too: only an empty list drops them.
            if latents and lines != []:
                kept += [(latent, lines) for latent in latents]
                for unfinished in own_files(folder):
                    if unfinished.suffix == ".part":
                        unfinished.unlink()
            else:
                remove_tree(folder)
        return kept

    def clear_parts(self) -> None:
        """Remove all parts."""
        for part in own_entries(self._parts):
            part.unlink()

    def foreign_files(self, stems: Collection[str]) -> list[str]:
        """Return the existing names that rows with these stems would use.

        They may be names of files or of anything else.
        """
        wanted = {name_key(stem) for stem in stems}
        found = []
        for path in self.folder.iterdir():
            # A stem may contain dots, and a file may have no suffix: both readings of the name
            # count. A folder named like a stem is the user's, and is only in the way of a file
            # without a suffix.
            readings = {path.stem, path.name}
            if path.is_dir():
                readings = {path.stem} - {path.name}
            if wanted & {name_key(text.rpartition(OF_SEVERAL)[0] or text) for text in readings}:
                found.append(path.name)
        return sorted(found)

    def occupied(self, names: Iterable[str], former: Iterable[KeptFile]) -> list[str]:
        """Return the names taken since the start, except those of a row's `former` files."""
        own = {file.name for file in former}
        # `lexists`, because a rename would replace a broken link, too.
        return [name for name in names if name not in own and os.path.lexists(self.folder / name)]


def release_folder(folder: Path) -> None:
    """Remove a workflow's folder, unless it has a latent without a video."""
    if folder.is_dir() and not unfinished_latents(folder):
        remove_tree(folder)


def unfinished_latents(folder: Path) -> list[Path]:
    """Return the latents written by a workflow into the output folder and not fetched."""
    found = (path for path in own_files(folder) if path.suffix == LATENT)
    return [path for path in found if path.parent != folder / CONTINUED]


def _split(stem: str) -> tuple[str, int | None]:
    """Split a file's stem into the row's stem and the file number.

    The number is None for a single file.
    """
    before, mark, number = stem.rpartition(OF_SEVERAL)
    if mark and number.isdecimal():
        return before, int(number)
    return stem, None


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
