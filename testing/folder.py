"""Folder of a test model. Files that do not belong to the test model are never changed or deleted.

A record in the folder lists the test model's files and their sizes. New files are first written to a subfolder and
replace the old ones at the end, so the folder contains all files that were to be written, or none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

RECORD = "sample_model.json"
PARTIAL = ".partial"


class TinyModelError(OSError):
    """A test model cannot be written; the message contains the path and the reason."""


class ModelFolder:
    """Folder of a test model that is written from `recipe`."""

    def __init__(self, folder: Path, *, recipe: Mapping[str, int]) -> None:
        self.folder = folder
        self._recipe = dict(recipe)

    def is_complete(self, names: Collection[str]) -> bool:
        """Return True if the folder contains a test model of this recipe with these files and folders, unchanged."""
        record = self._read_record()
        if record is None or record["recipe"] != self._recipe or self._changed(record):
            return False
        return self.names().issuperset(names)

    def names(self) -> set[str]:
        """Return the names of the test model's files and of the folders that contain them."""
        return {part for path in self.files() for part in path.parts}

    def files(self) -> dict[Path, int]:
        """Return the test model's files, relative to the folder, and their sizes in bytes."""
        record = self._read_record() or {"files": {}}
        return {Path(name): nbytes for name, nbytes in record["files"].items()}

    def nbytes(self) -> int:
        """Return the bytes of these files on disk; hard links to one file count once."""
        stats = [(self.folder / path).stat() for path in self.files()]
        return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())

    @contextmanager
    def replacing(self) -> Iterator[Path]:
        """Yield an empty folder to write to; on a successful exit its files replace the old test model.

        Raises:
            TinyModelError: the folder contains files that are not a test model's; they are not changed.
        """
        self._refuse_other_files()
        partial = self.folder / PARTIAL
        if partial.exists():
            shutil.rmtree(partial)
        try:
            partial.mkdir(parents=True)
            yield partial
            self._remove_old()
            self._move_in(partial)
        finally:
            if partial.exists():
                shutil.rmtree(partial)

    def _refuse_other_files(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise TinyModelError(f"{self.folder} is a file: name a folder")
        record = self._read_record()
        if record is None:
            others = [path.name for path in _entries(self.folder) if path.name != PARTIAL]
            if others:
                raise TinyModelError(
                    f"{self.folder} contains {others[0]} and is not a test model: name a new or an empty folder"
                )
            return
        for name in self._changed(record):
            if (self.folder / name).exists():
                raise TinyModelError(f"{self.folder / name} is no longer the test model's: move it elsewhere")

    def _remove_old(self) -> None:
        for path in self.files():
            (self.folder / path).unlink(missing_ok=True)
        (self.folder / RECORD).unlink(missing_ok=True)

    def _move_in(self, partial: Path) -> None:
        files = {}
        for file in sorted(path for path in partial.rglob("*") if path.is_file()):
            path = file.relative_to(partial)
            target = self.folder / path
            if target.exists():
                raise TinyModelError(f"{target} is not the test model's and in its way: move it elsewhere")
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
            files[path.as_posix()] = target.stat().st_size
        record = {"recipe": self._recipe, "files": files}
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

    def _changed(self, record: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Return the files that are missing or have another size."""
        return [name for name, nbytes in record["files"].items() if _size(self.folder / name) != nbytes]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
