"""Refusal of foreign files in the places of a batch's own files.

An output folder may be unpacked from an archive, shared or synchronised. A link in the working
folder, or next to the journal, would make the batch change or remove a file somewhere else.
Everything is checked before anything is used.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from .names import PROMPT_ID, is_made_name, is_of_file_manager

WORK_FOLDER = ".wanstream"
LOCK = "lock"
PARTS = "parts"
MADE = "made"
STATES = "states"

_ALLOWED: Mapping[str, Callable[[str], bool]] = {
    PARTS: is_made_name,
    MADE: lambda name: bool(PROMPT_ID.fullmatch(name)),
    STATES: lambda name: True,  # unfinished runs, which remove only files named by themselves
}
"""Folders in the working folder, and the names in each. The entries of `MADE` are folders."""

_NAME_SURROGATE = 0x20000000
"""Windows reparse tag bit for links and junctions. Files in a cloud do not have it."""
_SUPER_JOURNAL = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
"""Last bytes of an SQLite rollback journal with the name of another file. SQLite removes the file
after the rollback.
"""
_COMPANIONS = ("-journal", "-wal", "-shm")


class ForeignFileError(ValueError):
    """A file in a batch's own place does not belong to this batch. Nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class _Trust:
    """Properties of a batch's own files: owners, device, and mount points."""

    folder: Path
    owners: Collection[int] | None
    """User ids. None: the system has none."""
    device: int
    mounts: Collection[str]

    @cached_property
    def owner_of_new_files(self) -> int | None:
        """User id that the file system gives to new files.

        A network drive may map all users to one.
        """
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                return os.fstat(file.fileno()).st_uid
        except OSError:  # the folder is not writable
            return None

    def check(
        self, path: Path, *, folder: bool | None = False, names: Mapping[int, int] | None = None
    ) -> os.stat_result | None:
        """Return the status of a file or a `folder`, of either for None. None if it does not exist.

        `names` are the numbers of names that a batch has given to files, by file number. Raises
        ForeignFileError.
        """
        found = _lstat(path)
        if found is None:
            return None
        if folder is None:
            folder = stat.S_ISDIR(found.st_mode)
        fault = self._fault(path, found, folder=folder, names=(names or {}).get(found.st_ino, 1))
        if fault:
            raise _refusal(path, fault)
        return found

    def _fault(self, path: Path, found: os.stat_result, *, folder: bool, names: int) -> str:
        """Return why the file or folder is not the batch's own, or ""."""
        if _is_link(found):
            return "is a link"
        if folder and not stat.S_ISDIR(found.st_mode):
            return "is not a folder"
        if not folder and not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if not folder and found.st_nlink > names:
            return (
                f"has {found.st_nlink} names (hard links), so that another file would change with "
                "it"
            )
        is_unknown = self.owners is not None and found.st_uid not in self.owners
        # Only for an unknown owner, because it creates a file.
        if is_unknown and found.st_uid != self.owner_of_new_files:
            return f"belongs to another user ({found.st_uid})"
        # Files in an overlay may have a layer's device. Only Linux mounts files, and lists them.
        if (folder and found.st_dev != self.device) or str(path) in self.mounts:
            return "is on another file system (mounted)"
        return ""


def check_work_folder(output: Path) -> None:
    """Raise ForeignFileError if the working folder in `output` has anything that no batch creates.

    Folders are entered only after their check, and no link is followed.
    """
    trust = _trust(output)
    if trust is None:
        return
    work = trust.folder / WORK_FOLDER
    if not trust.check(work, folder=True):
        return
    for path in own_entries(work):
        if path.name in _ALLOWED:
            trust.check(path, folder=True)
        elif path.name not in {LOCK, f"{LOCK}-journal"}:
            raise _refusal(path, "is not a file of a batch")
    check_database(work / LOCK)
    # A file made in the output folder is linked to a part, and then to the final name.
    files = chain(own_files(work / MADE), own_files(work / PARTS), own_entries(trust.folder))
    names = Counter(
        found.st_ino for path in files if (found := _lstat(path)) and stat.S_ISREG(found.st_mode)
    )
    for top, is_name in _ALLOWED.items():
        for path in own_entries(work / top):
            if trust.check(path, folder=top == MADE, names=names) and not is_name(path.name):
                raise _refusal(path, "is not a file of a batch")
    for path in _tree(work / MADE):
        trust.check(path, folder=None, names=names)


