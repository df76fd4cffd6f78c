"""Files in ComfyUI's folders."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ...files import Files, UserFolders
from ...folders import (
    GGUF_FILES,
    GGUF_FOLDERS,
    WEIGHT_FILES,
    CachedFileNames,
    OutputFile,
    diffusers_folders,
    inside,
    prefix_in_run,
)
from .. import versions
from .user_settings import setting_is_on


class ComfyFiles(Files):
    """Files in the folders from `folder_paths`."""

    def __init__(self) -> None:
        self._gguf = CachedFileNames(GGUF_FILES)

    def model_names(self, *kinds: str) -> list[str]:
        found: set[str] = set()
        for kind in kinds:
            if kind == "diffusers":
                # ComfyUI lists only files, but its diffusers loader walks these folders too.
                for folder in self.model_folders(kind):
                    found.update(diffusers_folders(folder))
            else:
                # ComfyUI also lists pickles, such as .ckpt and .pth, and this pack reads none.
                names = folder_paths.get_filename_list(kind)
                found.update(name for name in names if name.lower().endswith(WEIGHT_FILES))
            if kind in GGUF_FOLDERS:
                # Not by registering `.gguf` with ComfyUI, which would change the lists in other
                # nodes.
                for folder in self.model_folders(kind):
                    found.update(self._gguf.below(folder))
        return sorted(found)

    def model_folders(self, kind: str) -> list[Path]:
        return [Path(folder) for folder in folder_paths.get_folder_paths(kind)]

    def folders(self) -> UserFolders:
        return UserFolders(
            output=Path(folder_paths.get_output_directory()),
            input=Path(folder_paths.get_input_directory()),
        )

    def temp_folder(self) -> Path:
        folder = Path(folder_paths.get_temp_directory())
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def output_file(
        self, prefix: str, extension: str, *, width: int = 0, height: int = 0
    ) -> OutputFile:
        output = folder_paths.get_output_directory()
        # Repaired and normalised: ComfyUI refuses with a bare Exception, and misnumbers the files
        # under "video/".
        prefix = prefix_in_run(prefix)
        inside(Path(output), prefix)
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            os.path.normpath(prefix), output, width, height
        )
        filename = f"{name}_{counter:05}_.{extension.lstrip('.')}"
        return OutputFile(path=Path(folder) / filename, filename=filename, subfolder=subfolder)


def user_setting(name: str) -> bool:
    """Return True if our setting `name` is on."""
    # The default user's setting applies to all users: a node cannot see who queued it.
    return setting_is_on(versions.settings_file(), name)
