"""Opening of LoRA files: changed parameters, their factors and scales, without loading them.

A LoRA adds a low-rank product `up @ down * scale` to a weight, or a difference of the same shape to any parameter. Both
are listed under the parameter names of diffusers' WanTransformer3DModel, independent of the spelling in the file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...offload import FileHeader, FileTensor, file_version, read_header, read_tensors
from ..checkpoint.files import CheckpointError
from .keys import Role, adapter_settings, key_meaning, other_algorithm, other_model

logger = logging.getLogger("wanstream.lora")

MAX_SHOWN_KEYS = 3  # in a message


@dataclass(frozen=True, kw_only=True)
class Change:
    """Tensor `key` of the file or, if there is a `down`, the product of both, multiplied by `scale`.

    In a product, `key` is the factor `up` [rows, rank] and `down` is [rank, columns]; the additional dimensions of a
    convolution's factors count as columns.
    """

    key: str
    down: str | None = None
    scale: float


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """Opened LoRA file."""

    path: Path
    tensors: Mapping[str, FileTensor]
    """Locations of the used tensors, by key of the file."""
    changes: Mapping[str, tuple[Change, ...]]
    """Changes by parameter name: a product, a difference, or both."""
    unmatched: tuple[str, ...]
    """Keys that match no parameter of an expert."""

    @cached_property
    def identity(self) -> Hashable:
        """Hashable that is equal for two openings of one file that did not change in between."""
        return (self.path.resolve(), *sorted({tensor.version for tensor in self.tensors.values()}, key=str))

    def is_current(self) -> bool:
        """Return True if the file on disk has not changed since it was opened."""
        versions = {tensor.version for tensor in self.tensors.values()}
        return self.path.is_file() and versions == {file_version(self.path.stat())}


def open_lora(path: Path | str) -> LoraFile:
    """Open a LoRA for one expert; reads the header and the alphas, a few bytes per layer.

    Keys that match no parameter of an expert (those of a text encoder) are logged.

    Raises:
        CheckpointFileError: the file is missing, truncated, a pickle, or not a safetensors file.
        CheckpointError: no key matches, the file is more than a LoRA (DoRA, LoHa, LoKr ...), or its factors do not
            belong together; names the key.
    """
    path = Path(path)
    header = read_header(path)
    _refuse_other_algorithms(path, header.tensors)
    parts = _parts(header)
    products = _products(header, parts)
    changes = {name: _changes(path, roles, products, name) for name, roles in parts.items()}
    changes = {name: found for name, found in changes.items() if found}  # not a lone alpha
    if not changes:
        raise CheckpointError(path, _no_match_message(header.tensors))
    factors = {key for each in changes.values() for change in each for key in (change.key, change.down) if key}
    alphas = {parts[parameter].get("alpha") for parameter in products}
    unmatched = [key for key in header.tensors if key not in factors | alphas]
    tensors = {key: tensor for key, tensor in header.tensors.items() if key in factors}
    for key, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(path, f"{key} is {tensor.dtype}; the factors of a LoRA are floating-point numbers")
    if unmatched:
        logger.warning(
            "%s: %d of %d keys change nothing in a Wan expert and are not used: %s",
            path.name,
            len(unmatched),
            len(header.tensors),
            _first_keys(unmatched),
        )
    return LoraFile(path=path, tensors=tensors, changes=changes, unmatched=tuple(unmatched))


_Parts = dict[str, dict[Role, str]]  # parameter -> role -> key


def _parts(header: FileHeader) -> _Parts:
    parts: _Parts = {}
    for key in header.tensors:
        meaning = key_meaning(key)
        if meaning is None:
            continue
        first = parts.setdefault(meaning.parameter, {}).setdefault(meaning.role, key)
        if first != key:
            raise CheckpointError(
                header.path, f"{first} and {key} mean the same: give one file for each expert, with one spelling"
            )
    return parts


def _products(header: FileHeader, parts: _Parts) -> dict[str, Change]:
    settings = adapter_settings(header.path, header.metadata)
    alphas = _alphas(header, (roles["alpha"] for roles in parts.values() if "alpha" in roles))
    products = {}
    for parameter, roles in parts.items():
        if "up" not in roles and "down" not in roles:
            continue
        for role in ("up", "down"):
            if role not in roles:
                other = roles["down" if role == "up" else "up"]
                raise CheckpointError(header.path, f"{other} has no {role} factor: download or convert the file again")
        rank = _rank(header, roles["up"], roles["down"])
        scale = settings.scale(parameter.removesuffix(".weight"), rank, alphas.get(roles.get("alpha", "")))
        products[parameter] = Change(key=roles["up"], down=roles["down"], scale=scale)
    return products


def _rank(header: FileHeader, up: str, down: str) -> int:
    """Return the rank of a product; refuse factors that are not matrices or have different ranks."""
    path = header.path
    up_shape, down_shape = header.tensors[up].shape, header.tensors[down].shape
    if len(up_shape) < 2 or len(down_shape) < 2 or 0 in up_shape + down_shape:
        raise CheckpointError(path, f"{up} is {list(up_shape)} and {down} is {list(down_shape)}: matrices are expected")
    rank = down_shape[0]
    if math.prod(up_shape[1:]) != rank:
        raise CheckpointError(
            path,
            f"mixed ranks: {up} {list(up_shape)} has rank {math.prod(up_shape[1:])}, {down} {list(down_shape)} has "
            f"rank {rank}; the factors of a layer share one",
        )
    return rank


def _changes(
    path: Path, roles: Mapping[Role, str], products: Mapping[str, Change], parameter: str
) -> tuple[Change, ...]:
    if "diff" in roles and "up bias" in roles:
        raise CheckpointError(path, f"{roles['diff']} and {roles['up bias']} mean the same")
    changes = [products[parameter]] if parameter in products else []
    if "diff" in roles:
        changes.append(Change(key=roles["diff"], scale=1.0))
    if "up bias" in roles:
        # The bias belongs to the `up` layer, so it has the scale of the layer's product.
        product = products.get(parameter.removesuffix("bias") + "weight")
        changes.append(Change(key=roles["up bias"], scale=1.0 if product is None else product.scale))
    return tuple(changes)


def _alphas(header: FileHeader, keys: Iterable[str]) -> dict[str, float]:
    stored = {key: header.tensors[key] for key in keys}
    for key, tensor in stored.items():
        if math.prod(tensor.shape) != 1:
            raise CheckpointError(header.path, f"{key} is {list(tensor.shape)}; an alpha is one number")
    alphas = {key: float(tensor) for key, tensor in read_tensors(stored).items()}
    for key, alpha in alphas.items():
        if not math.isfinite(alpha):
            raise CheckpointError(header.path, f"{key} is {alpha}: the file is damaged or its training failed")
    return alphas


def _refuse_other_algorithms(path: Path, keys: Iterable[str]) -> None:
    for key in keys:
        algorithm = other_algorithm(key)
        if algorithm is not None:
            raise CheckpointError(path, f"is {algorithm} ({key}): only plain LoRAs and differences can be added")


def _no_match_message(keys: Iterable[str]) -> str:
    keys = list(keys)
    if not keys:
        return "holds no tensors"
    models = [model for model in map(other_model, keys) if model is not None]
    if models:
        guess = f"it was probably made for {models[0]}"
    elif any(key_meaning(f"{key}.diff") for key in keys):
        guess = "it holds whole weights: choose it as an expert"
    else:
        guess = "it was probably made for another model"
    return f"none of its {len(keys)} keys belongs to a Wan expert ({_first_keys(keys)}): {guess}"


def _first_keys(keys: Iterable[str]) -> str:
    keys = list(keys)
    return ", ".join(keys[:MAX_SHOWN_KEYS]) + (" ..." if len(keys) > MAX_SHOWN_KEYS else "")
