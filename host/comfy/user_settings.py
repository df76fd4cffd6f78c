"""Our settings in ComfyUI's settings file of a user."""

from __future__ import annotations

import json
import logging
from pathlib import Path

logger = logging.getLogger("wanstream.host")

SETTINGS = "comfy.settings.json"
"""Name of the file in a user's folder; ComfyUI writes it whenever a setting changes."""
STRICT = "WanStream.Strict"
SMALL_MODELS = "WanStream.SmallModels"
"""Native models of any size stream, to try it without a large one."""


def setting_is_on(file: Path, name: str) -> bool:
    """Return True if the setting `name` is true in `file`; False for a missing or unreadable file."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as err:
        # No error: ComfyUI uses its defaults then as well.
        logger.warning("cannot read %s, so %s is off: %s", file, name, err)
        return False
    return isinstance(settings, dict) and settings.get(name) is True
