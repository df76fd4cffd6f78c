"""Subset of ComfyUI's V3 `ui` module for our nodes: results shown below a node and in history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .io import FolderType


class SavedResult(dict[str, str]):
    """A file written by a node, with the fields for the frontend's `/view` requests."""

    def __init__(self, filename: str, subfolder: str, type: FolderType) -> None:
        super().__init__(filename=filename, subfolder=subfolder, type=type.value)


class PreviewVideo:
    """Video files."""

    def __init__(self, values: Sequence[SavedResult]) -> None:
        self.values = list(values)

    def as_dict(self) -> dict[str, Any]:
        return {"images": self.values, "animated": (True,)}
