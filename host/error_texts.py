"""Error messages for users: sentence and file names first, folders last.

ComfyUI's error panel shows a few lines. A long path at the start would leave no room for reason and
remedy.
"""

from __future__ import annotations

import os
import re

_START = re.compile(r"(?<!kept in )(?<![\w.:/\\~*)\]-])(?:[A-Za-z]:[\\/]|/|\\\\)(?=[^\s/\\])")
"""Start of an absolute path: not a URL, a date, a relative name or a division, and not the place
where a latent is kept."""
_SEPARATOR = re.compile(r"[\\/]" if os.name == "nt" else r"/")
_FOLDERS = re.compile(r"(?:[^\s/\\'\"`,;:()<>|]+[\\/])+")
"""Folders in a missing path, from the second character on."""
_NAME = re.compile(r"(?:(?![,;:] )[^/\\\n'\"])*\.\w")
"""Name with a suffix, possibly with spaces, but without the rest of a sentence."""
_IN_URL = re.compile(r"\S://\S*$")
_LONGEST = 4096
"""Limit for path characters. It bounds the search in a long message."""


def folders_last(text: str) -> str:
    """Return a message with file names instead of absolute paths, and the folders in a last line.

    Only the first line changes. The others say where something is.
    """
    text, *more = text.splitlines() or [""]
    folders: dict[str, None] = {}
    parts: list[str] = []
    end = 0
    for start in _START.finditer(text):
        begin = start.start()
        if begin < end or _IN_URL.search(text, max(end, begin - _LONGEST), begin):
            continue  # inside the previous path, or part of an address
        folder = _folder_at(text, begin, start.end())
        if folder:
            parts.append(text[end:begin])
            end = begin + len(folder) + 1
            folders[folder] = None
    first = "".join([*parts, text[end:]])
    lines = [first, *more]
    if folders:
        lines.append(f"{'folder' if len(folders) == 1 else 'folders'}: {', '.join(folders)}")
    return "\n".join(lines)


def _folder_at(text: str, begin: int, inner: int) -> str:
    """Return the folder part of the path at `begin` without the last separator.

    The first name starts at `inner`.
    """
    found = begin
    # A path may contain spaces, so the disk decides where it ends.
    for separator in _SEPARATOR.finditer(text, inner, begin + _LONGEST):
        if not _is_folder(text[begin : separator.start()]):
            break
        found = separator.start()
    missing = _FOLDERS.match(text, inner if found == begin else found + 1)
    folder = text[begin : missing.end() - 1 if missing else found]
    # "/models -> /mnt/models" is an example, and "/api/prompt" a route.
    is_file = _NAME.match(text, begin + len(folder) + 1) is not None
    return folder if is_file or (found > begin and len(_SEPARATOR.findall(folder)) > 1) else ""


def _is_folder(path: str) -> bool:
    try:
        return os.path.isdir(path)
    except ValueError:  # a NUL
        return False
