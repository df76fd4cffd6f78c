"""Files in a run without ComfyUI, in folders given by the caller."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schema import StateError
from ..files import Files, UserFolders
from ..folders import (
    GGUF_FILES,
    GGUF_FOLDERS,
    WEIGHT_FILES,
    annotated_name,
    diffusers_folders,
    inside,
    repaired_prefix,
    weight_files,
)
from .workflow.near_names import near_files


@dataclass(frozen=True, kw_only=True)
class Folders(UserFolders):
    """Folders for a run. `models` has ComfyUI's layout (`diffusion_models/`, `vae/`, ...)."""

    models: Path


class EmbeddedFiles(Files):
    """Files in one run at a time. Outside a run, there are no folders, and all lists are empty."""

    def __init__(self) -> None:
        self.of_run: Folders | None = None
        """Folders of the run, or None outside a run."""
        self._temp: Path | None = None

    def folders(self) -> Folders:
        if self.of_run is None:
            raise StateError(
                "no workflow is running: the embedded host has folders only during a run"
            )
        return self.of_run

    def temp_folder(self) -> Path:
        # Never removed: it contains latents that could not be saved anywhere else.
        if self._temp is None:
            self._temp = Path(tempfile.mkdtemp(prefix="wanstream-"))
        return self._temp

    def model_names(self, *kinds: str) -> list[str]:
        if self.of_run is None:
            return []
        found: set[str] = set()
        for kind in kinds:
            folder = self.of_run.models / kind
            if kind == "diffusers":
                found.update(diffusers_folders(folder))
            elif kind in GGUF_FOLDERS:
                found.update(weight_files(folder, WEIGHT_FILES + GGUF_FILES))
            else:
                found.update(weight_files(folder))
        return sorted(found)

    def model_folders(self, kind: str) -> list[Path]:
        return [self.folders().models / kind]

    def check_output(self, prefix: str) -> None:
        # In a batch, files are named after their row, whatever the prefix.
        if self.folders().finished is not None:
            prefix = repaired_prefix(prefix)
        super().check_output(prefix)

    def latent_names(self) -> list[str]:
        if self.of_run is None:
            return []
        return super().latent_names()

    def input_names(self, endings: Sequence[str]) -> list[str]:
        """Return the sorted names with these endings directly in the input folder."""
        if self.of_run is None or not self.of_run.input.is_dir():
            return []
        names = (path.name for path in self.of_run.input.iterdir() if path.is_file())
        return sorted(name for name in names if name.lower().endswith(tuple(endings)))

    def input_path(self, name: str) -> Path:
        """Return the path of an input file, or one from the " [output]" or " [temp]" folder.

        Raises OutsideFolderError.
        """
        bare, kind = annotated_name(name, "input")
        folders = self.folders()
        if kind == "input":
            folder = folders.input
        elif kind == "output":
            folder = folders.saved[-1]
        else:
            folder = self.temp_folder()
        path = inside(folder, bare)
        if path.exists():
            return path
        return inside(folder, bare.replace("\\", "/"))  # a name written on Windows

    def missing_file(self, name: str, endings: Sequence[str]) -> str:
        """Return a message for a file `input_path` cannot find.

        The suggested name has one of these endings.
        """
        bare, kind = annotated_name(name, "input")
        if kind == "temp":
            return (
                f"{bare} is not in the temp folder, which is empty without ComfyUI: put it into "
                "the input folder"
            )
        folders = self.folders()
        if kind == "output":
            return f"{bare} is not in the output folder: put it there\nfolder: {folders.saved[-1]}"
        near = near_files(bare, self.input_names(endings))
        hint = f"did you mean {' or '.join(near)}? Else put it there" if near else "put it there"
        return (
            f"{bare} is not in the input folder: {hint} (or see --input)\nfolder: {folders.input}"
        )
