"""Shared memory segments: one copy of a block for all ranks on a machine, guarded by file locks."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch

from ...plan.programs import BlockKey
from ..core.pages import host_bytes, in_pages
from ..sources.base import SourceError
from .base import Reservation

if sys.platform != "win32":
    import fcntl


class FileLock:
    """Open file with a lock. Two locks on one path exclude each other, even in one process.

    Args:
        path: lock file, readable by this user only.
        create: create the file if it is missing. Otherwise raise.

    Raises:
        OSError: the file cannot be opened, belongs to another user, or the system has no such
            locks.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        if sys.platform == "win32":
            raise OSError("this system has no flock()")
        self._path = path
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        self.descriptor = os.open(path, flags, 0o600)
        status = os.fstat(self.descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            self.close()
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))

    def share(self) -> None:
        """Wait for a shared lock. An exclusive lock becomes a shared one."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def exclude(self) -> None:
        """Wait for an exclusive lock."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def try_exclude(self) -> bool:
        """Try to get an exclusive lock.

        If another lock is held on the file, return False and hold none.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def exists(self) -> bool:
        """Return True if the path still names this file."""
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.descriptor))

    def close(self) -> None:
        """Release the lock and close the file."""
        os.close(self.descriptor)


SHM = Path("/dev/shm")
PREFIX = "wanstream"
MEMORY = "memory"


class SharedSegment:
    """Memory for blocks, shared by name between one user's processes.

    Untouched pages use no RAM.

    A segment is a folder with one memory file and one lock file per block. Every process that uses
    it holds a shared lock on the memory file, and the last one to leave removes the folder.

    Args:
        identity: digest of the stored tensors (`FileSource.identity`). Segments with another
            identity, or other `sizes`, have other names.
        sizes: bytes per block that may be stored.
        folder: parent folder for the segment. By default `/dev/shm`, or the temporary folder.

    Raises:
        SourceError: the system has no such locks (Windows), or the folder cannot be used.
    """

    def __init__(
        self, identity: str, sizes: Mapping[BlockKey, int], *, folder: Path | None = None
    ) -> None:
        self._places: dict[BlockKey, range] = {}
        end = in_pages(len(sizes))  # one byte per block comes first: 1 if it is filled
        for key, nbytes in sizes.items():
            self._places[key] = range(end, end + nbytes)
            end += in_pages(nbytes)
        self._indexes = {key: index for index, key in enumerate(sizes)}
        folder = folder or _default_folder()
        self.path = folder / f"{_prefix()}{_digest(identity, sizes)}"
        self._nbytes = end
        self._closed = False
        self._filled_here: set[BlockKey] = set()
        self._opening = threading.Lock()  # several threads reserve
        self._finalizer: weakref.finalize[..., SharedSegment] | None = None
        self._memory: torch.Tensor
        self._open()

    def __contains__(self, key: object) -> bool:
        """Return True if the block has a place here."""
        return key in self._places

    @property
    def filled_bytes(self) -> int:
        """Bytes in blocks filled by any rank so far."""
        if self._closed:
            return 0
        self._open()
        marks = host_bytes(self._memory)[: len(self._places)]
        return sum(
            len(place) for place, mark in zip(self._places.values(), marks, strict=True) if mark
        )

    @contextmanager
    def reserve(self, key: BlockKey) -> Iterator[Reservation]:
        """Reserve a block's place. Wait while another rank fills it.

        If the reservation `needs_fill`, fill its `view` inside the `with` block. Leaving it without
        an error makes the block valid for all ranks, and read-only. After an error the next caller
        fills it.

        Raises:
            SourceError: the segment is full, was closed, or cannot be used.
        """
        if self._closed:
            raise SourceError(
                f"{self.path}: block {key.block} of {key.expert!r}: the segment was closed"
            )
        self._open()
        place = self._places[key]
        memory = self._memory[place.start : place.stop]
        if key in self._filled_here:
            yield Reservation(memory=memory, view=memory, needs_fill=False)
            return
        filled = host_bytes(self._memory)[self._indexes[key] : self._indexes[key] + 1]
        # Lock before checking the flag, even if it may be set: only the lock orders the block's
        # bytes, written by another process, before the flag. A rank killed while it fills releases
        # its lock with the flag unset.
        with closing(self._lock_of(key)) as lock:
            lock.exclude()
            needs_fill = not filled[0]
            if needs_fill:
                self._allocate(key)
            yield Reservation(memory=memory, view=memory, needs_fill=needs_fill)
            filled[0] = 1  # after the read, and not after an error
        self._filled_here.add(key)

    def release(self) -> None:
        """Leave the segment until the next `reserve`. The last process to leave removes it."""
        assert self._finalizer is not None, "the constructor opens the segment"
        self._finalizer()
        # A copy, because an empty view would keep the mapping alive.
        self._memory = self._memory[:0].clone()
        self._filled_here.clear()

    def close(self) -> None:
        """Leave the segment for good. The last process to leave removes it.

        Reserved blocks remain readable.
        """
        self.release()
        self._closed = True

    def _open(self) -> None:
        """Join the segment, unless this object has joined it already."""
        with self._opening:
            if self._finalizer is not None and self._finalizer.alive:
                return
            try:
                sweep(self.path.parent, keep=self.path)
                lock, mapping = _join(self.path, self._nbytes)
            except OSError as err:
                raise SourceError(
                    f"{self.path}: cannot be shared by the ranks: {err.strerror or err}; {UNSHARED}"
                ) from err
            # The memory outlives the run that opens it.
            with torch.inference_mode(False):
                self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
            self._lock = lock
            self._finalizer = weakref.finalize(self, _leave, self.path, lock, os.getpid())

    def _lock_of(self, key: BlockKey) -> FileLock:
        try:
            return FileLock(self.path / f"{self._indexes[key]}.lock")
        except OSError as err:
            raise SourceError(
                f"{self.path}: block {key.block} of {key.expert!r} cannot be shared by the ranks: "
                f"{err.strerror or err}; {UNSHARED}"
            ) from err

    def _allocate(self, key: BlockKey) -> None:
        # Without space in the file system, a write to an unallocated page would kill the process
        # (SIGBUS).
        nbytes = len(self._places[key])
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._lock.descriptor, self._places[key].start, nbytes)
            except OSError as err:
                disk = shutil.disk_usage(self.path.parent)
                raise SourceError(
                    f"{self.path}: {nbytes / 1e9:.2f} GB for block {key.block} of {key.expert!r} "
                    f"were refused ({err.strerror}): {self.filled_bytes / 1e9:.1f} GB are filled, "
                    f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB are free there; a "
                    f"container gets more by --shm-size, or {UNSHARED}"
                ) from None  # with its cause it would pass for a full disk of the outputs


UNSHARED = "without a shared segment every rank keeps its own blocks"


def _join(place: Path, nbytes: int) -> tuple[FileLock, mmap.mmap]:
    """Open or create a segment's memory file, with a shared lock on it, and map it."""
    # Until the lock is held, the last process to leave may remove the folder at any point. Then try
    # again.
    while True:
        # Not `exist_ok`: it raises if the folder is removed between its two checks. A missing
        # parent raises here.
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        try:
            _check_owner(place)
            lock = FileLock(place / MEMORY)
        except FileNotFoundError:
            continue
        try:
            if lock.try_exclude():
                # The first process: contents left by killed ones are not valid.
                # Truncation to 0 zeroes all pages, including the marks for filled blocks.
                os.ftruncate(lock.descriptor, 0)
                os.ftruncate(lock.descriptor, nbytes)
            lock.share()
            # flock drops the exclusive lock before it takes the shared one, so another
            # process may have removed or emptied the file between them.
            if lock.exists() and os.fstat(lock.descriptor).st_size == nbytes:
                return lock, mmap.mmap(lock.descriptor, nbytes)
        except OSError:
            _leave(place, lock, os.getpid())
            raise
        lock.close()


