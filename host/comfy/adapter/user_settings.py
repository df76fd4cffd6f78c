"""Our settings in a ComfyUI user's settings file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

logger = logging.getLogger("wanstream.host")

STRICT = "WanStream.Strict"
SMALL_MODELS = "WanStream.SmallModels"
"""Native models of any size stream, for trials without a large model."""


def setting_is_on(file: Path, name: str) -> bool:
    """Return True if the setting `name` is true in `file`.

    Return False for a missing or unreadable file.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as err:
        # Not an error: ComfyUI falls back to defaults as well.
        logger.warning("cannot read %s, so %s is off: %s", file, name, err)
        return False
    # Not by truth value: the text "false" in an edited file is true in Python.
    return isinstance(settings, dict) and settings.get(name) is True
