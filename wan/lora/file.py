"""Opening of LoRA files: changed parameters, factors and scales, without loading them.

Changes are listed under the parameter names in diffusers' WanTransformer3DModel, independent of the
spelling in the file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from ...offload.formats import FileHeader, FileTensor, FileVersion, read_header
from ...offload.sources import read_tensors
from ..checkpoint.files import CheckpointError, ModelVersion, are_current, model_version
from .changes import Change, changes_of
from .keys import Role, key_meaning, layer_of, other_algorithm, other_model, unknown_prefix
from .settings import CONFIG_FILE, adapter_settings

logger = logging.getLogger("wanstream.lora")

MAX_SHOWN_KEYS = 3  # in a message
KEPT = 8
"""Number of opened LoRAs to keep. A graph is checked before it runs, and then opens the same."""


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """Opened LoRA file."""

    path: Path
    tensors: Mapping[str, FileTensor]
    """Locations of the used tensors, by file key."""
    changes: Mapping[str, tuple[Change, ...]]
    """Changes by parameter name: one algorithm, a difference, or both."""
    unmatched: tuple[str, ...]
    """Keys that match no expert parameter."""
    warnings: tuple[str, ...] = ()
    """Sentences about unused layers."""
    notes: tuple[str, ...] = ()
    """Sentences about parts left out on purpose."""
    settings: tuple[Path, FileVersion] | None = None
    """File next to this one with the settings in use."""

    @cached_property
    def identity(self) -> Hashable:
        """Hashable, equal for two openings of an unchanged file."""
        versions = sorted({tensor.version for tensor in self.tensors.values()}, key=str)
        return (self.path.resolve(), *versions, self.settings)

    def is_current(self) -> bool:
        """Return True if the file and the settings file have not changed since opening."""
        # All tensors are in one file, so one of them is enough.
        files = [(self.path, tensor.version) for tensor in self.tensors.values()][:1]
        return are_current([*files, *filter(None, [self.settings])])


def open_lora(path: Path | str) -> LoraFile:
    """Open a LoRA for one expert.

    Reads the header and the alphas, a few bytes per layer, until a file changes.

    Layers that match no expert parameter (such as text encoder layers) are logged and listed in
    `warnings`.

    Raises:
        CheckpointFileError: the file is missing, truncated, a pickle, or not a safetensors file.
        CheckpointError: no key matches, no code here computes the algorithm (OFT, GLoRA ...), or
            the tensors do not belong together. The message has the key.
    """
    return _opened(Path(path), lora_version(Path(path)))


def lora_version(path: Path) -> ModelVersion:
    """Return the files on which `open_lora` depends, with their versions."""
    config = path.with_name(CONFIG_FILE)
    # Settings next to the file depend on the other files in the folder.
    others = sorted(path.parent.glob("*.safetensors")) if config.is_file() else ()
    return model_version(path, config, *others)


# The version is part of the cache key: a changed file is opened again.
@lru_cache(KEPT)
def _opened(path: Path, version: ModelVersion) -> LoraFile:
    header = read_header(path)
    _refuse_other_algorithms(path, header.tensors)
    settings = adapter_settings(path, header.metadata, header.tensors)
    parts = _parts(header)
    alphas = _alphas(header, (roles["alpha"] for roles in parts.values() if "alpha" in roles))
    changes = changes_of(path, header.tensors, parts, alphas, settings)
    used = {key for each in changes.values() for change in each for key in change.keys}
    meant = used | {parts[name]["alpha"] for name in changes if "alpha" in parts[name]}
    unmatched = [key for key in header.tensors if key not in meant]
    in_blocks = any(name.startswith("blocks.") for name in changes)
    # Other models have layers outside the blocks with the same names.
    if not changes or (not in_blocks and other_model(unmatched) is not None):
        raise CheckpointError(path, _no_match_message(header.tensors))
    tensors = {key: tensor for key, tensor in header.tensors.items() if key in used}
    for key, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(
                path, f"{key} is {tensor.dtype}; the factors of a LoRA are floating-point numbers"
            )
    return noted(
        LoraFile(
            path=path,
            tensors=tensors,
            changes=changes,
            unmatched=tuple(unmatched),
            settings=settings.source,
        ),
        warnings=_unused_layers(header, meant),
        notes=settings.notes,
    )


def noted(lora: LoraFile, *, warnings: Iterable[str] = (), notes: Iterable[str] = ()) -> LoraFile:
    """Return `lora` with more warnings and notes, and log them."""
    for warning in warnings:
        logger.warning("%s", warning)
    for note in notes:
        logger.info("%s", note)
    return replace(lora, warnings=(*lora.warnings, *warnings), notes=(*lora.notes, *notes))


def _unused_layers(header: FileHeader, meant: Set[str]) -> list[str]:
    """Return a warning with the unused layers, if any. `meant` has the used keys.

    Keys with one number (an alpha, a counter) or none are not counted.
    """
    used = {layer_of(key) for key in meant}
    unmatched = {key: tensor for key, tensor in header.tensors.items() if key not in meant}
    named = {key: layer_of(key) for key, tensor in unmatched.items() if math.prod(tensor.shape) > 1}
    # By key where a layer is used in part, so the message names the unused tensor.
    unused = {key if layer in used else layer: key for key, layer in named.items()}
    if not unused:
        return []
    model = other_model(unmatched)
    prefix = next(filter(None, map(unknown_prefix, unused.values())), None)
    reason = ""
    if model:
        reason = f" (probably of {model})"
    elif prefix:
        reason = f" (unknown prefix {prefix!r})"
    return [
        f"{header.path.name} is used in part: {len(unused)} of {len(unused) + len(used)} layers do "
        f"not belong to a Wan expert{reason} and are left out: {_first_keys(unused)}"
    ]


def _parts(header: FileHeader) -> dict[str, dict[Role, str]]:
    """Return the keys by parameter and role."""
    parts: dict[str, dict[Role, str]] = {}
    for key in header.tensors:
        meaning = key_meaning(key)
        if meaning is None:
            continue
        first = parts.setdefault(meaning.parameter, {}).setdefault(meaning.role, key)
        if first != key:
            reason = f"{first} and {key} mean the same: give one file for each expert"
            raise CheckpointError(header.path, f"{reason}, with one spelling")
    return parts


def _alphas(header: FileHeader, keys: Iterable[str]) -> dict[str, float]:
    stored = {key: header.tensors[key] for key in keys}
    for key, tensor in stored.items():
        if math.prod(tensor.shape) != 1:
            raise CheckpointError(
                header.path, f"{key} is {list(tensor.shape)}; an alpha is one number"
            )
    alphas = {key: float(tensor) for key, tensor in read_tensors(stored).items()}
    for key, alpha in alphas.items():
        if not math.isfinite(alpha):
            raise CheckpointError(
                header.path, f"{key} is {alpha}: the file is damaged or its training failed"
            )
    return alphas


def _refuse_other_algorithms(path: Path, keys: Iterable[str]) -> None:
    for key in keys:
        algorithm = other_algorithm(key)
        if algorithm is not None:
            raise CheckpointError(
                path, f"is {algorithm} ({key}): LoRA, LoKr, LoHa, DoRA and differences can be added"
            )


def _no_match_message(keys: Iterable[str]) -> str:
    keys = list(keys)
    if not keys:
        return "holds no tensors"
    model = other_model(keys)
    prefixed = {key: prefix for key in keys if (prefix := unknown_prefix(key)) is not None}
    if model is not None:
        guess = f"it was probably made for {model}"
    elif prefixed:
        key, prefix = next(iter(prefixed.items()))
        layer = layer_of(key).partition(prefix)[2]
        guess = f"unknown prefix {prefix!r} before {layer}: rename its keys without it"
    elif any(key_meaning(f"{key}.diff") for key in keys):
        guess = "it holds whole weights: choose it as an expert"
    else:
        guess = "it was probably made for another model"
    return f"none of its {len(keys)} keys belongs to a Wan expert ({_first_keys(keys)}): {guess}"


def _first_keys(keys: Iterable[str]) -> str:
    keys = list(keys)
    return ", ".join(keys[:MAX_SHOWN_KEYS]) + (" ..." if len(keys) > MAX_SHOWN_KEYS else "")
