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

from .journal_entry import KeptFile
from .media_check import check_media
from .rows import FILE_NAME

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


class OutputStore:
    """A folder of finished files, and a hidden one in it for those that are not finished."""

    def __init__(self, folder: Path) -> None:
        """Make the folders. Raises OSError."""
        self.folder = folder
        self.workshop = folder / _WORKSHOP
        self.made = self.workshop / "made"
        """The folder an embedded host saves in, with a folder for each prompt id."""
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

    def can_place(self, files: Iterable[KeptFile]) -> bool:
        """Return True if `place` would. Changes nothing."""
        return all(
            self.part(file.name).exists() or (self.has([file]) and _sha256(self.folder / file.name) == file.sha256)
            for file in files
        )

    def in_the_way(self, files: Iterable[KeptFile]) -> list[str]:
        """Return the names of those sealed parts that a file in the folder has already."""
        return [file.name for file in files if self.part(file.name).exists() and (self.folder / file.name).exists()]

    def has(self, files: Iterable[KeptFile]) -> bool:
        """Whether all these files are here, with their sizes."""
        for file in files:
            path = self.folder / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                return False
        return True

    def finished(self) -> list[tuple[str, list[Path]]]:
        """Return the files that may be all those of a row, with their stem: sets in the folder, then parts.

        Of a row with several files the first one is in the folder: all its parts were checked before that.
        """
        found: list[tuple[str, list[Path]]] = []
        several: dict[str, dict[int, Path]] = {}
        for folder in (self.folder, self._parts):
            for path in _files(folder):
                stem, number = _split(path.stem)
                if not (FILE_NAME.fullmatch(stem) and _SUFFIX.fullmatch(path.suffix)):
                    continue
                if number is None:
                    found.append((stem, [path]))
                else:
                    several.setdefault(stem, {}).setdefault(number, path)
        for stem, paths in several.items():
            numbers = sorted(paths)
            if len(paths) > 1 and numbers == list(range(1, len(paths) + 1)) and paths[1].parent == self.folder:
                found.append((stem, [paths[number] for number in numbers]))
        return found

    def sweep(self, lines_left: Callable[[str], list[int] | None]) -> list[tuple[Path, list[int] | None]]:
        """Remove what an embedded host has left, but not the latents of rows that are not done: return these.

        `lines_left` has the lines of the rows of a prompt id that are not done, None for an id that is not known.
        """
        kept: list[tuple[Path, list[int] | None]] = []
        for folder in sorted(self.made.iterdir()) if self.made.is_dir() else ():
            latents, lines = sorted(folder.rglob(f"*{LATENT}")), lines_left(folder.name)
            if latents and lines != []:
                kept += [(latent, lines) for latent in latents]
                for unfinished in folder.rglob("*.part"):
                    unfinished.unlink()
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


def _split(stem: str) -> tuple[str, int | None]:
    """Return the stem of a row and the number of one of its several files; None for the number of a single file."""
    before, mark, number = stem.rpartition(_OF_SEVERAL)
    return (before, int(number)) if mark and number.isdecimal() else (stem, None)


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
