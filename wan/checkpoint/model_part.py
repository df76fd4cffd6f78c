"""The diffusion model in a checkpoint, under bare model keys.

A file may have the model under a prefix, next to other models, and with tensors that no forward pass reads:

| in the file                                                           | here                                 |
|-----------------------------------------------------------------------|--------------------------------------|
| any prefix before `patch_embedding.weight` and `blocks.0.`            | removed                              |
| key parts added by torch to wrapped modules (`_orig_mod.`)            | removed, wherever they stand         |
| other models in a whole checkpoint (`vae.`, `text_encoders.`)         | left out                             |
| averages of a training (`model_ema.`) next to the weights             | left out                             |
| tensors that no forward pass reads (`UNUSED`)                         | left out                             |
| other keys without the prefix                                         | kept, to be refused by name          |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...offload import FileTensor
from .files import CheckpointError

WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Key parts added by `torch.compile`, FSDP and activation checkpoints for a wrapped module."""

OTHER_MODELS_OF_A_CHECKPOINT = (
    *("vae", "first_stage_model", "audio_vae", "vocoder"),
    *("text_encoder", "text_encoders", "cond_stage_model", "conditioner"),
    *("clip_vision", "image_encoder"),
)
"""First key parts of other models in a whole checkpoint."""

_OTHER = re.compile(rf"((?:[^.]+\.)*?)(?:{'|'.join(OTHER_MODELS_OF_A_CHECKPOINT)})\.")
_BLOCK = re.compile(r"((?:[^.]+\.)*?)blocks\.\d+\.")
_PATCHES = re.compile(r"((?:[^.]+\.)*?)patch_embedding\.weight")

UNUSED = (
    # diffusers builds this norm for the Wan2.1 I2V image branch, which takes queries from the text.
    r"blocks\.\d+\.(?:attn[12]\.norm_added_q|(?:cross|self)_attn\.norm_q_img)\..+",
    # Model name marks, and ComfyUI's marks.
    r"model_type\..+",
    r"__\w+__",
    # Position tables, which are computed.
    r"(?:.+\.)?(?:freqs(?:_cis|_cos|_sin)?|inv_freq)(?:\.\d+)?",
    # Noise schedules and their marks in whole checkpoints, and averages of a training.
    r"(?:.+\.)?(?:v_pred|ztsnr|betas|\w*alphas_cumprod\w*|edm_\w+)(?:\.\w+)?",
    r"(?:.+\.)?(?:model_ema|denoiser|model_sampling)\..+",
)
"""Tensors that no forward pass of a Wan model reads, as bare key patterns."""

IMAGE_NORMS = r"blocks\.\d+\.(?:attn2\.norm_added_k|cross_attn\.norm_k_img)\..+"
"""Norms that only an image branch reads."""

_UNUSED = re.compile("|".join(UNUSED))
_IMAGE_NORMS = re.compile(IMAGE_NORMS)
_IMAGE_BRANCH = re.compile(
    r"img_emb\.|condition_embedder\.image_embedder\.|blocks\.\d+\.(?:attn2\.add_[kv]_proj|cross_attn\.[kv]_img)\."
)

_AVERAGES = re.compile(r"(?:^|\.)model_ema\.")
"""Prefix of a second, averaged set of weights, which a training writes."""

NAMED = 3
"""Number of tensors named in a note."""


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Diffusion model tensors by bare key."""

    tensors: Mapping[str, FileTensor]
    ignored: tuple[str, ...]
    """File keys of unused tensors, also from other models."""

    @property
    def note(self) -> str | None:
        """Sentence about unused tensors. None if there are none."""
        if not self.ignored:
            return None
        more = len(self.ignored) - NAMED
        named = ", ".join(self.ignored[:NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{len(self.ignored)} tensors that this model does not use are ignored: {named}"


def model_part(path: Path, tensors: Mapping[str, FileTensor]) -> ModelPart:
    """Return the diffusion model in a checkpoint.

    Raises:
        CheckpointError: two prefixes have a whole model each, or two keys mean the same tensor.
    """
    prefix = model_prefix(path, tensors)
    keys: dict[str, str] = {}
    for key in tensors:
        bare = bare_key(key, prefix)
        if bare in keys:
            raise CheckpointError(path, f"holds {bare} twice, as {keys[bare]} and {key}: use another file")
        keys[bare] = key
    unused = unused_keys(keys)
    ignored = {key for bare, key in keys.items() if bare in unused or (prefix and is_of_another_model(key, prefix))}
    return ModelPart(
        tensors={bare: tensors[key] for bare, key in keys.items() if key not in ignored},
        ignored=tuple(key for key in tensors if key in ignored),
    )


def model_prefix(path: Path, keys: Iterable[str]) -> str:
    """Return the prefix of the diffusion model keys: "" for a bare model and for other files.

    A whole model has this prefix before both the patch embedding and the blocks, known or not. Without a whole model it
    is the only prefix of blocks, so that the missing tensors are named. Averages of a training count only if the file
    has no other weights.

    Raises:
        CheckpointError: several prefixes have a whole model each. The message has the prefixes.
    """
    blocks: dict[str, None] = {}
    patches: dict[str, None] = {}
    for key in keys:
        key = WRAPPERS.sub("", key)
        if (found := _BLOCK.match(key)) is not None:
            blocks[found[1]] = None
        elif (found := _PATCHES.fullmatch(key)) is not None:
            patches[found[1]] = None
    whole = _without_averages([prefix for prefix in blocks if prefix in patches])
    if len(whole) > 1:
        named = " and ".join(repr(prefix) for prefix in whole)
        raise CheckpointError(
            path,
            f"holds {len(whole)} diffusion models, under the prefixes {named}: save the one to use in a file alone",
        )
    prefixes = whole or _without_averages(list(blocks))
    return prefixes[0] if len(prefixes) == 1 else ""


def _without_averages(prefixes: list[str]) -> list[str]:
    """Return the prefixes of weights that are not averages; all of them if a file has averages alone."""
    return [prefix for prefix in prefixes if not _AVERAGES.search(prefix)] or prefixes


def bare_key(key: str, prefix: str) -> str:
    """Return a key without the model prefix and wrapped module parts."""
    return WRAPPERS.sub("", key).removeprefix(prefix)


def is_of_another_model(key: str, prefix: str) -> bool:
    """Return True if the key belongs to another model in a whole checkpoint with this diffusion model prefix."""
    key = WRAPPERS.sub("", key)
    found = _OTHER.match(key)
    return found is not None and not key.startswith(prefix) and prefix.startswith(found[1])


def unused_keys(keys: Iterable[str]) -> set[str]:
    """Return the bare keys that no forward pass reads."""
    keys = list(keys)
    has_images = any(map(_IMAGE_BRANCH.match, keys))
    return {key for key in keys if _UNUSED.fullmatch(key) or (not has_images and _IMAGE_NORMS.fullmatch(key))}
