"""Notices on nodes: shown, logged, and refused in strict mode."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...host import NOTICES_EVENT, Host, io
from ...schema.records import Notice

logger = logging.getLogger("wanstream.nodes")

NOTICES = "wanstream_notices"
"""History key for all notices, with their levels."""

WARNINGS = "wanstream_warnings"
"""History key for the warnings. The text on the node repeats them."""

PREFIXES = {"note": ""}


class StrictError(ValueError):
    """A warning raised as an error in strict mode (`--strict`, or the setting in ComfyUI)."""


def show_notices(host: Host, *notices: Notice, **values: str | float) -> dict[str, Any]:
    """Show notices on the executing node, log warnings, and return them as the node's UI output.

    Call it even without notices, to remove earlier ones from the node.

    Args:
        host: host of the node.
        notices: the notices.
        values: input values that all these notices concern. See `Notice.values`.

    Raises:
        StrictError: there are warnings and the host is strict.
    """
    # First: strict mode raises here, and the notices must not be shown in addition.
    warnings = accepted_warnings(host, notices)
    for warning in warnings:
        logger.warning("%s", warning)
    about = [asdict(replace(notice, values={**values, **notice.values})) for notice in notices]
    prompt_id, node_id = host.events.executing()
    # At once. ComfyUI sends `ui` only when the node has finished.
    host.events.announce(NOTICES_EVENT, {"prompt_id": prompt_id, "node": node_id, "notices": about})
    if not notices:
        return {}
    lines = [PREFIXES.get(notice.level, "Warning: ") + notice.text for notice in notices]
    shown = {"text": ["\n".join(lines)], NOTICES: about}
    if warnings:
        shown[WARNINGS] = warnings
    return shown


def noticed(
    host: Host, *outputs: object, notices: Iterable[Notice] = (), **values: str | float
) -> io.NodeOutput:
    """Return a node's outputs, with notices shown on it; see `show_notices`."""
    return io.NodeOutput(*outputs, ui=show_notices(host, *notices, **values) or None)


def accepted_warnings(host: Host, notices: Sequence[Notice]) -> list[str]:
    """Return the warnings. Raises StrictError if there are any and the host is strict."""
    warnings = [notice.text for notice in notices if notice.level != "note"]
    if warnings and host.settings().strict:
        raise StrictError(f"{'; '.join(warnings)}. This is an error because the run is strict")
    return warnings


def file_notices(warnings: Iterable[str], notes: Iterable[str]) -> tuple[Notice, ...]:
    """Return notices on files: a loss of precision, an error in strict mode, and unused tensors."""
    return (*(Notice(text=each, level="warning") for each in warnings), *map(Notice.of, notes))
