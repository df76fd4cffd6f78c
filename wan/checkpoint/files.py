"""Checkpoint files and the tensors in their headers.

A checkpoint is one safetensors or GGUF file, or a diffusers transformer folder with one file or
with shards and an index. Only headers are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from ...offload.formats import (
    CheckpointFileError,
    FileHeader,
    FileTensor,
    FileVersion,
    read_gguf_header,
    read_header,
)

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SUFFIX = ".safetensors"

_SHARD = re.compile(r"-\d+-of-\d+")

# Named in a message only: unpickling a file can run code, so these are never opened.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

GGUF = ".gguf"

ModelVersion: TypeAlias = tuple[tuple[str, FileVersion], ...]
"""Model files with their versions."""


class CheckpointError(CheckpointFileError):
    """Readable files without a supported model. The message has the file and the tensor."""


def model_version(*paths: Path) -> ModelVersion:
    """Return a version for models: files, folders with files, or folders with folders of files."""
    found: list[Path] = []
    for path in paths:
        below = (each for pattern in ("*", "*/*") for each in path.glob(pattern) if each.is_file())
        found += [path] if path.is_file() else sorted(below)
    return tuple((str(file), FileVersion.of(file.stat())) for file in found)


def are_current(opened: Iterable[tuple[Path, FileVersion | None]]) -> bool:
    """Return True if these files still have these versions."""
    return all(
        path.is_file() and FileVersion.of(path.stat()) == version for path, version in opened
    )


def read_checkpoint(path: Path, *, weights: str = WEIGHTS) -> FileHeader:
    """Read the headers of the file `path`, or those of the weights in a folder.

    A folder has the file `weights`, only one variant, or indexed shards. Shards are returned as one
    folder header.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor
            GGUF.
        CheckpointError: the folder has no weights, or its index does not match its shards.
    """
    if path.is_dir():
        found = _weights_of(path, weights)
        if found.endswith(".json"):
            return _read_shards(path, found)
        path = path / found
    return (read_gguf_header if is_gguf(path) else read_header)(path)


def _weights_of(folder: Path, weights: str) -> str:
    """Return the name of a folder's index or only weights file.

    Without an expected name, it is the only variant. diffusers puts the variant's name before the
    last suffix (`diffusion_pytorch_model.fp16.safetensors`, `...safetensors.index.fp16.json`).
    """
    index = f"{weights}.index.json"
    for name in (index, weights):
        if (folder / name).is_file():
            return name
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    indexes = [name for name in names if name.endswith(".json") and ".safetensors.index" in name]
    files = [name for name in names if name.endswith(SUFFIX) and _SHARD.search(name) is None]
    found = indexes or files
    shards = [name for name in names if name.endswith(SUFFIX)]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if (folder / "transformer").is_dir():
        reason = "is a pipeline folder: give it alone, or give its transformer and transformer_2 "
        raise CheckpointError(folder, f"{reason}folders")
    if len(found) == 1:
        return found[0]
    if found:
        reason = f"holds {' and '.join(found)}: rename the one to use to {weights}"
    elif shards:
        reason = (
            f"holds {shards[0]}, one of {len(shards)} shards, and their index {index} is missing: "
            "download it"
        )
    elif pickles:
        found_first = f"holds pickles ({pickles[0]})"
        reason = f"{found_first}, which are never read: convert them to safetensors"
    else:
        reason = f"holds neither {weights} nor {index}"
    raise CheckpointError(folder, reason)


def json_object(
    path: Path, text: str | bytes, found: str = "", *, remedy: str = ""
) -> dict[str, Any]:
    """Return the JSON object `text` in the file `path`.

    In messages, `found` precedes and `remedy` follows the fault.

    Raises:
        CheckpointError: the text is not JSON, or not an object.
    """
    try:
        parsed = json.loads(text)
    # TypeError: a header may hold values other than text.
    except (TypeError, ValueError, RecursionError) as err:
        raise CheckpointError(path, f"{found}is not JSON: {err}{remedy}") from err
    if not isinstance(parsed, dict):
        raise CheckpointError(path, f"{found}is not a JSON object{remedy}")
    return parsed


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file name."""
    return path.suffix.lower() == GGUF


def _read_shards(folder: Path, index_name: str) -> FileHeader:
    index = _read_index(folder / index_name)
    headers: list[FileHeader] = []
    for shard in sorted(set(index.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(
                folder / shard, f"this shard is missing, but {index_name} names it"
            )
        headers.append(read_header(folder / shard))
    places = _as_in_shards(index, [key for header in headers for key in header.tensors])
    tensors: dict[str, FileTensor] = {}
    metadata: dict[str, str] = {}
    for header in headers:
        metadata |= header.metadata
        for key, tensor in header.tensors.items():
            if places.get(key) != header.path.name:
                raise CheckpointError(
                    header.path, f"holds {key}, which {index_name} places in {places.get(key)}"
                )
            tensors[key] = tensor
    lost = sorted(places.keys() - tensors.keys())
    if lost:
        raise CheckpointError(
            folder / places[lost[0]], f"does not hold {lost[0]}, which {index_name} places there"
        )
    return FileHeader(path=folder, tensors=tensors, metadata=metadata)


def _read_index(path: Path) -> dict[str, str]:
    """Return the shard file name of each tensor key."""
    shards = json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(path, "has no weight_map")
    for shard in shards.values():
        # An index must not name files outside the folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                path, f"names the shard {shard!r}; a shard is a file in the same folder"
            )
    return shards


def _as_in_shards(index: Mapping[str, str], keys: Collection[str]) -> Mapping[str, str]:
    """Return the index with shard keys if only a prefix differs: a tool changed one, not both."""
    key = next((key for key in keys if key not in index), None)
    if key is None:
        return index
    name = max(index, key=lambda name: _shared_parts(name, key))
    parts = name.split(".")
    tail = ".".join(parts[len(parts) - _shared_parts(name, key) :])
    old = name.removesuffix(tail)
    new = key.removesuffix(tail)
    changed = {new + each.removeprefix(old): shard for each, shard in index.items()}
    return changed if changed.keys() >= set(keys) else index


def _shared_parts(first: str, second: str) -> int:
    """Return the number of equal parts at the end of two keys."""
    pairs = zip(reversed(first.split(".")), reversed(second.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
