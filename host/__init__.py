"""Host: ComfyUI, real or embedded.

Inside ComfyUI, `io`, `ui` and `ComfyExtension` come from ComfyUI (`comfy_api.latest`). Elsewhere
they are the embedded ones with the same shape. `current_host` chooses the matching `Host`.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .api import Host, running_host, telemetry_options
from .embedded import EmbeddedHost
from .error_names import name_errors_of
from .events import Events
from .files import LATENT, LATENT_FOLDER, SAVING_NODE, Files
from .folders import OutputFile, OutputNameError, OutsideFolderError, annotated_name, inside
from .machine_profile import Profile, load_machine_profile, measure_machine
from .memory import Memory
from .models import GuiderSettings, Models
from .native_models import WEIGHT_DTYPES, EncoderFiles, ModelRun, ModelStreaming, ShareVisits
from .run_events import NOTICES_EVENT, RunEvents, run_settings

# `find_spec` for a top-level name finds the package without importing it.
_INSIDE_COMFYUI = find_spec("comfy_api") is not None

if TYPE_CHECKING or not _INSIDE_COMFYUI:
    from .embedded.workflow import io, ui
    from .embedded.workflow.io import ComfyExtension
else:
    from comfy_api.latest import ComfyExtension, io, ui


def search_aliases(words: str) -> dict[str, Any]:
    """Return words, separated by commas, as the search aliases argument of `io.Schema`.

    Empty in ComfyUI versions without aliases.
    """
    return {"search_aliases": words.split(", ")} if "search_aliases" in _SCHEMA_FIELDS else {}


def current_host() -> Host:
    """Return the running node's host, or outside a run the only one possible in this process.

    Only for node classes: they pass the host on, also to other threads, because these do not
    inherit the run context.
    """
    return running_host() or _process_host()


@cache
def _process_host() -> Host:
    """Return the host for ComfyUI, or an idle embedded host.

    ComfyUI has one queue and one memory manager per process.
    """
    if not _INSIDE_COMFYUI:
        return EmbeddedHost()
    from .comfy.adapter.comfy_host import ComfyHost

    return ComfyHost()


_SCHEMA_FIELDS = {field.name for field in fields(io.Schema)}

__all__ = [
    "LATENT",
    "LATENT_FOLDER",
    "NOTICES_EVENT",
    "SAVING_NODE",
    "WEIGHT_DTYPES",
    "ComfyExtension",
    "EncoderFiles",
    "Events",
    "Files",
    "GuiderSettings",
    "Host",
    "Memory",
    "ModelRun",
    "ModelStreaming",
    "Models",
    "OutputFile",
    "OutputNameError",
    "OutsideFolderError",
    "Profile",
    "RunEvents",
    "ShareVisits",
    "annotated_name",
    "current_host",
    "inside",
    "io",
    "load_machine_profile",
    "measure_machine",
    "name_errors_of",
    "run_settings",
    "search_aliases",
    "telemetry_options",
    "ui",
]
