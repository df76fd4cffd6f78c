"""The keys of a checkpoint as parameter names of diffusers' WanTransformer3DModel."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .native_keys import native_transformer_name
from .stored import CheckpointError

DIFFUSERS_MARK = "condition_embedder."
NATIVE_MARK = "time_embedding."


def parameter_names(path: Path, keys: Iterable[str]) -> dict[str, str]:
    """Return the parameter name of every key; native (ComfyUI, original) keys are renamed, diffusers' own stay.

    Raises:
        CheckpointError: neither kind of keys, or two keys that mean the same parameter.
    """
    keys = list(keys)
    if any(key.startswith(DIFFUSERS_MARK) for key in keys):
        return {key: key for key in keys}
    if not any(key.startswith(NATIVE_MARK) for key in keys):
        found = f"{len(keys)} tensors, {keys[0]} first" if keys else "no tensors"
        raise CheckpointError(path, f"is not a Wan transformer: it holds {found}")
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    # The converter moves values from key to key without looking at them, so the keys themselves can be the values.
    renamed = convert_wan_transformer_to_diffusers({key: key for key in keys})
    names = {key: name for name, key in renamed.items()}
    for key in keys:
        if key not in names:
            raise CheckpointError(path, f"{key} means the same parameter as another key")
    return names


def both_names(name: str) -> str:
    """Name a parameter for people, who may know it by either name."""
    native = native_transformer_name(name)
    return name if native == name else f"{name} (natively {native})"
