"""Foreign things where a batch keeps files, as in a folder from a stranger."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

Make = Callable[[Path, "Outside"], None]
"""Function to put something at a path."""

PAGE = 4096
MAGIC = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
OTHER_USER = 54321


@dataclass
class Outside:
    """Somebody else's folder next to the output folder, with the contents before the fault."""

    folder: Path
    before: Mapping[str, tuple[bytes | None, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "parts").mkdir(parents=True)
        (self.folder / "made" / "id").mkdir(parents=True)
        names = ("victim.mp4", "lock", "parts/00004.mp4", "made/id/x.mp4.part", "made/id/x.mp4")
        for name in names:
            (self.folder / name).write_bytes(b"of somebody else")
        self.victim.write_bytes(b"\0" * 9000)  # SQLite takes such a file for an empty journal
        self.before = self.contents()

    @property
    def victim(self) -> Path:
        return self.folder / "victim.mp4"

    def contents(self) -> dict[str, tuple[bytes | None, int]]:
        return {
            str(path): (path.read_bytes() if path.is_file() else None, path.lstat().st_ino)
            for path in sorted(self.folder.rglob("*"))
        }

    @property
    def touched(self) -> list[str]:
        after = self.contents()
        paths = self.before.keys() | after.keys()
        return sorted(path for path in paths if self.before.get(path) != after.get(path))


def link(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.victim)


def link_to_folder(path: Path, outside: Outside) -> None:
    inner = outside.folder / path.name
    path.symlink_to(inner if inner.is_dir() else outside.folder)


def dangling(path: Path, outside: Outside) -> None:
    path.symlink_to(outside.folder / "new")


def hard_link(path: Path, outside: Outside) -> None:
    os.link(outside.victim, path)


def pipe(path: Path, outside: Outside) -> None:
    os.mkfifo(path)


def socket_file(path: Path, outside: Outside) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def folder_with_a_file(path: Path, outside: Outside) -> None:
    path.mkdir()
    (path / "x").write_text("x")


def regular(path: Path, outside: Outside) -> None:
    path.write_bytes(b"x" * 100)


def of_another_user(path: Path, outside: Outside) -> None:
    regular(path, outside)
    os.chown(path, OTHER_USER, OTHER_USER)


def names_the_victim(path: Path, outside: Outside) -> None:
    """Write a rollback journal ending with another file's name: SQLite removes that file later."""
    of = path.with_name(path.name.removesuffix("-journal"))
    pages = (of.stat().st_size if of.is_file() else 0) // PAGE
    name = str(outside.victim).encode()
    # SQLite reads it as a list of journals still needed.
    outside.victim.write_bytes(b"of somebody else")
    head = MAGIC + struct.pack(">IIIII", 0, 0, pages, 512, PAGE)
    path.write_bytes(head.ljust(512, b"\0") + struct.pack(">I", (1 << 30) // PAGE + 1) + name)
    with path.open("ab") as file:
        file.write(struct.pack(">II", len(name), sum(name)) + MAGIC)


FOLDERS: tuple[Make, ...] = (link_to_folder, dangling, regular, pipe)
LINKS: tuple[Make, ...] = (link, dangling, hard_link, pipe, socket_file, folder_with_a_file)
JOURNALS = tuple(f"journal.sqlite{end}" for end in ("", ".lock", ".copy", ".recovered"))
PLACES: tuple[tuple[str, tuple[Make, ...]], ...] = (
    *((f".wanstream{end}", FOLDERS) for end in ("", "/parts", "/made", "/states")),
    (".wanstream/lock", (*LINKS, of_another_user)),
    (".wanstream/lock-journal", (*LINKS, names_the_victim)),
    (".wanstream/lock-wal", (link, regular)),
    (".wanstream/mine", (regular, link)),
    (".wanstream/parts/00004.mp4", (*LINKS, of_another_user)),
    (".wanstream/parts/..mine", (regular, link)),
    (".wanstream/made/id", (*LINKS[:-1], link_to_folder)),
    (".wanstream/made/some-id/x.mp4.part", LINKS[:-1]),
    (".wanstream/made/some-id/folder", (link_to_folder, pipe)),
    (".wanstream/states/part-x.safetensors", LINKS),
    *((name, LINKS) for name in JOURNALS),
    *((f"{name}-journal", (*LINKS, names_the_victim)) for name in JOURNALS),
    *((f"{name}-wal", (link, regular)) for name in JOURNALS),
    ("journal.sqlite-shm", (link, hard_link)),
    ("journal.sqlite.before", LINKS),
)


@contextmanager
def foreign_thing(out: Path, place: str, make: Make, outside: Outside) -> Iterator[Path]:
    """Put a foreign thing in place of the existing one, inside the `with`."""
    path = out / place
    aside = outside.folder.parent / "aside"
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        shutil.move(path, aside)
    make(path, outside)
    outside.before = outside.contents()  # a hard link is not a change
    try:
        yield path
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        if aside.exists():
            shutil.move(aside, path)


@contextmanager
def mounted(path: Path, outside: Outside) -> Iterator[None]:
    """Mount somebody else's folder. Raises OSError if not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "--bind", outside.folder / "parts", path]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.decode())
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)
