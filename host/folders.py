"""Workflow names as paths on disk: rules for both hosts.

Paths are checked by their text, as in ComfyUI. Links inside a model or output folder were created
by the user and are followed. Names that lead out of their folder are refused.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..schema.text import windows_fault, windows_name
from .input_values import shortened

logger = logging.getLogger("wanstream.host")

WEIGHT_FILES = (".safetensors", ".sft")
"""Suffixes for readable model files."""

GGUF_FILES = (".gguf",)
GGUF_FOLDERS = ("diffusion_models", "text_encoders")
"""Model folder kinds with GGUF files."""

MODEL_KINDS = (
    "diffusion_models",
    "checkpoints",
    "diffusers",
    "vae",
    "vae_approx",
    "text_encoders",
    "clip_vision",
    "loras",
)
"""Model folder kinds listed by our nodes."""

_MODEL_MARKS = ("model_index.json", "config.json")

_LONGEST_ENDING = "_00001_traces.json.part"
"""Longest suffix that our nodes append to a prefix."""

_MOST_FOLDERS = 100
"""Limit for nested folders in a prefix: Python creates them by recursion."""

_NAME_LIMIT, _PATH_LIMIT = 255, 4096
"""Limits in bytes for systems that do not report their own."""

_WIDEST = 99999
"""Placeholder for an unknown width or height. No real one has more digits."""

_SHOWN = 40
"""Limit for name characters in an error message."""


_TIMES = {"year": "%Y", "month": "%m", "day": "%d", "hour": "%H", "minute": "%M", "second": "%S"}
"""Prefix variables for the local time, as `strftime` formats."""

_DATE = re.compile(r"%date:([^%]+)%")
_DATE_PARTS = {"d": "%d", "M": "%m", "h": "%H", "m": "%M", "s": "%S"}
"""Letters in a date format of ComfyUI's frontend, as `strftime` formats."""


class OutsideFolderError(ValueError):
    """A workflow name leads out of the folder."""


class OutputNameError(ValueError):
    """A workflow name is not usable for output files.

    The message has the reason and a remedy.
    """


class ModelNotFoundError(FileNotFoundError):
    """No model folder contains the model named in a workflow."""


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """An unused output file: absolute `path`, `subfolder` and `filename` for a UI result."""

    path: Path
    filename: str
    subfolder: str


def inside(folder: Path, name: str) -> Path:
    """Return `folder / name` with `..` resolved.

    Raises OutsideFolderError unless it is below `folder`.
    """
    # Not `Path.resolve`: links in the folder are the user's own and may lead out of it.
    top = os.path.abspath(folder)
    path = os.path.abspath(os.path.join(top, name))
    # With a separator at the end, so that "output2" is not below "output".
    if os.path.isabs(name) or not path.startswith(os.path.join(top, "")):
        raise OutsideFolderError(f"'{name}' leaves the folder {top}: give a name below it")
    return Path(path)


def weight_files(folder: Path, endings: tuple[str, ...] = WEIGHT_FILES) -> Iterator[str]:
    """Yield file names with these suffixes at any depth, relative to `folder`.

    Hidden folders are skipped.
    """
    for place in _visible_folders(folder):
        for name in place.files:
            if name.lower().endswith(endings):
                yield os.path.join(place.name, name)


class CachedFileNames:
    """`weight_files` results, cached until a scanned folder's modification time changes.

    Node schemas list these names and are rebuilt often. A `stat` per folder is cheap, a scan is
    not.
    """

    def __init__(self, endings: tuple[str, ...]) -> None:
        self._endings = endings
        self._cache: dict[Path, tuple[dict[str, int | None], tuple[str, ...]]] = {}

    def below(self, folder: Path) -> tuple[str, ...]:
        """Return the names below `folder`, or () if it does not exist."""
        if folder in self._cache:
            modified, names = self._cache[folder]
            if all(_modified_ns(parent) == before for parent, before in modified.items()):
                return names
        # Read the times before listing the files, so that the next call finds a file added in
        # between.
        modified = {str(folder): _modified_ns(str(folder))}
        modified |= {place.path: _modified_ns(place.path) for place in _visible_folders(folder)}
        self._cache[folder] = (modified, tuple(weight_files(folder, self._endings)))
        return self._cache[folder][1]


