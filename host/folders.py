"""Names in a workflow and paths on disk: the rules that both hosts share.

A path is judged by its text, as ComfyUI does: a link inside a model or output folder was put there by the user and is
followed, a name that climbs out of its folder is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WEIGHT_FILES = (".safetensors", ".sft")
"""What a model file that we can read ends in."""

GGUF_FILES = (".gguf",)
GGUF_FOLDERS = ("diffusion_models",)
"""The kinds of folders in which such files count as well: only experts can be read from them."""

_MODEL_MARKS = ("model_index.json", "config.json")

_LONGEST_ENDING = "_00001_traces.json.part"
"""The longest ending that a prefix gets on its way to a file; those of our nodes are shorter."""

_NAME_LIMIT, _PATH_LIMIT = 255, 4096
"""The limits of systems that do not report their own."""

_WIDEST = 99999
"""Stands for a width and a height that are not known yet."""

_SHOWN = 40
"""Characters of a long name in a message."""


class OutsideFolderError(ValueError):
    """A name from a workflow leaves the folder that it belongs to."""


class OutputNameError(ValueError):
    """No file can be written under a name from a workflow; the message says why, and what to change."""


class ModelNotFoundError(FileNotFoundError):
    """No model folder holds the name that a workflow asks for."""


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A free name in the output folder: `path` is absolute, `subfolder` and `filename` are what a UI result carries."""

    path: Path
    filename: str
    subfolder: str


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


def check_output(output: Path, prefix: str) -> None:
    """Refuse a prefix under which `output_file` could not make a file; makes no folder.

    Free room on the disk is not looked at: it is another one when the file is written.

    Raises OutsideFolderError or OutputNameError.
    """
    _check_characters(prefix)
    stem = inside(output, _fill_in(prefix, width=_WIDEST, height=_WIDEST))
    folder = next((place for place in stem.parents if os.path.lexists(place)), None)
    if folder is None:
        raise OutputNameError(f"'{prefix}': the drive of {stem} is not there: connect it, or choose another folder")
    if not os.path.isdir(folder):
        raise OutputNameError(
            f"'{prefix}': {folder} is not a folder, and the file needs one of that name: choose another name, or move "
            "what is there"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise OutputNameError(
            f"'{prefix}': nothing can be written in {folder}: choose another folder, or allow writing there"
        )
    _check_lengths(prefix, stem, folder)


def _check_characters(prefix: str) -> None:
    if "\0" in prefix:
        raise OutputNameError(f"{prefix!r} holds a NUL character, which no file name can: remove it")
    try:
        prefix.encode()
    except UnicodeEncodeError as err:
        raise OutputNameError(f"{prefix!r} holds half a character, at place {err.start}: remove it") from err


def _check_lengths(prefix: str, stem: Path, folder: Path) -> None:
    """Refuse names that the file system of `folder`, which exists, cannot hold."""
    most, longest = _limit(folder, "PC_NAME_MAX", _NAME_LIMIT), _limit(folder, "PC_PATH_MAX", _PATH_LIMIT)
    ending = len(_LONGEST_ENDING)
    for place in (stem, *stem.parents):
        if place == folder:
            break
        room = most - (ending if place == stem else 0)
        if _length(place.name) > room:
            raise OutputNameError(
                f"'{_shortened(prefix)}': {_shortened(place.name)!r} takes {_length(place.name)} bytes, and {room} are "
                "possible there: shorten it"
            )
    whole = _length(str(stem)) + ending
    if whole >= longest:
        raise OutputNameError(
            f"'{_shortened(prefix)}': the path takes {whole} bytes, and {longest - 1} are possible: shorten it"
        )


def _limit(folder: Path, name: str, usual: int) -> int:
    """A limit of the file system that holds `folder`."""
    try:
        limit = os.pathconf(folder, name)
    except (AttributeError, OSError, ValueError):  # Windows has no such call, and not every file system an answer
        return usual
    return limit if limit > 0 else usual


def _length(name: str) -> int:
    """Length of a file name as the system counts it."""
    return len(name.encode("utf-16-le")) // 2 if os.name == "nt" else len(os.fsencode(name))


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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
