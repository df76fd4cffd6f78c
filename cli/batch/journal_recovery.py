"""The way out of a damaged journal: its last copy, the finished videos in the folder, and the same command again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path

from .journal import DamagedJournalError, Journal, JournalError, OtherWorkflowError, copy_of


def open_journal(path: Path, *, workflow: str, start: Callable[[Journal], Sequence[str]]) -> tuple[Journal, list[str]]:
    """Open the journal at `path`, or a new one made of its last copy where it is damaged or gone; and words about that.

    `start` takes a journal up and returns words about what it found; a new journal replaces a damaged one only after
    `start` has returned, so that a refusal changes nothing. The damaged file stays under another name, and so does a
    copy of another batch. Raises JournalError, and what `start` raises.
    """
    gone = copy_of(path).is_file() and not (path.is_file() and path.stat().st_size)
    reason = f"the journal {path} is gone"
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
            raise JournalError(f"{reason}; its copy {copy_of(path).name} is of no use: {err}") from err
        if others and gone:  # The journal was removed to begin another batch.
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
    return Journal(path, workflow=workflow), [f"{reason}{kept}; the batch goes on from {source}", *found]


_VIDEOS = "the finished videos in the folder"


def _rebuild(rebuilt: Path, path: Path, workflow: str) -> tuple[str, bool]:
    """Make `rebuilt` a journal of this workflow, of the copy if that is whole.

    Returns its source in words, and True if the copy is that of another workflow.
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
    """Rename the damaged journal, and return its name; None if there is none."""
    names = chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{number}" for number in count(2)))
    aside = next(free for name in names if not (free := path.with_name(name)).exists())
    # SQLite would roll the changes in this file back in the journal that takes the place of the damaged one.
    half = Path(f"{path}-journal")
    if half.exists():
        half.replace(f"{aside}-journal")
    if not path.exists():
        return None
    path.replace(aside)
    return aside
