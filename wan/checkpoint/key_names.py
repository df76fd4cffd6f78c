"""Conversion between checkpoint keys and parameter names in diffusers' WanTransformer3DModel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .files import CheckpointError

DIFFUSERS_MARK = "condition_embedder."
NATIVE_MARK = "time_embedding."


def parameter_names(path: Path, keys: Iterable[str]) -> dict[str, str]:
    """Return every key's parameter name: native (ComfyUI, original) renamed, diffusers' unchanged.

    Raises:
        CheckpointError: the keys are neither native nor diffusers', or two name the same parameter.
    """
    keys = list(keys)
    if any(key.startswith(DIFFUSERS_MARK) for key in keys):
        return {key: key for key in keys}
    if not any(key.startswith(NATIVE_MARK) for key in keys):
        if any(map(_BLOCK_NAME.match, keys)):
            lacking = f"the blocks of a model and no {NATIVE_MARK} or {DIFFUSERS_MARK}"
            raise CheckpointError(
                path, f"is a part of a Wan transformer: it holds {lacking}: use the whole file"
            )
        found = "no tensors"
        if keys:
            found = f"{len(keys)} tensors, {keys[0]} first"
        raise CheckpointError(path, f"is not a Wan transformer: it holds {found}")
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    # The converter moves values between keys without reading them, so the keys themselves can be
    # the values.
    renamed = convert_wan_transformer_to_diffusers({key: key for key in keys})
    names = {key: name for name, key in renamed.items()}
    # A lost key was overwritten by another one for the same parameter.
    for key in keys:
        if key not in names:
            raise CheckpointError(path, f"{key} means the same parameter as another key")
    return names


def both_names(name: str) -> str:
    """Return a parameter's diffusers name with its native name, for messages."""
    native = native_transformer_name(name)
    if native == name:
        return name
    return f"{name} (natively {native})"


# Native names of modules and bare parameters by diffusers name: outside the blocks (OUTER), in a
# block (BLOCK).
OUTER = {
    "patch_embedding": "patch_embedding",
    # Fun Control only. diffusers' model has no such layer.
    "ref_conv": "ref_conv",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}

_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
_ATTENTION |= {name: name for name in ("norm_q", "norm_k")}

BLOCK = {
    **{f"attn1.{name}": f"self_attn.{native}" for name, native in _ATTENTION.items()},
    **{f"attn2.{name}": f"cross_attn.{native}" for name, native in _ATTENTION.items()},
    # The image branch of Wan2.1 I2V.
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    # The norm before cross attention: second in diffusers, third in the native model.
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "scale_shift_table": "modulation",
}

_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


def native_transformer_name(name: str) -> str:
    """Return the native name of a Wan2.1 or Wan2.2 `WanTransformer3DModel` parameter.

    Raises:
        ValueError: the model has no parameter with this name.
    """
    prefix = ""
    table = OUTER
    local = name
    if in_block := _BLOCK_NAME.fullmatch(name):
        prefix = f"blocks.{in_block[1]}."
        table = BLOCK
        local = in_block[2]
    # A bare parameter has no leaf.
    module, _, leaf = local.rpartition(".")
    if leaf not in ("weight", "bias"):
        module = local
    if module not in table:
        raise ValueError(f"{name!r} is not a parameter of a Wan2.1 or Wan2.2 A14B transformer")
    return f"{prefix}{table[module]}{local.removeprefix(module)}"
