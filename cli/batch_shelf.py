"""The batch's own folder: a file comes in under a temporary name, is checked, and gets its own name in one step.

    fetched into part(name) -> seal(name): checked, on the disk -> the journal knows it -> place(files): renamed

Whoever is killed between two of these finds what is needed to go on from there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from .batch_rows import FILE_NAME
from .journal_entry import KeptFile
from .media_check import check_media

LATENT = ".latent"
"""The suffix of latents, which are kept until their video is there."""

_WORKSHOP = ".wanstream"
_SUFFIX = re.compile(r"\.\w{1,15}")
_PIECE = 1 << 20
_OF_SEVERAL = "~"
"""Stands between a stem and a number; no name of a row holds it."""


def file_names(stem: str, made: Sequence[str]) -> list[str]:
    """What the files of a row are called here: its stem, and numbers if there are several. `made` are their names."""
    suffixes = [Path(name).suffix for name in made]
    suffixes = [suffix if _SUFFIX.fullmatch(suffix) else "" for suffix in suffixes]
    if len(made) == 1:
        return [stem + suffixes[0]]
    return [f"{stem}{_OF_SEVERAL}{number}{suffix}" for number, suffix in enumerate(suffixes, 1)]


class Shelf:
    """A folder of finished files, and a hidden one in it for those that are not finished."""

    def __init__(self, folder: Path) -> None:
        """Make the folders. Raises OSError."""
        self.folder = folder
        self.workshop = folder / _WORKSHOP
        self.made = self.workshop / "made"
        """Where an embedded host saves, a folder for each prompt id."""
        self._parts = self.workshop / "parts"
        self._parts.mkdir(parents=True, exist_ok=True)

    def part(self, name: str) -> Path:
        """Where the file that is to be called `name` is written."""
        return self._parts / name

    def seal(self, name: str) -> KeptFile:
        """Check the part and put it on the disk for good. Raises UnreadableFileError, or OSError for a full disk."""
        return self.inspect(self.part(name))

    def inspect(self, path: Path) -> KeptFile:
        """Check a file of this folder or a part, and put it on the disk for good. Raises as `seal`."""
        check_media(path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        _sync_folder(path.parent)
        return KeptFile(name=path.name, size=path.stat().st_size, sha256=_sha256(path))

    def place(self, files: Iterable[KeptFile]) -> bool:
        """Give sealed parts their names; may be done again. False: neither a part nor the file itself is here."""
        for file in files:
            part, placed = self.part(file.name), self.folder / file.name
            # What is still a part is as it was sealed: parts are written only before the journal knows them.
            if part.exists():
                part.replace(placed)
            elif not (self.has([file]) and _sha256(placed) == file.sha256):
                return False
        _sync_folder(self.folder)
        return True

    def has(self, files: Iterable[KeptFile]) -> bool:
        """Whether all these files are here, with their sizes."""
        for file in files:
            path = self.folder / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                return False
        return True

    def finished(self) -> list[Path]:
        """The files that may be the only ones of a row: those in the folder, then the parts."""
        return [path for folder in (self.folder, self._parts) for path in _files(folder) if _may_be_alone(path)]

    def sweep(self, lines_left: Callable[[str], list[int] | None]) -> list[tuple[Path, list[int] | None]]:
        """Remove what an embedded host has left, but not the latents of rows that are not done: return these.

        `lines_left` has the lines of the rows of a prompt id that are not done, None for an id that is not known.
        """
        kept: list[tuple[Path, list[int] | None]] = []
        for folder in sorted(self.made.iterdir()) if self.made.is_dir() else ():
            latents, lines = sorted(folder.rglob(f"*{LATENT}")), lines_left(folder.name)
            if latents and lines != []:
                kept += [(latent, lines) for latent in latents]
            elif folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
        return kept

    def clear(self) -> None:
        """Remove all parts."""
        for part in self._parts.iterdir():
            part.unlink()

    def strangers(self, stems: Collection[str]) -> list[str]:
        """Files that are called as the files of rows with these stems would be."""
        wanted = {stem.casefold() for stem in stems}
        found = []
        for path in self.folder.iterdir():
            # What follows a dot is a suffix, or belongs to the stem of a file that has none.
            stems = {text.rpartition(_OF_SEVERAL)[0] or text for text in (path.stem, path.name)}
            if path.is_file() and wanted & {stem.casefold() for stem in stems}:
                found.append(path.name)
        return sorted(found)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def _may_be_alone(path: Path) -> bool:
    return bool(FILE_NAME.fullmatch(path.stem) and _SUFFIX.fullmatch(path.suffix))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    if sys.platform == "win32":
        return  # A folder cannot be opened there, and NTFS keeps a journal of names.
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
