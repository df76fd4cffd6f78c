"""File names that a batch writes: valid on every system, and never a name of the journal."""

from __future__ import annotations

import re
import unicodedata

from ...schema.text import windows_fault

FILE_NAME = re.compile(r"\w(?:[\w .,+()-]{0,98}[\w)])?")
"""Valid stems for row files."""
PROMPT_ID = re.compile(r"\w[\w-]{0,99}")
"""Prompt id format, without separators, because the ids become folder names and URL parts."""
SUFFIX = re.compile(r"\.\w{1,15}")
OF_SEVERAL = "~"
"""Separator between a stem and a number. Row names cannot contain it."""

_MADE = re.compile(rf"(?:{OF_SEVERAL}\d{{1,9}})?(?:{SUFFIX.pattern})?")
"""Text after the stem in a file name: a number if there are several files, and a suffix."""
_MADE_NAME = re.compile(rf"{FILE_NAME.pattern}{_MADE.pattern}")
_FILE_OF_MANAGER = re.compile(
    r"\.ds_store|\.localized|\.directory|(?:eh)?thumbs\.db|desktop\.ini|\._.+|\.nfs.+|\.fuse_hidden.+",
    re.IGNORECASE,
)
_FOLDER_OF_MANAGER = re.compile(r"@eadir|\.@__thumb|\.appledouble", re.IGNORECASE)
"""Names that file managers, shares and network file systems create in any folder."""


def name_key(name: str) -> str:
    """Return an equal text for all names of one file on any system.

    macOS composes letters, and most systems ignore case.
    """
    # Normalised again, because `casefold` may decompose letters.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


DIGITS = 5
"""Minimum digits in an unnamed row's stem."""


def number_stem(number: int) -> str:
    """Return an unnamed row's stem."""
    return f"{number:0{DIGITS}}"


def is_number(stem: str) -> bool:
    """Return True for an unnamed row's stem."""
    # `isdecimal` alone accepts digits of other scripts.
    return len(stem) >= DIGITS and stem.isascii() and stem.isdecimal()


def stem_fault(stem: str) -> str | None:
    """Return why a text cannot be the stem of row files. None if it can."""
    if not FILE_NAME.fullmatch(stem):
        return (
            "is not a valid file name: use up to 100 letters, digits, spaces and any of . , + ( ) "
            "- _"
        )
    return windows_fault(stem)


def is_made_name(name: str, *, stem: str | None = None) -> bool:
    """Return True if row files, with this stem or with any, may have this name."""
    if stem is None:
        return bool(_MADE_NAME.fullmatch(name))
    return name.startswith(stem) and bool(_MADE.fullmatch(name[len(stem) :]))


def is_of_file_manager(name: str, *, folder: bool) -> bool:
    """Return True for a file or `folder` name that file managers create next to a user's files."""
    names = {True: _FOLDER_OF_MANAGER, False: _FILE_OF_MANAGER}[folder]
    return bool(names.fullmatch(name))


def is_of_journal(name: str, journal: str) -> bool:
    """Return True if a file may be the journal called `journal`.

    `name` may also be a stem to which a server appends a suffix. The names of the lock, the copies,
    and SQLite's files next to the journal begin with the journal name.
    """
    key = name_key(name)
    whole = name_key(journal)
    return key in {whole, whole.rpartition(".")[0]} or key.startswith((f"{whole}-", f"{whole}."))
