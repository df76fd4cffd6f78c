"""ComfyUI's file of a user's settings, as far as it holds ours."""

from __future__ import annotations

import json
import logging
from pathlib import Path

logger = logging.getLogger("wanstream.host")

SETTINGS = "comfy.settings.json"
"""Name of the file, in the folder of a user; ComfyUI writes it whenever a setting changes."""
STRICT = "WanStream.Strict"


def setting_is_on(file: Path, name: str) -> bool:
    """True if the setting `name` is true in `file`; a file that is not there, or that cannot be read, has none."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as err:
        # ComfyUI goes on with its defaults as well.
        logger.warning("%s could not be read, so %s is off: %s", file, name, err)
        return False
    return isinstance(settings, dict) and settings.get(name) is True
