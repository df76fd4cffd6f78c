"""Probable names behind a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

_MOST_NEAR = 3


def nearest(unknown: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the name most similar to `unknown`, ignoring case and separators.

    Return None if no name has a similarity of `cutoff` (0 to 1).
    """
    plain = dict[str, str]()
    for name in known:
        plain.setdefault(_plain(name), name)
    near = difflib.get_close_matches(_plain(unknown), plain, n=1, cutoff=cutoff)
    return next(map(plain.get, near), None)


def names_listed(unknown: str, known: Iterable[str]) -> str:
    """Return a hint such as `did you mean steps? it has steps, seed` for an unknown name."""
    names = list(known)
    near = nearest(unknown, names)
    return f"{f'did you mean {near}? ' if near else ''}it has {', '.join(names)}"


def near_files(unknown: str, known: Iterable[str]) -> list[str]:
    """Return up to three file names `unknown` probably stands for.

    Names that differ in case, folder or suffix come first, in this order, else the most similar.
    """
    names = list(known)
    for part in (_path, _file, _stem):
        same = [name for name in names if part(name) == part(unknown)]
        if same:
            return same[:_MOST_NEAR]
    return _similar(_path, unknown, names) or _similar(_file, unknown, names)


def _similar(part: Callable[[str], str], unknown: str, names: Iterable[str]) -> list[str]:
    by_part = {part(name): name for name in names}
    return [by_part[near] for near in difflib.get_close_matches(part(unknown), by_part, n=1)]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _path(name: str) -> str:
    return name.replace("\\", "/").removeprefix("./").casefold()


def _file(name: str) -> str:
    return _path(name).rpartition("/")[2]


def _stem(name: str) -> str:
    return _file(name).rpartition(".")[0] or _file(name)
