"""Host API: ComfyUI, real or embedded.

`io`, `ui` and `ComfyExtension` are those of ComfyUI (`comfy_api.latest`) when this package runs inside ComfyUI, else
the embedded ones with the same shape; the choice is made once, on import. `current_host()` is the matching `HostApi`.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .api import (
    SAVING_NODE,
    WEIGHT_DTYPES,
    HostApi,
    ModelRun,
    ModelStreaming,
    NeedsComfyUIError,
    ProgressBar,
    ShareVisits,
    current_host,
)
from .comfy.guider_session import GuiderSettings
from .error_names import name_errors_of
from .folders import (
    LATENT,
    LATENT_FOLDER,
    ModelNotFoundError,
    OutputFile,
    OutputNameError,
    OutsideFolderError,
    annotated_name,
    inside,
)
from .machine_profile import Profile, load_machine_profile, measure_machine
from .run_events import NOTICES_EVENT, RunEvents, run_settings
from .workers import SharedRun, StartPool, check_ray, cluster, cluster_names, gpus_of, start_pool, wire_notes

# `find_spec` of a top-level name finds the package without importing it.
if TYPE_CHECKING or find_spec("comfy_api") is None:
    from .embedded import io, ui
    from .embedded.io import ComfyExtension
else:
    from comfy_api.latest import ComfyExtension, io, ui


def search_aliases(*words: str) -> dict[str, Any]:
    """Return `words` as the search aliases argument of `io.Schema`; empty in ComfyUI versions without aliases."""
    return {"search_aliases": list(words)} if "search_aliases" in _SCHEMA_FIELDS else {}


_SCHEMA_FIELDS = {field.name for field in fields(io.Schema)}

__all__ = [
    "LATENT",
    "LATENT_FOLDER",
    "NOTICES_EVENT",
    "SAVING_NODE",
    "WEIGHT_DTYPES",
    "ComfyExtension",
    "GuiderSettings",
    "HostApi",
    "ModelNotFoundError",
    "ModelRun",
    "ModelStreaming",
    "NeedsComfyUIError",
    "OutputFile",
    "OutputNameError",
    "OutsideFolderError",
    "Profile",
    "ProgressBar",
    "RunEvents",
    "ShareVisits",
    "SharedRun",
    "StartPool",
    "annotated_name",
    "check_ray",
    "cluster",
    "cluster_names",
    "current_host",
    "gpus_of",
    "inside",
    "io",
    "load_machine_profile",
    "measure_machine",
    "name_errors_of",
    "run_settings",
    "search_aliases",
    "start_pool",
    "ui",
    "wire_notes",
]
