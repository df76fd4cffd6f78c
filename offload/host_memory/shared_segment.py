"""Shared memory segments: a block is in RAM once for all ranks of a machine, guarded by file locks."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from ...plan import BlockKey
from ..formats.layout import host_bytes
from ..sources.base import SourceError
from .base import Reservation
from .pages import in_pages

if sys.platform != "win32":
    import fcntl


class FileLock:
    """One opened file and its lock. Two of the same path exclude each other also inside one process.

    Args:
        path: the file; made if it is missing, readable by this user only.
        create: False: raise where it is missing.

    Raises:
        OSError: the file cannot be opened, is none of this user's, or the system has no such locks.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        if sys.platform == "win32":
            raise OSError("this system has no file locks of the kind that is needed")
        self._path = path
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self.descriptor = os.open(path, flags, 0o600)
        status = os.fstat(self.descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            self.close()
            raise PermissionError(1, "it belongs to another user", str(path))

    def share(self) -> None:
        """Wait until nobody excludes others, and be one of those who share; an exclusive lock is turned into this."""
        self._lock(shared=True, wait=True)

    def exclude(self) -> None:
        """Wait until nobody else holds the lock, and exclude others."""
        self._lock(shared=False, wait=True)

    def try_exclude(self) -> bool:
        """Exclude others, unless somebody else holds the lock; then this one holds nothing any more."""
        try:
            self._lock(shared=False, wait=False)
        except BlockingIOError:
            return False
        return True

    def is_at_its_path(self) -> bool:
        """Whether the file is still there under its name."""
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.descriptor))

    def close(self) -> None:
        """Let go of the lock and the file."""
        os.close(self.descriptor)

    def _lock(self, *, shared: bool, wait: bool) -> None:
        if sys.platform != "win32":
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self.descriptor, kind if wait else kind | fcntl.LOCK_NB)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


SHM = Path("/dev/shm")
PREFIX = "wanstream"
MEMORY = "memory"


class SharedSegment:
    """Room for blocks, in memory that is shared by name; a page that was not touched takes no memory.

    Args:
        identity: what is stored: files, their versions and the format, as `FileSource.identity` says. Segments of
            another identity, or of other blocks, never meet.
        sizes: bytes of every block that may be stored.
        folder: where the segment lies, as a folder of its own.

    Raises:
        SourceError: the system has no such locks (Windows), or the folder cannot be used.
    """

    def __init__(self, identity: str, sizes: Mapping[BlockKey, int], *, folder: Path | None = None) -> None:
        self._places: dict[BlockKey, range] = {}
        end = in_pages(len(sizes))  # a mark for each block comes first
        for key, nbytes in sizes.items():
            self._places[key] = range(end, end + nbytes)
            end += in_pages(nbytes)
        self._indexes = {key: index for index, key in enumerate(sizes)}
        folder = folder or _usual_folder()
        self.path = folder / f"{_prefix()}{_digest(identity, sizes)}"
        self._nbytes = end
        self._closed = False
        self._filled_here: set[BlockKey] = set()
        self._leave: weakref.finalize[..., SharedSegment] | None = None
        self._memory: torch.Tensor
        self._open()

    def __contains__(self, key: object) -> bool:
        """Whether the block has a place here."""
        return key in self._places

    @property
    def filled_bytes(self) -> int:
        """Bytes of the blocks that some rank has filled so far."""
        if self._closed:
            return 0
        self._open()
        marks = host_bytes(self._memory)[: len(self._places)]
        return sum(len(place) for place, mark in zip(self._places.values(), marks, strict=True) if mark)

    @contextmanager
    def reserve(self, key: BlockKey) -> Iterator[Reservation]:
        """Reserve the place of a block; wait while another rank fills it.

        If the reservation `needs_fill`, fill its `view` inside the `with` block: leaving it without an error makes the
        block valid for all ranks, and read-only. After an error the next caller fills it.

        Raises:
            SourceError: the segment is full, was closed, or cannot be used.
        """
        if self._closed:
            raise SourceError(f"{self.path}: block {key.block} of {key.expert!r}: the segment was closed")
        self._open()
        place = self._places[key]
        memory = self._memory[place.start : place.stop]
        if key in self._filled_here:
            yield Reservation(memory=memory, view=memory, needs_fill=False)
            return
        mark = host_bytes(self._memory)[self._indexes[key] : self._indexes[key] + 1]
        # The lock is taken also where the mark is set: only then it is sure that its bytes were written before.
        with self._lock_of(key) as lock:
            lock.exclude()
            needs_fill = not mark[0]
            if needs_fill:
                self._allocate(key)
            yield Reservation(memory=memory, view=memory, needs_fill=needs_fill)
            mark[0] = 1
        self._filled_here.add(key)

    def release(self) -> None:
        """Let go until the next `reserve`; as with `close`, the last one to do so removes the segment."""
        assert self._leave is not None, "it was opened when it was made"
        self._leave()
        self._memory = self._memory[:0].clone()
        self._filled_here.clear()

    def close(self) -> None:
        """Let go; the last one to do so removes the segment. Blocks stay readable for who still holds one."""
        self.release()
        self._closed = True

    def _open(self) -> None:
        """Be a user of the segment, if this one is not already."""
        if self._leave is not None and self._leave.alive:
            return
        try:
            sweep(self.path.parent, but=self.path)
            lock = _opened(self.path, self._nbytes)
            mapping = _mapped(self.path, lock, self._nbytes)
        except OSError as err:
            raise SourceError(f"{self.path}: cannot be shared by the ranks: {err.strerror or err}; {UNSHARED}") from err
        with torch.inference_mode(False):
            self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._lock = lock
        self._leave = weakref.finalize(self, _leave, self.path, lock, os.getpid())

    def _lock_of(self, key: BlockKey) -> FileLock:
        try:
            return FileLock(self.path / f"{self._indexes[key]}.lock")
        except OSError as err:
            raise SourceError(
                f"{self.path}: block {key.block} of {key.expert!r} cannot be shared by the ranks: "
                f"{err.strerror or err}; {UNSHARED}"
            ) from err

    def _allocate(self, key: BlockKey) -> None:
        # A write to a page that the file system has no room for would end the process.
        nbytes = len(self._places[key])
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._lock.descriptor, self._places[key].start, nbytes)
            except OSError as err:
                room = shutil.disk_usage(self.path.parent)
                raise SourceError(
                    f"{self.path}: {nbytes / 1e9:.2f} GB for block {key.block} of {key.expert!r} are "
                    f"refused ({err.strerror}): {self.filled_bytes / 1e9:.1f} GB are filled, {room.free / 1e9:.1f} of "
                    f"{room.total / 1e9:.1f} GB are free there; a container gets more by --shm-size, or {UNSHARED}"
                ) from err


