"""Notices: sentences to the user about one node in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

NoticeLevel = Literal["note", "warning", "wrong"]
"""`note`: information. `warning`: another setting is probably better. `wrong`: the video is
probably wrong."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Sentence about a node, shown on the node."""

    text: str
    level: NoticeLevel = "note"
    values: Mapping[str, str | float] = field(default_factory=dict)
    """Input values that the notice is about, by input name. It no longer applies when one
    changes."""
    exchange: tuple[str, str] | None = None
    """Two inputs with values to exchange."""

    @classmethod
    def of(cls, note: str) -> Notice:
        """Return a note without values."""
        return cls(text=note)
