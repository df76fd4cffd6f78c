"""Base class for nodes with model files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from ...host import Files, current_host, io
from ...wan import lora_version
from ...wan.checkpoint import ModelVersion, model_version
from ...wan.text import encoder_version
from .file_checks import LORA_FOLDERS, NONE, SAME_FOLDER, TEXT_FOLDERS

VERSIONS: Mapping[tuple[str, ...], Callable[[Path], ModelVersion]] = {
    TEXT_FOLDERS: encoder_version,
    LORA_FOLDERS: lora_version,
}
"""Version functions for models that depend on neighbouring files, by model folders."""


class FileNode(io.ComfyNode):
    """Node with model files. It runs again when one was replaced under the same name."""

    FILES: ClassVar[Mapping[str, tuple[str, ...]]]
    """Model folders for each file input."""
    READS_GGUF: ClassVar[bool] = True
    """False where a GGUF would be refused. Then none is listed."""

    @classmethod
    def file_input(cls, name: str, *, no_file: str | None = None, **settings: Any) -> io.Input:
        """Return the input for one of `FILES`. `no_file` is the default and means no file."""
        names = current_host().files.model_names(*cls.FILES[name])
        if not cls.READS_GGUF:
            names = [each for each in names if not each.lower().endswith(".gguf")]
        if no_file is not None:
            settings["default"] = no_file
            names = [no_file, *names]
        return io.Combo.Input(name, options=names, **settings)

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> tuple[bool, str]:
        """Return a key that also changes with strict mode, where warnings are errors."""
        host = current_host()
        versions = [
            _version(host.files, kinds, inputs.get(name)) for name, kinds in cls.FILES.items()
        ]
        # ComfyUI writes fingerprints into the graph in every saved file. They must not show the
        # machine's folders.
        return host.settings().strict, sha256(repr(versions).encode()).hexdigest()


def _version(files: Files, kinds: tuple[str, ...], name: str | None) -> ModelVersion:
    """Return a model's version by name.

    Linked names (None) and choices without a file have no version.
    """
    if name in (None, NONE, SAME_FOLDER):
        return ()
    try:
        # `str`, because a graph may contain any JSON value here.
        return VERSIONS.get(kinds, model_version)(files.model_path(str(name), *kinds))
    except (OSError, ValueError):
        return ()  # validation, or the node itself, raises the error
