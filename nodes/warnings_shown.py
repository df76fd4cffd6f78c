"""Warnings about inputs that look wrong but could be meant: on the node and in the log, or an error if so set."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..host import host

LOG = logging.getLogger("wanstream.nodes")

WARNINGS = "wanstream_warnings"
"""The key of the history that keeps them, next to the text that the node shows."""


class StrictError(ValueError):
    """Something looks wrong, and the user wants an error then (`--strict`, or the setting in ComfyUI)."""


def shown_warnings(found: Sequence[str]) -> dict[str, Any] | None:
    """Log each of them and return what the node shows; None where there are none.

    Raises StrictError where the host is strict.
    """
    if not found:
        return None
    if host.strict():
        raise StrictError(f"{'; '.join(found)}. This is an error because the run is strict")
    for warning in found:
        LOG.warning("%s", warning)
    return {"text": ["\n".join(f"Warning: {warning}" for warning in found)], WARNINGS: list(found)}
