"""Workflow names as paths on disk: rules for both hosts.

Paths are checked by their text, as in ComfyUI. Links inside a model or output folder were created by the user and are
followed. Names that lead out of their folder are refused.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..schema import windows_fault, windows_name

logger = logging.getLogger("wanstream.host")

WEIGHT_FILES = (".safetensors", ".sft")
"""Suffixes for readable model files."""

GGUF_FILES = (".gguf",)
GGUF_FOLDERS = ("diffusion_models", "text_encoders")
"""Model folder kinds with GGUF files."""

MODEL_KINDS = ("diffusion_models", "diffusers", "vae", "vae_approx", "text_encoders", "clip_vision", "loras")
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
    """A workflow name is not usable for output files. The message contains the reason and a remedy."""


class ModelNotFoundError(FileNotFoundError):
    """No model folder contains the model named in a workflow."""


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """An unused name in the output folder: absolute `path`, and `subfolder` and `filename` for a UI result."""

    path: Path
    filename: str
    subfolder: str


def inside(folder: Path, name: str) -> Path:
    """Return `folder / name` with `..` resolved. Raises OutsideFolderError unless it is below `folder`."""
    top = os.path.abspath(folder)
    path = os.path.abspath(os.path.join(top, name))
    if os.path.isabs(name) or not path.startswith(os.path.join(top, "")):
        raise OutsideFolderError(f"'{name}' leaves the folder {top}: give a name below it")
    return Path(path)


def weight_files(folder: Path, endings: tuple[str, ...] = WEIGHT_FILES) -> Iterator[str]:
    """Yield the names, relative to `folder`, of files with these suffixes at any depth. Skips hidden folders."""
    for place in _visible_folders(folder):
        for name in place.files:
            if name.lower().endswith(endings):
                yield os.path.join(place.name, name)


class CachedFileNames:
    """Results of `weight_files`, cached until the modification time of a scanned folder changes.

    Node schemas list these names and are rebuilt often. A `stat` per folder is cheap, a scan is not.
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
        # The times are read before the files are listed, so that the next call finds a file added in between.
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