def check_database(path: Path) -> None:
    """Raise ForeignFileError if SQLite would follow a link or remove another file to open `path`.

    Nothing is checked if the folder does not exist.
    """
    trust = _trust(path.parent)
    if trust is None:
        return
    path = trust.folder / path.name
    trust.check(path)
    for ending in _COMPANIONS:
        companion = path.with_name(path.name + ending)
        if not trust.check(companion):
            continue
        if ending != "-journal":
            raise _refusal(companion, "is not a file of a batch: close the program that uses it")
        if _names_another(companion):
            raise _refusal(companion, "names another file, which would be removed")


def own_entries(folder: Path) -> Iterator[Path]:
    """Return the folder entries sorted by name, without the files of file managers.

    Returns nothing if another process has removed the folder.
    """
    try:
        # This is a whole list, because `remove_tree` removes entries while it iterates.
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        names = []
    except OSError as err:
        raise _refusal(folder, f"cannot be read ({err.strerror})") from err
    return (folder / name for name in names if not _is_harmless(folder / name))


def _is_harmless(path: Path) -> bool:
    """Return True for a file or folder that a file manager created. Links are not harmless.

    The batch neither uses nor removes such files.
    """
    found = _lstat(path)
    if found is None or _is_link(found):
        return False
    folder = stat.S_ISDIR(found.st_mode)
    return (folder or stat.S_ISREG(found.st_mode)) and is_of_file_manager(path.name, folder=folder)


def _is_link(found: os.stat_result) -> bool:
    # `st_reparse_tag` exists on Windows only.
    return stat.S_ISLNK(found.st_mode) or bool(
        getattr(found, "st_reparse_tag", 0) & _NAME_SURROGATE
    )


def _is_folder(path: Path) -> bool:
    """Return True for a folder, False for a link to one."""
    found = _lstat(path)
    return found is not None and stat.S_ISDIR(found.st_mode) and not _is_link(found)


def own_files(folder: Path) -> Iterator[Path]:
    """Return everything below a folder except folders and the files of file managers.

    Follows no link.
    """
    return (path for path in _tree(folder) if not _is_folder(path))


def _tree(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder except the files of file managers.

    Yields a folder before it enters it, and follows no link.
    """
    if _is_folder(folder):
        for path in own_entries(folder):
            yield path
            yield from _tree(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder except the files of file managers and the folders around them.

    Follows no link.
    """
    if not _is_folder(folder):
        return
    for path in own_entries(folder):
        if _is_folder(path):
            remove_tree(path)
        else:
            path.unlink()
    # A file manager's files stay, and `rmdir` would fail then.
    if not os.listdir(folder):
        folder.rmdir()


def check_file(path: Path) -> None:
    """Raise ForeignFileError if `path` exists and is not this user's regular file."""
    trust = _trust(path.parent)
    if trust is not None:
        trust.check(trust.folder / path.name)


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise _refusal(path, f"cannot be read ({err.strerror})") from err


def _refusal(path: Path, fault: str) -> ForeignFileError:
    folder = path.parent
    return ForeignFileError(
        f"{path.name!r} {fault}: move it away, or give another --out\n(in {folder})"
    )


def _trust(folder: Path) -> _Trust | None:
    """Return the properties of own files in a folder; None if it does not exist."""
    # Resolved, because the folder itself may be a link of the user's.
    folder = Path(os.path.realpath(folder))
    if not folder.is_dir():
        return None
    about = os.stat(folder)
    # The output folder may have another owner: root in a container, or the user of a share.
    owners = {0, os.geteuid(), about.st_uid} if hasattr(os, "geteuid") else None
    return _Trust(folder=folder, owners=owners, device=about.st_dev, mounts=_mounts())


def _mounts() -> Collection[str]:
    """Return the Linux mount points.

    A bind mount on the same file system has the same device number.
    """
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        # Not on Linux.
        return ()
    places = (line.split(" ")[4] for line in text.splitlines() if line.count(" ") > 4)
    # mountinfo writes spaces as octal numbers.
    return {re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place) for place in places}


def _names_another(rollback: Path) -> bool:
    with rollback.open("rb") as file:
        file.seek(max(os.path.getsize(rollback) - len(_SUPER_JOURNAL), 0))
        return file.read() == _SUPER_JOURNAL