def _check_owner(place: Path) -> None:
    """Raise OSError unless `place` is a folder that only this user can write to.

    Segment names can be predicted, so another user could create one first and supply other weights.
    """
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "it is not a folder; remove it")
    # Permission bits only, because a folder inherits the setgid bit from its parent.
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o777 != 0o700):
        raise OSError(
            errno.EPERM,
            f"it belongs to user {status.st_uid} and has the mode "
            f"{stat.S_IMODE(status.st_mode):o}, not to user {os.getuid()} with 700; remove it",
        )


def _leave(place: Path, lock: FileLock, user: int) -> None:
    if os.getpid() == user:  # a forked child shares its parent's lock and must not release it
        if lock.try_exclude():
            shutil.rmtree(place, ignore_errors=True)
        lock.close()


def sweep(folder: Path | None = None, *, keep: Path | None = None) -> None:
    """Remove this user's unused segments, left behind by killed ranks.

    Args:
        folder: parent folder for segments. Default as for `SharedSegment`.
        keep: segment to keep.
    """
    folder = folder or _default_folder()
    for place in folder.glob(f"{_prefix()}*"):
        if place == keep:
            continue
        try:
            _check_owner(place)
            lock = FileLock(place / MEMORY, create=False)
        except OSError:  # just removed, not created yet, or owned by another user
            continue
        _leave(place, lock, os.getpid())


def _default_folder() -> Path:
    return SHM if SHM.is_dir() else Path(tempfile.gettempdir())


def _prefix() -> str:
    user = os.getuid() if hasattr(os, "getuid") else 0
    return f"{PREFIX}-{user}-"


def _digest(identity: str, sizes: Mapping[BlockKey, int]) -> str:
    blocks = "".join(f"\n{key.expert} {key.block} {nbytes}" for key, nbytes in sizes.items())
    return hashlib.sha256(f"{identity}{blocks}".encode()).hexdigest()[:32]
