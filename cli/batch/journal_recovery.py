"""Recovery of a damaged or missing journal from its last copy and the finished videos in the folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path

from .journal import DamagedJournalError, Journal, JournalError, OtherWorkflowError, copy_of


def open_journal(path: Path, *, workflow: str, start: Callable[[Journal], Sequence[str]]) -> tuple[Journal, list[str]]:
    """Open the journal at `path`, rebuilt from its last copy if it is damaged or missing; return it and notes.

    `start` resumes a batch from a journal and returns notes. A rebuilt journal replaces the damaged one only after
    `start` has returned, so that an error changes nothing. The damaged file, or a copy of another batch, is renamed.
    Raises JournalError, and the errors of `start`.
    """
    gone = copy_of(path).is_file() and not (path.is_file() and path.stat().st_size)
    reason = f"the journal {path} is missing"
    try:
        if not gone:
            return Journal(path, workflow=workflow), []
    except DamagedJournalError as err:
        reason = str(err)
    rebuilt = path.with_name(f"{path.name}.recovered")
    try:
        try:
            source, others = _rebuild(rebuilt, path, workflow)
        except JournalError as err:
            raise JournalError(f"{reason}; its copy {copy_of(path).name} is not usable: {err}") from err
        if others and gone:  # the user removed the journal to start another batch
            return Journal(path, workflow=workflow), []
        with Journal(rebuilt, workflow=workflow) as journal:
            found = start(journal)
        aside = _set_aside(path)
        if others and aside:
            copy_of(path).replace(copy_of(aside))
        rebuilt.replace(path)
    finally:
        rebuilt.unlink(missing_ok=True)
    kept = f"; it is kept as {aside.name}" if aside else ""
    return Journal(path, workflow=workflow), [f"{reason}{kept}; the batch resumes from {source}", *found]


_VIDEOS = "the finished videos in the folder"


def _rebuild(rebuilt: Path, path: Path, workflow: str) -> tuple[str, bool]:
    """Write the journal `rebuilt`: the copy if it is intact and of this workflow, else nothing.

    Returns a description of the source, and True if the copy is of another workflow.
    """
    for leftover in (rebuilt, Path(f"{rebuilt}-journal")):
        leftover.unlink(missing_ok=True)
    others = False
    try:
        shutil.copyfile(copy_of(path), rebuilt)
        Journal(rebuilt, workflow=workflow).close()
        return f"its last copy, {copy_of(path).name}, and {_VIDEOS}", others
    except (FileNotFoundError, DamagedJournalError):
        rebuilt.unlink(missing_ok=True)
    except OtherWorkflowError:
        rebuilt.unlink(missing_ok=True)
        others = True
    except JournalError:
        rebuilt.unlink(missing_ok=True)
        raise
    return _VIDEOS, others


def _set_aside(path: Path) -> Path | None:
    """Rename the damaged journal and return its new path; None if it does not exist."""
    names = chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{number}" for number in count(2)))
    aside = next(free for name in names if not (free := path.with_name(name)).exists())
    # Otherwise SQLite would apply this rollback file of the damaged journal to its replacement.
    half = Path(f"{path}-journal")
    if half.exists():
        half.replace(f"{aside}-journal")
    if not path.exists():
        return None
    path.replace(aside)
    return aside