UNSHARED = "without a shared segment every rank keeps its own blocks"


def _opened(place: Path, nbytes: int) -> FileLock:
    """Open or make the memory file of a segment, and stay its user."""
    while True:
        # Not `exist_ok`, which raises where the folder is removed between its two looks. A missing parent raises here.
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        try:
            _check_own(place)
            lock = FileLock(place / MEMORY)
        except FileNotFoundError:  # its last user has removed the folder just now
            continue
        try:
            if lock.try_exclude():
                os.ftruncate(lock.descriptor, 0)
                os.ftruncate(lock.descriptor, nbytes)
            lock.share()
            if lock.is_at_its_path() and os.fstat(lock.descriptor).st_size == nbytes:
                return lock
        except OSError:
            _leave(place, lock, os.getpid())
            raise
        lock.close()


def _check_own(place: Path) -> None:
    """Raise OSError for what another user, who can predict the name, may have put there to hand in weights."""
    about = place.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise OSError(errno.ENOTDIR, "it is not a folder; remove it")
    # Permissions alone: a folder inherits the setgid bit of the one that it is made in.
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o777 != 0o700):
        raise OSError(
            errno.EPERM,
            f"it belongs to user {about.st_uid} and has the mode {stat.S_IMODE(about.st_mode):o}, not to user "
            f"{os.getuid()} with 700; remove it",
        )


def _mapped(place: Path, lock: FileLock, nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(lock.descriptor, nbytes)
    except OSError:
        _leave(place, lock, os.getpid())
        raise


def _leave(place: Path, lock: FileLock, user: int) -> None:
    if os.getpid() == user:  # a forked child has the lock of its parent
        if lock.try_exclude():
            shutil.rmtree(place, ignore_errors=True)
        lock.close()


def sweep(folder: Path | None = None, *, but: Path | None = None) -> None:
    """Remove the segments of this user that nobody uses, as those of ranks that were all killed at once."""
    folder = folder or _usual_folder()
    for place in folder.glob(f"{_prefix()}*"):
        if place == but:
            continue
        try:
            _check_own(place)
            lock = FileLock(place / MEMORY, create=False)
        except OSError:  # gone meanwhile, not made yet, or another user's
            continue
        if lock.try_exclude():
            shutil.rmtree(place, ignore_errors=True)
        lock.close()


def _usual_folder() -> Path:
    return SHM if SHM.is_dir() else Path(tempfile.gettempdir())


def _prefix() -> str:
    user = os.getuid() if hasattr(os, "getuid") else 0
    return f"{PREFIX}-{user}-"


def _digest(identity: str, sizes: Mapping[BlockKey, int]) -> str:
    blocks = "".join(f"\n{key.expert} {key.block} {nbytes}" for key, nbytes in sizes.items())
    return hashlib.sha256(f"{identity}{blocks}".encode()).hexdigest()[:32]
