"""L6: the door to ComfyUI, real or embedded.

`io`, `ui` and `ComfyExtension` are ComfyUI's own (`comfy_api.latest`) when this package runs inside ComfyUI, else the
embedded ones with the same shape; `host` is the matching `Door`. The choice is made once, on import.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..plan import ExpertsRef, LoraRef
from .announced_run import AnnouncedRun
from .door import (
    Door,
    ModelNotFoundError,
    NeedsComfyUIError,
    OutputFile,
    OutputNameError,
    OutsideFolderError,
    Progress,
)

host: Door

# `find_spec` of a top-level name looks for it and imports nothing.
if TYPE_CHECKING or find_spec("comfy_api") is None:
    from . import embedded_io as io
    from . import embedded_ui as ui
    from .embedded_door import embedded_door as host
    from .embedded_io import ComfyExtension
else:
    from comfy_api.latest import ComfyExtension, io, ui

    from .comfy import ComfyDoor

    host = ComfyDoor()


def search_words(*words: str) -> dict[str, Any]:
    """The argument of `io.Schema` by which ComfyUI's search finds a node by `words`; none in versions without it."""
    return {"search_aliases": list(words)} if "search_aliases" in _SCHEMA_FIELDS else {}


_SCHEMA_FIELDS = {field.name for field in fields(io.Schema)}

__all__ = [
    "AnnouncedRun",
    "ComfyExtension",
    "Door",
    "ExpertsRef",
    "LoraRef",
    "ModelNotFoundError",
    "NeedsComfyUIError",
    "OutputFile",
    "OutputNameError",
    "OutsideFolderError",
    "Progress",
    "host",
    "io",
    "search_words",
    "ui",
]
