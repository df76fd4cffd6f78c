"""What GGUF files of an expert say in their own way: which model they hold, and shapes.

GGUF has four dimensions at most and drops leading ones, and its converters deal with that differently: patch embeddings
(five dimensions) and modulation tables (one row) may come with some dimensions multiplied together. The values lie in
the same order all the same.
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

# One converter calls all of its models pig or cow, and another leaves the field out: the tensors tell then.
ARCHITECTURES = ("wan", "pig", "cow", None)

PATCHES = "patch_embedding.weight"
PATCHES_BIAS = "patch_embedding.bias"
PATCH = (1, 2, 2)  # of every Wan transformer


def check_architecture(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file that says it holds another model.

    Raises:
        CheckpointError: names that model.
    """
    architecture = metadata.get(ARCHITECTURE_FIELD)
    if architecture not in ARCHITECTURES:
        raise CheckpointError(path, f"is a GGUF of {architecture!r}, not of 'wan': choose an expert of Wan2.2 A14B")


def with_own_shapes(path: Path, weights: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Give tensors, by parameter name, the shapes back that they were stored from; the others stay as they are.

    Raises:
        CheckpointError: the tensors are not those of an expert.
    """
    weights = _with_patch_shape(weights)
    config = config_from_shapes(path, {name: tensor.shape for name, tensor in weights.items()})
    own = parameter_shapes(config)
    return {name: _with_shape(tensor, own.get(name, tensor.shape)) for name, tensor in weights.items()}


def _with_patch_shape(weights: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """The sizes of the model are read from the patch embedding, so its own shape cannot be asked of the model."""
    patches, bias = weights.get(PATCHES), weights.get(PATCHES_BIAS)
    if patches is None or bias is None or 0 in bias.shape:
        return dict(weights)
    width = prod(bias.shape)
    channels = prod(patches.shape) // (width * prod(PATCH))
    return {**weights, PATCHES: _with_shape(patches, (width, channels, *PATCH))}


def _with_shape(tensor: FileTensor, own: Shape) -> FileTensor:
    return replace(tensor, shape=own) if is_merged(tensor.shape, own) else tensor


def is_merged(stored: Shape, own: Shape) -> bool:
    """Whether multiplying neighbours of `own` together, and dropping ones, gives `stored`."""
    if 0 in own:
        return stored == own
    sizes = iter(size for size in own if size != 1)
    for size in stored:
        merged = 1
        while merged < size:
            merged *= next(sizes, 0) or size + 1
        if merged != size:
            return False
    return next(sizes, None) is None
