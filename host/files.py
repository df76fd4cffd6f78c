"""Host files: model folders, and the user's input and output files.

Names in a graph are untrusted. A host returns paths inside its folders, or raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

from .folders import (
    MODEL_KINDS,
    OutputFile,
    OutsideFolderError,
    annotated_name,
    check_output,
    find_model,
    inside,
    output_file,
)

STATE_FOLDER = ".wanstream-states"
"""Folder for unfinished run states below the output folder. ComfyUI shows no files from hidden
folders."""
LATENT_FOLDER = "latents"
"""Latent folder below the output folder, as in ComfyUI's SaveLatent."""
LATENT = ".latent"
"""Latent file suffix."""
SAVING_NODE = "wanstream_node"
"""Metadata key for the saving node's id. The `prompt` next to it may contain several saving
nodes."""


@dataclass(frozen=True, kw_only=True)
class UserFolders:
    """Folders for user files. They may not exist yet."""

    output: Path
    input: Path
    states: Path | None = None
    """Folder for unfinished run states. By default it is below `output`."""
    finished: Path | None = None
    """Folder for files with " [output]" in their names, and for latents and calibrations missing in
    `output`.

    By default it is `output`.
    """

    @property
    def saved(self) -> Sequence[Path]:
        """Folders searched for saved files. The first match counts."""
        return tuple(filter(None, (self.output, self.finished)))

    @property
    def run_states(self) -> Path:
        """Folder for unfinished run states. Equal runs must get the same one."""
        return self.states or self.output / STATE_FOLDER


class Files(Protocol):
    """Host files. All methods run on the executing node's thread."""

    def model_names(self, *kinds: str) -> list[str]:
        """Return the sorted model names in these kinds of folders.

        A "diffusers" entry is a folder.
        """

    def model_folders(self, kind: str) -> list[Path]:
        """Return the model folder paths for this kind. They may not exist."""

    def folders(self) -> UserFolders:
        """Return the user's folders."""

    def temp_folder(self) -> Path:
        """Return an existing folder for temporary files."""

    def model_path(self, name: str, *kinds: str) -> Path:
        """Return the path to `name` in the first of these folder kinds that contains it.

        Raises OutsideFolderError or ModelNotFoundError.
        """
        return find_model(name, {kind: self.model_folders(kind) for kind in kinds})

    def output_file(
        self, prefix: str, extension: str, *, width: int = 0, height: int = 0
    ) -> OutputFile:
        """Return the next free `<prefix>_<counter>_.<extension>`. The folder exists on return.

        `%width%`, `%height%` and `%year%` ... `%second%` in `prefix` are filled in. Raises
        OutsideFolderError.
        """
        return output_file(self.folders().output, prefix, extension, width=width, height=height)

    def check_output(self, prefix: str) -> None:
        """Refuse a prefix that `output_file` could not use. Creates no folder.

        Raises OutsideFolderError or OutputNameError.
        """
        check_output(self.folders().output, prefix)

    def latent_names(self) -> list[str]:
        """Return the names of saved latents, in the form `latent_path` accepts."""
        folders = self.folders()
        saved: set[str] = set()
        for each in folders.saved:
            latents = (each / LATENT_FOLDER).glob(f"*{LATENT}")
            saved.update(f"{LATENT_FOLDER}/{path.name}" for path in latents)
        uploaded = (f"{path.name} [input]" for path in folders.input.glob(f"*{LATENT}"))
        return [*sorted(saved), *sorted(uploaded)]

    def latent_path(self, name: str) -> Path:
        """Return a latent path: relative to the output, or with " [input]" to the input folder.

        The file may not exist. Raises OutsideFolderError.
        """
        bare, kind = annotated_name(name, "output")
        if kind == "temp":
            raise OutsideFolderError(
                f"'{name}': latents are read from the output and the input folder: move it to one"
            )
        if kind == "input":
            return inside(self.folders().input, bare)
        return self.saved_path(bare)

    def saved_path(self, name: str) -> Path:
        """Return the path of a saved file in the first folder that has it, or in the last folder.

        Raises OutsideFolderError.
        """
        paths = [inside(folder, name) for folder in self.folders().saved]
        return next((path for path in paths if path.exists()), paths[-1])


def listed_model(files: Files, name: str, choices: Sequence[object]) -> str:
    """Return the choice that is the same model by another path, such as a link, else `name`."""
    for folder in chain.from_iterable(map(files.model_folders, MODEL_KINDS)):
        try:
            path = inside(folder, name)
            if path.exists():
                paths = ((each, folder / each) for each in choices if isinstance(each, str))
                same = (each for each, other in paths if other.exists() and other.samefile(path))
                return next(same, name)
        except (OSError, ValueError):  # not a file name
            continue
    return name
