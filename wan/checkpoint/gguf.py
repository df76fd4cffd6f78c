"""Architecture check and tensor shapes of GGUF files.

GGUF allows at most four dimensions and drops leading ones. Converters work around that in different ways: patch
embeddings (five dimensions) and modulation tables (one row) may have some dimensions merged. The order of the values is
the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from ...offload import FileTensor
from .detect import Shape, config_from_shapes
from .files import CheckpointError
from .meta_model import parameter_shapes

ARCHITECTURE_FIELD = "general.architecture"

# One converter writes "pig" or "cow" for all of its models, another omits the field. The tensors decide in these cases.
ARCHITECTURES = ("wan", "pig", "cow", None)

PATCHES = "patch_embedding.weight"
PATCHES_BIAS = "patch_embedding.bias"
PATCH = (1, 2, 2)  # in every Wan transformer


def check_architecture(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file whose metadata name another architecture.

    Raises:
        CheckpointError: names the architecture.
    """
    architecture = metadata.get(ARCHITECTURE_FIELD)
    if architecture not in ARCHITECTURES:
        raise CheckpointError(path, f"is a GGUF of {architecture!r}, not of 'wan': choose an expert of Wan2.2 A14B")


def restore_shapes(path: Path, weights: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Restore the shapes of tensors with merged dimensions, by parameter name; the other tensors are unchanged.

    Raises:
        CheckpointError: the tensors are not those of an expert.
    """
    weights = _with_patch_shape(weights)
    config = config_from_shapes(path, {name: tensor.shape for name, tensor in weights.items()})
    expected = parameter_shapes(config)
    return {name: _with_shape(tensor, expected.get(name, tensor.shape)) for name, tensor in weights.items()}


def _with_patch_shape(weights: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Restore the shape of the patch embedding, from which the sizes of the model are derived."""
    patches, bias = weights.get(PATCHES), weights.get(PATCHES_BIAS)
    if patches is None or bias is None or 0 in bias.shape:
        return dict(weights)
    width = prod(bias.shape)
    channels = prod(patches.shape) // (width * prod(PATCH))
    return {**weights, PATCHES: _with_shape(patches, (width, channels, *PATCH))}


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
