"""Opening of one expert: locates every tensor in the files and checks it against the model, without loading it.

GGUF allows at most four dimensions and drops leading ones. Converters work around that in different ways: patch
embeddings (five dimensions) and modulation tables (one row) may have some dimensions merged. The order of the values is
the same in all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

import torch

from ...offload import FileTensor, file_version, read_tensors
from .components import CONFIG, read_config
from .detect import Shape, WanConfig, config_from_shapes, refuse_other_classes, refuse_other_models, refuse_other_types
from .files import CheckpointError, ModelVersion, is_gguf, model_version, read_checkpoint
from .key_names import both_names, parameter_names
from .meta_model import parameter_shapes
from .model_part import model_part
from .quantised_layers import FP8_DTYPES, refuse_other_formats, resolve_quantisation

ARCHITECTURE_FIELD = "general.architecture"

# One converter writes "pig" or "cow" for all of its models, another omits the field. The tensors decide in these cases.
ARCHITECTURES = ("wan", "pig", "cow", None)

PATCHES = "patch_embedding.weight"
PATCHES_BIAS = "patch_embedding.bias"
PATCH = (1, 2, 2)  # in every Wan transformer

KEPT = 8
"""Number of opened experts to keep: the check before a graph's run opens the same ones."""

logger = logging.getLogger("wanstream.checkpoint")


def check_architecture(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file whose metadata name another architecture.

    Raises:
        CheckpointError: names the architecture.
    """
    architecture = metadata.get(ARCHITECTURE_FIELD)
    if architecture not in ARCHITECTURES:
        raise CheckpointError(path, f"is a GGUF of {architecture!r}, not of 'wan': choose an expert of Wan2.2 A14B")


def _with_patch_shape(weights: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Restore the shape of the patch embedding, from which the sizes of the model are derived."""
    patches, bias = weights.get(PATCHES), weights.get(PATCHES_BIAS)
    if patches is None or bias is None:
        return dict(weights)
    return {**weights, PATCHES: replace(patches, shape=patch_shape(patches.shape, bias.shape))}


def patch_shape(stored: Shape, bias: Shape) -> Shape:
    """Return the shape of a patch embedding stored with merged dimensions, else `stored` itself."""
    if 0 in bias:
        return stored
    width = prod(bias)
    expected = (width, prod(stored) // (width * prod(PATCH)), *PATCH)
    return expected if is_merged(stored, expected) else stored


def _with_shape(tensor: FileTensor, expected: Shape) -> FileTensor:
    return replace(tensor, shape=expected) if is_merged(tensor.shape, expected) else tensor


def is_merged(stored: Shape, expected: Shape) -> bool:
    """Return True if dropping ones from `expected` and merging neighbours gives `stored`."""
    if 0 in expected:
        return stored == expected
    sizes = iter(size for size in expected if size != 1)
    for size in stored:
        merged = 1
        while merged < size:
            merged *= next(sizes, 0) or size + 1  # beyond `size`, so that the loop ends when no sizes are left
        if merged != size:
            return False
    return next(sizes, None) is None


STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES)
"""Dtypes of weights without a scale or a packing."""


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One opened checkpoint, under the parameter names of diffusers' WanTransformer3DModel."""

    path: Path
    config: WanConfig
    weights: Mapping[str, FileTensor]
    """Every parameter of the model in the model's shape, with the dtype and packing of the file."""
    scales: Mapping[str, FileTensor]
    """Scale of each scaled weight, one float32 number or one per row, under the name of the weight."""
    full_precision: frozenset[str]
    """Weights that the file demands to be multiplied in the compute dtype."""
    notes: tuple[str, ...] = ()
    """Sentences about tensors of the file that are not used."""

    def is_current(self) -> bool:
        """Return True if the files on disk have not changed since they were opened."""
        opened = {(tensor.path, tensor.version) for tensor in self.weights.values()}
        return all(path.is_file() and file_version(path.stat()) == version for path, version in opened)


def open_expert(path: Path) -> Expert:
    """Open a safetensors or GGUF file or a diffusers transformer folder.

    Only headers and the markers of quantised layers (a few bytes) are read, once until a file changes.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor GGUF.
        CheckpointError: the tensors are not those of one Wan2.1 or Wan2.2 expert; names the first wrong one.
    """
    # A copy: the experts of a pair are two, from one file too.
    return replace(_opened(path, model_version(path)))


@lru_cache(KEPT)
def _opened(path: Path, version: ModelVersion) -> Expert:
    stored = read_checkpoint(path)
    if is_gguf(path):
        check_architecture(path, stored.metadata)
    if (path / CONFIG).is_file():
        refuse_other_classes(path, read_config(path))
    # Refuse variants before the shapes are checked, so that the message names the variant and not its first extra key.
    refuse_other_types(path, stored.metadata)
    part = model_part(path, stored.tensors)
    refuse_other_formats(path, part.tensors)  # before LoRAs, because SVDQuant has factors
    refuse_other_models(path, part.tensors)
    resolved = resolve_quantisation(path, part.tensors, stored.metadata, read_tensors)
    names = parameter_names(path, resolved.weights)
    weights = {names[key]: tensor for key, tensor in resolved.weights.items()}
    if is_gguf(path):
        weights = _with_patch_shape(weights)
    config = config_from_shapes(path, {name: tensor.shape for name, tensor in weights.items()})
    expected = parameter_shapes(config)
    if is_gguf(path):
        weights = {name: _with_shape(tensor, expected.get(name, tensor.shape)) for name, tensor in weights.items()}
    for key, name in names.items():
        _check_tensor(path, key, weights[name], expected.get(name), scaled=key in resolved.scales)
    missing = [name for name in expected if name not in weights]
    if missing:
        first = f"{both_names(missing[0])} {list(expected[missing[0]])}"
        raise CheckpointError(path, f"{first} is missing, one of {len(missing)} missing tensors")
    notes = () if part.note is None else (f"{path.name}: {part.note}",)
    for note in notes:
        logger.info("%s", note)
    return Expert(
        path=path,
        config=config,
        weights=weights,
        scales={names[key]: scale for key, scale in resolved.scales.items()},
        full_precision=frozenset(names[key] for key in resolved.full_precision),
        notes=notes,
    )


def _check_tensor(path: Path, key: str, tensor: FileTensor, expected: Shape | None, *, scaled: bool) -> None:
    """Refuse a tensor (`key` in the file) that the model does not have, or has in another shape."""
    if expected is None:
        raise CheckpointError(path, f"{key} {list(tensor.shape)} does not belong to this Wan model")
    if tensor.shape != expected:
        raise CheckpointError(path, f"{key} is {list(tensor.shape)}; {list(expected)} is expected")
    if tensor.packing is None and not scaled and tensor.dtype not in STORED_DTYPES:
        raise CheckpointError(
            path,
            f"{key} is {tensor.dtype}; weights are fp32, fp16, bf16, fp8, packed (GGUF), or marked as quantised",
        )
