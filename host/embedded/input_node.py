"""Base classes for ComfyUI's own nodes here, with and without a user's file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..api import running_host
from ..events import Events
from ..folders import OutsideFolderError
from .events import EmbeddedEvents
from .files import EmbeddedFiles
from .workflow import io


class EmbeddedNode(io.ComfyNode):
    """One of ComfyUI's own nodes."""

    @classmethod
    def files(cls) -> EmbeddedFiles:
        """Return the running host's files. Outside a run there are none."""
        host = running_host()
        if host is None:
            return EmbeddedFiles()
        assert isinstance(host.files, EmbeddedFiles), f"{cls.__name__} runs in another host"
        return host.files

    @classmethod
    def events(cls) -> Events:
        """Return the running host's events."""
        host = running_host()
        if host is None:
            return EmbeddedEvents()
        return host.events


class InputFileNode(EmbeddedNode):
    """Node with a file from the input folder."""

    KIND: ClassVar[str]
    """Noun for the file in messages."""
    ENDINGS: ClassVar[Sequence[str]]
    """File name endings to list."""

    @classmethod
    def input_names(cls) -> list[str]:
        """Return the file names to choose from."""
        return cls.files().input_names(cls.ENDINGS)

    @classmethod
    def check(cls, name: str) -> bool | str:
        """Return True for an existing file, else a message for the user."""
        files = cls.files()
        try:
            if files.input_path(name).is_file():
                return True
        except OutsideFolderError as err:
            return f"Invalid {cls.KIND} file: {err}"
        return f"Invalid {cls.KIND} file: {files.missing_file(name, cls.ENDINGS)}"
