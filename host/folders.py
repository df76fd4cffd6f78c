"""Names in a workflow and paths on disk: the rules that both hosts share.

A path is judged by its text, as ComfyUI does: a link inside a model or output folder was put there by the user and is
followed, a name that climbs out of its folder is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .door import ModelNotFoundError, OutputFile, OutsideFolderError

WEIGHT_FILES = (".safetensors", ".sft")
"""What a model file that we can read ends in."""

GGUF_FILES = (".gguf",)
GGUF_FOLDERS = ("diffusion_models",)
"""The kinds of folders in which such files count as well: only experts can be read from them."""

_MODEL_MARKS = ("model_index.json", "config.json")


def inside(folder: Path, name: str) -> Path:
    """`folder / name` with `..` resolved. Raises OutsideFolderError unless that lies below `folder`."""
    top = os.path.abspath(folder)
    path = os.path.abspath(os.path.join(top, name))
    if os.path.isabs(name) or not path.startswith(os.path.join(top, "")):
        raise OutsideFolderError(f"'{name}' leaves the folder {top}: give a name below it")
    return Path(path)


def weight_files(folder: Path, endings: tuple[str, ...] = WEIGHT_FILES) -> Iterator[str]:
    """Names, relative to `folder`, of the files with such endings at any depth; hidden folders are left out."""
    for parent, files in _visible_folders(folder):
        for name in files:
            if name.lower().endswith(endings):
                yield os.path.relpath(os.path.join(parent, name), folder)


class KeptNames:
    """What `weight_files` finds, kept until one of the folders that were looked through has changed.

    Nodes are asked for their inputs all the time; asking a few folders when they were changed costs next to nothing.
    """

    def __init__(self, endings: tuple[str, ...]) -> None:
        self._endings = endings
        self._kept: dict[Path, tuple[dict[str, int | None], tuple[str, ...]]] = {}

    def below(self, folder: Path) -> tuple[str, ...]:
        """The names below `folder`; none where there is no such folder."""
        if folder in self._kept:
            changed, names = self._kept[folder]
            if all(_changed_at(parent) == before for parent, before in changed.items()):
                return names
        # Asked before the files are looked for: what appears in between is found by the next call.
        changed = {str(folder): _changed_at(str(folder))}
        changed |= {parent: _changed_at(parent) for parent, _ in _visible_folders(folder)}
        self._kept[folder] = (changed, tuple(weight_files(folder, self._endings)))
        return self._kept[folder][1]


def _changed_at(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def _visible_folders(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Every folder from `folder` down that is not hidden, and the files in it."""
    for parent, subfolders, files in os.walk(folder, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield parent, files


def diffusers_folders(folder: Path) -> Iterator[str]:
    """Names, relative to `folder`, of the diffusers models and pipelines; the parts of a pipeline are not listed."""
    for parent, subfolders, files in os.walk(folder, followlinks=True):
        if Path(parent) != folder and any(mark in files for mark in _MODEL_MARKS):
            subfolders.clear()
            yield os.path.relpath(parent, folder)


def find_model(name: str, places: Mapping[str, Sequence[Path]]) -> Path:
    """The path of `name` in the first of `places` (kind of folder -> where it lies) that holds it.

    An entry of the kind "diffusers" is a folder, any other a file. Raises OutsideFolderError or ModelNotFoundError.
    """
    for kind, folders in places.items():
        for folder in folders:
            path = inside(folder, name)
            if path.is_dir() if kind == "diffusers" else path.is_file():
                return path
    raise ModelNotFoundError(f"Model in folder '{', '.join(places)}' with filename '{name}' not found.")


def output_file(output: Path, prefix: str, extension: str, *, width: int, height: int) -> OutputFile:
    """The next free file of `prefix`, named as ComfyUI names it, in a folder that is made if need be.

    Raises OutsideFolderError, or OSError when the folder cannot be made.
    """
    stem = inside(output, _fill_in(prefix, width=width, height=height))
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(f"{stem.name}_{_next_counter(stem):05}_.{extension.lstrip('.')}")
    subfolder = stem.parent.relative_to(os.path.abspath(output))
    return OutputFile(path=path, filename=path.name, subfolder="" if subfolder == Path() else str(subfolder))


def _next_counter(stem: Path) -> int:
    """One more than the largest number among the files `<stem>_<number>_...`; 1 if there are none."""
    start = os.path.normcase(f"{stem.name}_")
    numbers = [
        name[len(start) :].split("_")[0] for name in os.listdir(stem.parent) if os.path.normcase(name).startswith(start)
    ]
    return max((int(number) for number in numbers if number.isdecimal()), default=0) + 1


def _fill_in(prefix: str, *, width: int, height: int) -> str:
    now = time.localtime()
    values = {
        "%width%": f"{width}",
        "%height%": f"{height}",
        "%year%": f"{now.tm_year}",
        "%month%": f"{now.tm_mon:02}",
        "%day%": f"{now.tm_mday:02}",
        "%hour%": f"{now.tm_hour:02}",
        "%minute%": f"{now.tm_min:02}",
        "%second%": f"{now.tm_sec:02}",
    }
    for variable, value in values.items():
        prefix = prefix.replace(variable, value)
    return prefix
