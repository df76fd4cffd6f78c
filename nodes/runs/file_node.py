"""Base of the nodes with model files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from ...host import current_host, io
from ...wan import ModelVersion, encoder_version, lora_version, model_version
from .file_checks import LORA_FOLDERS, NONE, SAME_FOLDER, TEXT_FOLDERS

VERSIONS: Mapping[tuple[str, ...], Callable[[Path], ModelVersion]] = {
    TEXT_FOLDERS: encoder_version,
    LORA_FOLDERS: lora_version,
}
"""Versions of models that depend on files next to theirs, by model folders."""


class FileNode(io.ComfyNode):
    """Node with model files. It runs again when one was replaced under its name."""

    FILES: ClassVar[Mapping[str, tuple[str, ...]]]
    """Model folders of each file input."""

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> tuple[bool, str]:
        """Return a key that also changes with strict mode, in which warnings are errors."""
        versions = [_version(kinds, inputs.get(name)) for name, kinds in cls.FILES.items()]
        # ComfyUI writes fingerprints into the graph of every saved file: they must not show the folders of the machine.
        return current_host().strict(), sha256(repr(versions).encode()).hexdigest()


def _version(kinds: tuple[str, ...], name: str | None) -> ModelVersion:
    """Return the version of a model by name. Linked names (None) and choices without a file have none."""
    if name in (None, NONE, SAME_FOLDER):
        return ()
    try:
        return VERSIONS.get(kinds, model_version)(current_host().model_path(str(name), *kinds))
    except (OSError, ValueError):
        return ()  # validation, or the node itself, raises the error