def _visible_folders(folder: Path, is_leaf: Callable[[Sequence[str]], bool] = lambda files: False) -> Iterator[_Place]:
    """Yield `folder` and the visible subfolders at any depth, except those below a leaf.

    Links are followed. Every real folder is yielded once, under the shortest name, so that links to each other, to a
    folder above, or to the same tree neither repeat a file nor take longer.
    """
    seen: set[tuple[int, int] | str] = set()
    level = [""]
    while level:
        below: list[str] = []
        # By level, so that a folder's first name is the shortest. Folders themselves come before links to them.
        for name in sorted(level, key=lambda each: (os.path.islink(os.path.join(folder, each)), len(each), each)):
            path = os.path.join(folder, name) if name else str(folder)
            try:
                identity = _identity(path)
                if identity in seen:
                    continue
                with os.scandir(path) as scan:  # without a `stat` of each file, slow on a network drive
                    entries = {entry.name: _is_folder(entry) for entry in scan}
            except OSError:  # a missing or unreadable folder
                continue
            seen.add(identity)
            subfolders = sorted(name for name, is_folder in entries.items() if is_folder)
            place = _Place(path=path, name=name, files=sorted(entries.keys() - subfolders))
            yield place
            if name == "" or not is_leaf(place.files):
                below += [os.path.join(name, each) for each in subfolders if not each.startswith(".")]
        level = below


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: str) -> tuple[int, int] | str:
    """Return an equal value for all paths to one folder."""
    found = os.stat(path)
    # Some network drives have no numbers.
    return (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(path)


def diffusers_folders(folder: Path) -> Iterator[str]:
    """Yield the names, relative to `folder`, of diffusers models and pipelines. Pipeline parts are not listed."""

    def is_model(files: Sequence[str]) -> bool:
        return any(mark in files for mark in _MODEL_MARKS)

    return (place.name for place in _visible_folders(folder, is_model) if place.name and is_model(place.files))


def listed_name(name: str, choices: Sequence[object], folders: Iterable[Path]) -> str:
    """Return the choice for the same file or folder as `name`, reached over another link, else `name`."""
    for folder in folders:
        try:
            path = inside(folder, name)
            if path.exists():
                paths = ((each, folder / each) for each in choices if isinstance(each, str))
                return next((each for each, other in paths if other.exists() and other.samefile(path)), name)
        except (OSError, ValueError):  # not a file name
            continue
    return name


def find_model(name: str, folders_by_kind: Mapping[str, Sequence[Path]]) -> Path:
    """Return the path of the model `name` in the first folder that contains it.

    A "diffusers" model is a folder, any other a file. Raises OutsideFolderError or ModelNotFoundError.
    """
    for kind, folders in folders_by_kind.items():
        for folder in folders:
            path = inside(folder, name)
            if path.is_dir() if kind == "diffusers" else path.is_file():
                return path
    # ComfyUI's wording, so that users find it in a search.
    raise ModelNotFoundError(f"Model in folder '{', '.join(folders_by_kind)}' with filename '{name}' not found.")


STATE_FOLDER = ".wanstream-states"
"""Folder for unfinished run states below the output folder. ComfyUI shows no files in hidden folders."""
LATENT_FOLDER = "latents"
"""Latent folder below the output folder, as in ComfyUI's SaveLatent."""
LATENT = ".latent"
"""Latent file suffix."""
_INPUT = " [input]"
_ANNOTATED = re.compile(r"(.*?) ?\[(input|output|temp)\]", re.DOTALL)
"""A name with a folder mark, as ComfyUI writes it."""


def latent_names(outputs: Sequence[Path], input_folder: Path) -> list[str]:
    """Return the latent names in `LATENT_FOLDER` and in the input folder, as `latent_path` reads them."""
    saved = {f"{LATENT_FOLDER}/{path.name}" for each in outputs for path in (each / LATENT_FOLDER).glob(f"*{LATENT}")}
    uploaded = (f"{path.name}{_INPUT}" for path in input_folder.glob(f"*{LATENT}"))
    return [*sorted(saved), *sorted(uploaded)]


def annotated_name(name: str, default: str) -> tuple[str, str]:
    """Return a name without folder mark, and the folder: "input", "output", "temp", or else `default`."""
    found = _ANNOTATED.fullmatch(name)
    return (found[1], found[2]) if found else (name, default)


def saved_path(outputs: Sequence[Path], name: str) -> Path:
    """Return a file path below the first folder that contains it, or below the last one.

    Raises OutsideFolderError.
    """
    paths = [inside(folder, name) for folder in outputs]
    return next((path for path in paths if path.exists()), paths[-1])


def latent_path(outputs: Sequence[Path], input_folder: Path, name: str) -> Path:
    """Return a latent path: `name` is a saved file, or relative to the input folder with " [input]".

    Raises OutsideFolderError.
    """
    bare, kind = annotated_name(name, "output")
    if kind == "temp":
        raise OutsideFolderError(f"'{name}': latents are read from the output and the input folder: move it to one")
    return inside(input_folder, bare) if kind == "input" else saved_path(outputs, bare)


def check_output(output: Path, prefix: str) -> None:
    """Refuse a prefix that `output_file` could not use. Creates no folder.

    Free disk space is not checked: it will have changed when the file is written.

    Raises OutsideFolderError or OutputNameError.
    """
    stem = inside(output, _fill_in(usable_prefix(prefix), width=_WIDEST, height=_WIDEST))
    folder = next((place for place in stem.parents if os.path.lexists(place)), None)
    if folder is None:
        raise OutputNameError(f"'{prefix}': the drive of {stem} does not exist: connect it, or choose another folder")
    if not os.path.isdir(folder):
        raise OutputNameError(
            f"'{prefix}': {folder} is not a folder, but one is needed there: choose another name, or move it"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise OutputNameError(f"'{prefix}': {folder} is not writable: choose another folder, or change its permissions")
    nested = len(stem.relative_to(os.path.abspath(output)).parts) - 1
    if nested > _MOST_FOLDERS:
        raise OutputNameError(
            f"'{_shortened(prefix)}' has {nested} folders, and the limit is {_MOST_FOLDERS}: use fewer"
        )
    _check_lengths(prefix, stem, folder)


def usable_prefix(prefix: str) -> str:
    """Return a prefix with slashes between names, as on every system, and with the date in `%date:yyyy-MM-dd%`.

    Raises OutputNameError for a name that Windows cannot create, or that contains a lone surrogate.
    """
    if "\0" in prefix:
        raise OutputNameError(f"{prefix!r} contains a NUL character, which no file name can: remove it")
    try:
        prefix.encode()
    except UnicodeEncodeError as err:
        raise OutputNameError(f"{prefix!r} contains a lone surrogate at index {err.start}: remove it") from err
    prefix = _DATE.sub(_date, prefix).replace("\\", "/")
    *folders, stem = prefix.rstrip("/").split("/")
    # A counter follows the last name: "aux" and "clip." become "aux_00001_.mp4" and "clip._00001_.mp4".
    for name, written in (*((each, each) for each in folders), (stem, f"{stem}_")):
        if name not in {".", ".."} and (fault := windows_fault(written)):
            raise OutputNameError(f"'{_shortened(prefix)}': {_shortened(name)!r} {fault}")
    return prefix


def repaired_prefix(prefix: str) -> str:
    """Return a prefix as `usable_prefix` does, with `_` in place of what it refuses."""
    filled = _DATE.sub(_date, prefix).encode(errors="replace").decode().replace("\\", "/")
    *folders, stem = filled.rstrip("/").split("/")
    names = [each if each in {".", ".."} else windows_name(each) for each in folders]
    return "/".join([*names, stem if stem in {".", ".."} else windows_name(f"{stem}_")[:-1]])


def prefix_in_run(prefix: str) -> str:
    """Return `repaired_prefix`, and log what was replaced.

    A linked prefix is known in the run only. A refusal would cost the hours before it.
    """
    try:
        return usable_prefix(prefix)
    except OutputNameError as err:
        repaired = repaired_prefix(prefix)
        logger.warning("the files are called '%s': %s", _shortened(repaired), err)
        return repaired


def _date(found: re.Match[str]) -> str:
    """Return the local time in a format of ComfyUI's frontend, which fills it in for ComfyUI's own nodes only."""
    now = time.localtime()

    def value(part: re.Match[str]) -> str:
        letters = part[0]
        if letters[0] == "y":
            return {2: f"{now.tm_year}"[2:], 4: f"{now.tm_year}"}.get(len(letters), letters)
        return f"{int(time.strftime(_DATE_PARTS[letters[0]], now)):0{len(letters)}}"

    return re.sub("dd?|MM?|hh?|mm?|ss?|yyy?y?", value, found[1])


def _check_lengths(prefix: str, stem: Path, folder: Path) -> None:
    """Refuse names too long for the file system of `folder`, which exists."""
    most, longest = _limit(folder, "PC_NAME_MAX", _NAME_LIMIT), _limit(folder, "PC_PATH_MAX", _PATH_LIMIT)
    ending = len(_LONGEST_ENDING)
    for place in (stem, *stem.parents):
        if place == folder:
            break
        limit = most - (ending if place == stem else 0)
        if _length(place.name) > limit:
            raise OutputNameError(
                f"'{_shortened(prefix)}': {_shortened(place.name)!r} has {_length(place.name)} bytes, and the limit "
                f"is {limit}: shorten it"
            )
    whole = _length(str(stem)) + ending
    if whole >= longest:
        raise OutputNameError(
            f"'{_shortened(prefix)}': the path has {whole} bytes, and the limit is {longest - 1}: shorten it"
        )


def _limit(folder: Path, name: str, usual: int) -> int:
    """Return a limit of the file system of `folder`."""
    try:
        limit = os.pathconf(folder, name)
    except (AttributeError, OSError, ValueError):  # Windows lacks the call, some file systems the value
        return usual
    return limit if limit > 0 else usual


def _length(name: str) -> int:
    """Return a file name's length in the system's units: UTF-16 units on Windows, else bytes."""
    return len(name.encode("utf-16-le")) // 2 if os.name == "nt" else len(os.fsencode(name))


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def output_file(output: Path, prefix: str, extension: str, *, width: int, height: int) -> OutputFile:
    """Return the next free file for `prefix`, named as in ComfyUI. Creates the folder if necessary.

    Raises OutsideFolderError, or OSError if the folder cannot be created.
    """
    stem = inside(output, _fill_in(prefix_in_run(prefix), width=width, height=height))
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_name(f"{stem.name}_{_next_counter(stem):05}_.{extension.lstrip('.')}")
    subfolder = stem.parent.relative_to(os.path.abspath(output))
    return OutputFile(path=path, filename=path.name, subfolder="" if subfolder == Path() else str(subfolder))


def _next_counter(stem: Path) -> int:
    """Return the largest number in file names `<stem>_<number>_...` plus 1. 1 without such files."""
    start = os.path.normcase(f"{stem.name}_")
    numbers = [
        name[len(start) :].split("_")[0] for name in os.listdir(stem.parent) if os.path.normcase(name).startswith(start)
    ]
    return max((int(number) for number in numbers if number.isdecimal()), default=0) + 1


def _fill_in(prefix: str, *, width: int, height: int) -> str:
    now = time.localtime()
    values = {"width": f"{width}", "height": f"{height}"}
    values |= {name: time.strftime(form, now) for name, form in _TIMES.items()}
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", value)
    return prefix
