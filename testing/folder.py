"""A folder that a test model may be written to, without ever harming what is not the test model's.

A record in the folder names the test model's files and their sizes. New files are written beside the old ones first
and take their places at the end, so the folder always holds all of a test model or none of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

RECORD = "sample_model.json"
PARTIAL = ".partial"


class TinyModelError(OSError):
    """A test model cannot be written; the message says where and why."""


class ModelFolder:
    """`folder` as the place of a test model that is made by `recipe`."""

    def __init__(self, folder: Path, *, recipe: Mapping[str, int]) -> None:
        self.folder = folder
        self._recipe = dict(recipe)

    def is_there(self) -> bool:
        """Whether the test model of this recipe is there, complete."""
        record = self._read_record()
        return record is not None and record["recipe"] == self._recipe and self._changed(record) == []

    def files(self) -> dict[Path, int]:
        """The test model's files, relative to the folder, and their sizes in bytes."""
        record = self._read_record() or {"files": {}}
        return {Path(name): nbytes for name, nbytes in record["files"].items()}

    def nbytes(self) -> int:
        """What these files take on disk; a file with two names counts once."""
        stats = [(self.folder / path).stat() for path in self.files()]
        return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())

    @contextmanager
    def replacing(self) -> Iterator[Path]:
        """Give an empty folder to write to; its files replace the old test model when the block ends well.

        Raises:
            SampleModelError: the folder holds files that are not a test model's, which are left alone.
        """
        self._refuse_other_files()
        partial = self.folder / PARTIAL
        if partial.exists():
            shutil.rmtree(partial)
        try:
            partial.mkdir(parents=True)
            yield partial
            self._remove_old()
            self._take_in(partial)
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
                    f"{self.folder} holds {others[0]} and is no test model: name a new or an empty folder"
                )
            return
        for name in self._changed(record):
            if (self.folder / name).exists():
                raise TinyModelError(f"{self.folder / name} is no longer the test model's: move it elsewhere")

    def _remove_old(self) -> None:
        for path in self.files():
            (self.folder / path).unlink(missing_ok=True)
        (self.folder / RECORD).unlink(missing_ok=True)

    def _take_in(self, partial: Path) -> None:
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
        """The files that are gone or have another size."""
        return [name for name, nbytes in record["files"].items() if _size(self.folder / name) != nbytes]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
