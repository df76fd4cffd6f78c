"""Test model folder. Files that do not belong to the test model are never changed or deleted.

A record in the folder lists the test model's files with their sizes. New files are first written to
a subfolder and replace the old ones at the end, so the folder contains all requested files or none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..schema.text import format_size

RECORD = "sample_model.json"
PARTIAL = ".partial"


class TinyModelError(OSError):
    """A test model cannot be written. The message has the path and the reason."""


class ModelFolder:
    """Folder for a test model written from `recipe`."""

    def __init__(self, folder: Path, *, recipe: Mapping[str, int]) -> None:
        self.folder = folder
        self._recipe = dict(recipe)

    def is_complete(self, names: Collection[str]) -> bool:
        """Return True if the folder contains an unchanged test model from this recipe.

        The model has the files and folders `names`.
        """
        record = self._read_record()
        if record is None or record["recipe"] != self._recipe or any(self._changed(record)):
            return False
        return self.names().issuperset(names)

    def names(self) -> set[str]:
        """Return the names of the test model's files and of their folders."""
        return {part for path in self.files for part in path.parts}

    @property
    def files(self) -> dict[Path, int]:
        """Sizes of the test model's files in bytes, by path relative to the folder."""
        record = self._read_record() or {"files": {}}
        return {Path(name): nbytes for name, nbytes in record["files"].items()}

    @property
    def nbytes(self) -> int:
        """Size of these files on disk, in bytes. Hard links to one file count once."""
        stats = [(self.folder / path).stat() for path in self.files]
        # Device and inode identify a file, so several names of one file count once.
        return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())

    def summary(self) -> str:
        """Return a line per weights file, and one for the total."""
        weights = {
            path: nbytes for path, nbytes in self.files.items() if path.suffix == ".safetensors"
        }
        lines = [f"{format_size(nbytes):>8}  {path}" for path, nbytes in weights.items()]
        return "\n".join([*lines, f"{format_size(self.nbytes):>8}  on disk, in {self.folder}"])

    @contextmanager
    def replacing(self) -> Iterator[Path]:
        """Yield an empty folder to write to.

        On a successful exit, files in it replace the old test model.

        Raises:
            TinyModelError: the folder contains files outside the test model. They are not changed.
        """
        self._refuse_other_files()
        partial = self.folder / PARTIAL
        # A killed process leaves this folder behind.
        if partial.exists():
            shutil.rmtree(partial)
        try:
            partial.mkdir(parents=True)
            yield partial
            # Only now, when the new files are complete.
            for path in (*self.files, Path(RECORD)):
                (self.folder / path).unlink(missing_ok=True)
            self._move_in(partial)
        finally:
            if partial.exists():
                shutil.rmtree(partial)

    def _refuse_other_files(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise TinyModelError(f"{self.folder} is a file: name a folder")
        record = self._read_record()
        if record is None:
            others = [path.name for path in sorted(self.folder.glob("*")) if path.name != PARTIAL]
            if others:
                raise TinyModelError(
                    f"{self.folder} contains {others[0]} and is not a test model: name a new or an "
                    "empty folder"
                )
            return
        for name in self._changed(record):
            if (self.folder / name).exists():
                raise TinyModelError(
                    f"{self.folder / name} is no longer the test model's: move it elsewhere"
                )

    def _move_in(self, partial: Path) -> None:
        files = {}
        for file in sorted(path for path in partial.rglob("*") if path.is_file()):
            path = file.relative_to(partial)
            target = self.folder / path
            if target.exists():
                raise TinyModelError(
                    f"{target} is not the test model's and in its way: move it elsewhere"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            # The partial folder is in the same folder, so nothing is copied.
            file.rename(target)
            files[path.as_posix()] = target.stat().st_size
        record = {"recipe": self._recipe, "files": files}
        # The record is written last, so only a complete model has one.
        (self.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _read_record(self) -> dict[str, dict[str, int]] | None:
        path = self.folder / RECORD
        if not path.is_file():
            return None
        try:
            record: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as err:
            raise TinyModelError(f"{path} is damaged: remove the folder, or name another") from err
        return record

    def _changed(self, record: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
        """Yield missing files and files with another size."""
        for name, nbytes in record["files"].items():
            path = self.folder / name
            # Sizes are compared, because a digest would read a gigabyte at each call.
            if not path.is_file() or path.stat().st_size != nbytes:
                yield name
