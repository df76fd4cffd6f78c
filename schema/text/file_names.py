"""File and folder names that Windows refuses.

They are refused on all systems, because folders are copied.
"""

from __future__ import annotations

import re

# Windows also reserves names with the superscript digits.
# Spaces before a suffix do not count: `nul .txt` is a device.
_DEVICE = re.compile(
    r"(?:con|conin\$|conout\$|prn|aux|nul|com[\d¹²³]|lpt[\d¹²³]) *(?:[.:].*)?", re.IGNORECASE
)
"""Device names, with any suffix."""
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f]')


def windows_fault(name: str) -> str | None:
    """Return why Windows cannot create a file or folder with this name, and the remedy.

    None if it can.
    """
    if _DEVICE.fullmatch(name):
        return "is a device name on Windows: use another name"
    if found := _FORBIDDEN.search(name):
        return f"contains {found[0]!r}, which no name on Windows can: remove it"
    if name.endswith((".", " ")):
        return "ends with a dot or a space, which Windows removes: use another name"
    return None


def windows_name(name: str) -> str:
    """Return a name that Windows can create.

    `_` replaces forbidden characters, and precedes a device name.
    """
    name = _FORBIDDEN.sub("_", name)
    if name.endswith((".", " ")):
        # One underscore is enough: the name then ends with neither a dot nor a space.
        name = f"{name[:-1]}_"
    return f"_{name}" if _DEVICE.fullmatch(name) else name