def _modified_ns(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A scanned folder: path, name relative to the top ("" for the top), and files."""

    path: str
    name: str
    files: Sequence[str]


def _visible_folders(
    folder: Path, is_leaf: Callable[[Sequence[str]], bool] = lambda files: False
) -> Iterator[_Place]:
    """Yield `folder` and all visible subfolders at any depth, except those below a leaf.

    Links are followed. Every real folder is yielded once, under the shortest name. Links to each
    other, to a parent folder, or to the same tree therefore neither repeat a file nor take longer.
    """
    seen: set[tuple[int, int] | str] = set()
    level = [""]
    while level:
        below: list[str] = []
        # By level, so that a folder's first name is the shortest. Real folders come before links
        # to them.
        for name in sorted(
            level, key=lambda each: (os.path.islink(os.path.join(folder, each)), len(each), each)
        ):
            path = os.path.join(folder, name) if name else str(folder)
            try:
                identity = _identity(path)
                if identity in seen:
                    continue
                # Without a `stat` per file, because it is slow on a network drive.
                with os.scandir(path) as scan:
                    entries = {entry.name: _is_folder(entry) for entry in scan}
            except OSError:  # a missing or unreadable folder
                continue
            seen.add(identity)
            subfolders = sorted(name for name, is_folder in entries.items() if is_folder)
            place = _Place(path=path, name=name, files=sorted(entries.keys() - subfolders))
            yield place
            if name == "" or not is_leaf(place.files):
                below += [
                    os.path.join(name, each) for each in subfolders if not each.startswith(".")
                ]
        level = below


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: str) -> tuple[int, int] | str:
    """Return equal values for all paths to one folder."""
    found = os.stat(path)
    if not found.st_ino:  # some network drives have no numbers
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def diffusers_folders(folder: Path) -> Iterator[str]:
    """Yield the names of diffusers models and pipelines, relative to `folder`.

    Pipeline parts are not listed.
    """

    def is_model(files: Sequence[str]) -> bool:
        return any(mark in files for mark in _MODEL_MARKS)

    return (
        place.name
        for place in _visible_folders(folder, is_model)
        if place.name and is_model(place.files)
    )


def find_model(name: str, folders_by_kind: Mapping[str, Sequence[Path]]) -> Path:
    """Return the path to the model `name` in the first folder that contains it.

    A "diffusers" model is a folder, any other a file. Raises OutsideFolderError or
    ModelNotFoundError.
    """
    for kind, folders in folders_by_kind.items():
        for folder in folders:
            path = inside(folder, name)
            exists = {"diffusers": path.is_dir}.get(kind, path.is_file)
            if exists():
                return path
    # ComfyUI's wording, so that users find it in a search.
    raise ModelNotFoundError(
        f"Model in folder '{', '.join(folders_by_kind)}' with filename '{name}' not found."
    )


_ANNOTATED = re.compile(r"(.*?) ?\[(input|output|temp)\]", re.DOTALL)
"""A name with a folder mark, as ComfyUI writes it."""


def annotated_name(name: str, default: str) -> tuple[str, str]:
    """Return a name without folder mark, and the folder: "input", "output", "temp" or `default`."""
    found = _ANNOTATED.fullmatch(name)
    if found is None:
        return name, default
    return found[1], found[2]


def check_output(output: Path, prefix: str) -> None:
    """Refuse a prefix that `output_file` could not use. Creates no folder.

    Free disk space is not checked: it will have changed when the file is written.

    Raises OutsideFolderError or OutputNameError.
    """
    stem = inside(output, _fill_in(usable_prefix(prefix), width=_WIDEST, height=_WIDEST))
    # `lexists`, because a broken link is in the way as well.
    folder = next((place for place in stem.parents if os.path.lexists(place)), None)
    if folder is None:
        raise OutputNameError(
            f"'{prefix}': the drive of {stem} does not exist: connect it, or choose another folder"
        )
    if not os.path.isdir(folder):
        raise OutputNameError(
            f"'{prefix}': {folder} is not a folder, but one is needed there: choose another name, "
            "or move it"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise OutputNameError(
            f"'{prefix}': {folder} is not writable: choose another folder, or change its "
            "permissions"
        )
    nested = len(stem.relative_to(os.path.abspath(output)).parts) - 1
    if nested > _MOST_FOLDERS:
        raise OutputNameError(
            f"'{_shortened(prefix)}' has {nested} folders, and the limit is {_MOST_FOLDERS}: use "
            "fewer"
        )
    _check_lengths(prefix, stem, folder)


def usable_prefix(prefix: str) -> str:
    """Return a prefix with slashes between names, and with `%date:yyyy-MM-dd%` filled in.

    The slashes are the same on every system.

    Raises OutputNameError for a name that Windows cannot create, or with a lone surrogate.
    """
    if "\0" in prefix:
        raise OutputNameError(
            f"{prefix!r} contains a NUL character, which no file name can: remove it"
        )
    try:
        prefix.encode()
    except UnicodeEncodeError as err:
        raise OutputNameError(
            f"{prefix!r} contains a lone surrogate at index {err.start}: remove it"
        ) from err
    prefix = _DATE.sub(_date, prefix).replace("\\", "/")
    *folders, stem = prefix.rstrip("/").split("/")
    # A counter follows the last name: "aux" and "clip." become "aux_00001_.mp4" and
    # "clip._00001_.mp4".
    for name, written in (*((each, each) for each in folders), (stem, f"{stem}_")):
        if name not in {".", ".."} and (fault := windows_fault(written)):
            raise OutputNameError(f"'{_shortened(prefix)}': {_shortened(name)!r} {fault}")
    return prefix


def repaired_prefix(prefix: str) -> str:
    """Return a prefix as `usable_prefix` does, with `_` instead of everything it refuses."""
    filled = _DATE.sub(_date, prefix).encode(errors="replace").decode().replace("\\", "/")
    *folders, stem = filled.rstrip("/").split("/")
    names = [each if each in {".", ".."} else windows_name(each) for each in folders]
    return "/".join([*names, stem if stem in {".", ".."} else windows_name(f"{stem}_")[:-1]])


def prefix_in_run(prefix: str) -> str:
    """Return `repaired_prefix`, and log the replacements.

    A linked prefix is known only in the run. A refusal there would waste the hours before it.
    """
    try:
        return usable_prefix(prefix)
    except OutputNameError as err:
        repaired = repaired_prefix(prefix)
        logger.warning("the files are called '%s': %s", _shortened(repaired), err)
        return repaired


def _date(found: re.Match[str]) -> str:
    """Return the local time in a date format from ComfyUI's frontend.

    The frontend fills it in only for ComfyUI's own nodes.
    """
    now = time.localtime()

    def value(part: re.Match[str]) -> str:
        letters = part[0]
        if letters[0] == "y":
            return {2: f"{now.tm_year}"[2:], 4: f"{now.tm_year}"}.get(len(letters), letters)
        return f"{int(time.strftime(_DATE_PARTS[letters[0]], now)):0{len(letters)}}"

    return re.sub("dd?|MM?|hh?|mm?|ss?|yyy?y?", value, found[1])


def _check_lengths(prefix: str, stem: Path, folder: Path) -> None:
    """Refuse names too long for the file system with `folder`, which exists."""
    most = _limit(folder, "PC_NAME_MAX", _NAME_LIMIT)
    longest = _limit(folder, "PC_PATH_MAX", _PATH_LIMIT)
    ending = len(_LONGEST_ENDING)
    for place in (stem, *stem.parents):
        if place == folder:
            break
        limit = most
        if place == stem:
            limit -= ending
        if _length(place.name) > limit:
            raise OutputNameError(
                f"'{_shortened(prefix)}': {_shortened(place.name)!r} has {_length(place.name)} "
                f"bytes, and the limit is {limit}: shorten it"
            )
    # PATH_MAX counts the NUL at the end, so the path must be shorter.
    whole = _length(str(stem)) + ending
    if whole >= longest:
        raise OutputNameError(
            f"'{_shortened(prefix)}': the path has {whole} bytes, and the limit is {longest - 1}: "
            "shorten it"
        )


def _limit(folder: Path, name: str, usual: int) -> int:
    """Return a file system limit for `folder`."""
    try:
        limit = os.pathconf(folder, name)
    # Windows lacks the call, some file systems the value.
    except (AttributeError, OSError, ValueError):
        return usual
    # -1 stands for a file system without a limit.
    return limit if limit > 0 else usual


def _length(name: str) -> int:
    """Return a file name's length in the system's units: UTF-16 units on Windows, else bytes."""
    if os.name == "nt":
        return len(name.encode("utf-16-le")) // 2
    return len(os.fsencode(name))


def _shortened(text: str) -> str:
    return shortened(text, _SHOWN)


def output_file(
    output: Path, prefix: str, extension: str, *, width: int, height: int
) -> OutputFile:
    """Return the next free file for `prefix`, named as in ComfyUI. Creates the folder if necessary.

    Raises OutsideFolderError, or OSError if the folder cannot be created.
    """
    stem = inside(output, _fill_in(prefix_in_run(prefix), width=width, height=height))
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(f"{stem.name}_{_next_counter(stem):05}_.{extension.lstrip('.')}")
    folders = stem.parent.relative_to(os.path.abspath(output)).parts
    return OutputFile(path=path, filename=path.name, subfolder=os.sep.join(folders))


def _next_counter(stem: Path) -> int:
    """Return the largest number in file names `<stem>_<number>_...` plus 1, or 1 without files."""
    # As in ComfyUI: on Windows, names that differ only in case share a counter.
    start = os.path.normcase(f"{stem.name}_")
    numbers = [
        name[len(start) :].split("_")[0]
        for name in os.listdir(stem.parent)
        if os.path.normcase(name).startswith(start)
    ]
    return max((int(number) for number in numbers if number.isdecimal()), default=0) + 1


def _fill_in(prefix: str, *, width: int, height: int) -> str:
    now = time.localtime()
    values = {"width": f"{width}", "height": f"{height}"}
    values |= {name: time.strftime(form, now) for name, form in _TIMES.items()}
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", value)
    return prefix
