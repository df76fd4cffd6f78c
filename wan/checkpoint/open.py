"""Opening of one expert: locates every tensor and checks it against the model, without loading it.

GGUF allows at most four dimensions and drops leading ones. Converters work around that in different
ways: patch embeddings (five dimensions) and modulation tables (one row) may have some dimensions
merged. The values have the same order in all cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

import torch

from ...offload.formats import FP8_DTYPES, FileTensor
from ...offload.sources import read_tensors
from ...shapes import PATCH
from . import detect
from .components import CONFIG, read_config
from .files import (
    CheckpointError,
    ModelVersion,
    are_current,
    is_gguf,
    model_version,
    read_checkpoint,
)
from .key_names import both_names, parameter_names
from .meta_model import parameter_shapes
from .model_part import model_part
from .quantised_layers import refuse_other_formats, resolve_quantisation

ARCHITECTURE_FIELD = "general.architecture"

# One converter writes "pig" or "cow" for all models, another omits the field. The tensors decide in
# these cases.
ARCHITECTURES = ("wan", "pig", "cow", None)

PATCHES = "patch_embedding.weight"
PATCHES_BIAS = "patch_embedding.bias"

KEPT = 8
"""Number of opened experts to keep. The check before a graph run opens the same ones."""


def patch_shape(stored: detect.Shape, bias: detect.Shape) -> detect.Shape:
    """Return the shape of a patch embedding stored with merged dimensions, else `stored` itself."""
    if 0 in bias:
        return stored
    width = prod(bias)
    expected = (width, prod(stored) // (width * prod(PATCH)), *PATCH)
    return expected if is_merged(stored, expected) else stored


def is_merged(stored: detect.Shape, expected: detect.Shape) -> bool:
    """Return True if dropping ones from `expected` and merging neighbours gives `stored`."""
    # The loop below would take a size of 0 for the end of the sizes.
    if 0 in expected:
        return stored == expected
    sizes = iter(size for size in expected if size != 1)
    for size in stored:
        merged = 1
        while merged < size:
            # Beyond `size` when no sizes are left, so that the loop ends.
            merged *= next(sizes, 0) or size + 1
        if merged != size:
            return False
    return next(sizes, None) is None


STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FP8_DTYPES)
"""Dtypes of weights without a scale or a packing."""


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One opened checkpoint, under the parameter names in diffusers' WanTransformer3DModel."""

    path: Path
    config: detect.WanConfig
    weights: Mapping[str, FileTensor]
    """Every parameter in the model's shape, with the dtype and packing in the file."""
    scales: Mapping[str, FileTensor]
    """Scales by weight name: one float32 number, or one per row."""
    full_precision: frozenset[str]
    """Weights that the file requires to be multiplied in the compute dtype."""
    notes: tuple[str, ...] = ()
    """Sentences about unused tensors in the file."""

    def is_current(self) -> bool:
        """Return True if the files on disk are unchanged since they were opened."""
        return are_current({(tensor.path, tensor.version) for tensor in self.weights.values()})


def open_expert(path: Path) -> Expert:
    """Open a safetensors or GGUF file or a diffusers transformer folder.

    Reads only headers and quantised layer markers (a few bytes), once until a file changes.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or neither safetensors nor
            GGUF.
        CheckpointError: the tensors do not form one Wan2.1 or Wan2.2 expert. Names the first wrong
            one.
    """
    # A copy: a pair needs two expert objects, even from one file.
    return replace(_opened(path, model_version(path)))


# The version is part of the cache key: a changed file is opened again.
@lru_cache(KEPT)
def _opened(path: Path, version: ModelVersion) -> Expert:
    stored = read_checkpoint(path)
    architecture = stored.metadata.get(ARCHITECTURE_FIELD)
    if is_gguf(path) and architecture not in ARCHITECTURES:
        raise CheckpointError(
            path, f"is a GGUF of {architecture!r}, not of 'wan': choose an expert of Wan2.2 A14B"
        )
    if (path / CONFIG).is_file():
        detect.refuse_other_classes(path, read_config(path))
    # Refuse variants before the shapes are checked, so that the message names the variant and not
    # an extra key.
    detect.refuse_other_types(path, stored.metadata)
    part = model_part(path, stored.tensors)
    refuse_other_formats(path, part.tensors)  # before LoRAs, because SVDQuant has factors
    detect.refuse_other_models(path, part.tensors)
    resolved = resolve_quantisation(path, part.tensors, stored.metadata, read_tensors)
    names = parameter_names(path, resolved.weights)
    weights = {names[key]: tensor for key, tensor in resolved.weights.items()}
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if is_gguf(path) and shapes.keys() >= {PATCHES, PATCHES_BIAS}:
        shapes[PATCHES] = patch_shape(shapes[PATCHES], shapes[PATCHES_BIAS])
    config = detect.config_from_shapes(path, shapes)
    expected = parameter_shapes(config)
    if is_gguf(path):
        for name, shape in expected.items():
            if name in weights and is_merged(shapes[name], shape):
                weights[name] = replace(weights[name], shape=shape)
    for key, name in names.items():
        _check_tensor(path, key, weights[name], expected.get(name), scaled=key in resolved.scales)
    missing = [name for name in expected if name not in weights]
    if missing:
        first = f"{both_names(missing[0])} {list(expected[missing[0]])}"
        raise CheckpointError(path, f"{first} is missing, one of {len(missing)} missing tensors")
    return Expert(
        path=path,
        config=config,
        weights=weights,
        scales={names[key]: scale for key, scale in resolved.scales.items()},
        full_precision=frozenset(names[key] for key in resolved.full_precision),
        notes=part.notes(path),
    )


def _check_tensor(
    path: Path, key: str, tensor: FileTensor, expected: detect.Shape | None, *, scaled: bool
) -> None:
    """Refuse a tensor (`key` in the file) that the model lacks or has in another shape."""
    if expected is None:
        raise CheckpointError(path, f"{key} {list(tensor.shape)} does not belong to this Wan model")
    if tensor.shape != expected:
        raise CheckpointError(path, f"{key} is {list(tensor.shape)}; {list(expected)} is expected")
    if tensor.packing is None and not scaled and tensor.dtype not in STORED_DTYPES:
        known = "weights are fp32, fp16, bf16, fp8, packed (GGUF), or marked as quantised"
        raise CheckpointError(path, f"{key} is {tensor.dtype}; {known}")
