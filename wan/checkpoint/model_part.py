"""The diffusion model in a checkpoint, under bare model keys.

A file may have the model under a prefix, next to other models, and with tensors unused by the
forward pass:

| in the file                                                   | here                         |
|---------------------------------------------------------------|------------------------------|
| any prefix before `patch_embedding.weight` and `blocks.0.`    | removed                      |
| key parts added by torch to wrapped modules (`_orig_mod.`)    | removed, wherever they stand |
| other models in a whole checkpoint (`vae.`, `text_encoders.`) | left out                     |
| training averages (`model_ema.`) next to the weights          | left out                     |
| tensors unused by any forward pass (`UNUSED`)                 | left out                     |
| other keys without the prefix                                 | kept, to be refused by name  |
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...offload.formats import FileTensor
from .files import CheckpointError

logger = logging.getLogger("wanstream.checkpoint")

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
    # Noise schedules and their marks in whole checkpoints, and training averages.
    r"(?:.+\.)?(?:v_pred|ztsnr|betas|\w*alphas_cumprod\w*|edm_\w+)(?:\.\w+)?",
    r"(?:.+\.)?(?:model_ema|denoiser|model_sampling)\..+",
)
"""Tensors unused by any forward pass of a Wan model, as bare key patterns."""

IMAGE_NORMS = r"blocks\.\d+\.(?:attn2\.norm_added_k|cross_attn\.norm_k_img)\..+"
"""Norms used only by an image branch."""

_UNUSED = re.compile("|".join(UNUSED))
_UNUSED_WITHOUT_IMAGES = re.compile("|".join((*UNUSED, IMAGE_NORMS)))
_IMAGE_BRANCH = re.compile(
    r"img_emb\.|condition_embedder\.image_embedder\.|blocks\.\d+\.(?:attn2\.add_[kv]_proj|cross_attn\.[kv]_img)\."
)

_AVERAGES = re.compile(r"(?:^|\.)model_ema\.")
"""Prefix of a second, averaged set of weights, written by training."""

NAMED = 3
"""Number of tensors named in a note."""


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Diffusion model tensors by bare key."""

    tensors: Mapping[str, FileTensor]
    ignored: tuple[str, ...]
    """File keys of unused tensors, also from other models."""

    def notes(self, path: Path) -> tuple[str, ...]:
        """Return a sentence about unused tensors in this file, if any, and log it."""
        if not self.ignored:
            return ()
        named = ", ".join(self.ignored[:NAMED])
        if len(self.ignored) > NAMED:
            named += f" and {len(self.ignored) - NAMED} more"
        count = len(self.ignored)
        note = f"{path.name}: {count} tensors that this model does not use are ignored: {named}"
        logger.info("%s", note)
        return (note,)


def model_part(path: Path, tensors: Mapping[str, FileTensor]) -> ModelPart:
    """Return the diffusion model in a checkpoint.

    Raises:
        CheckpointError: two prefixes have a whole model each, or two keys mean the same tensor.
    """
    unwrapped = {key: WRAPPERS.sub("", key) for key in tensors}
    prefix = _model_prefix(path, unwrapped.values())
    keys = keys_by_name(path, {key: name.removeprefix(prefix) for key, name in unwrapped.items()})
    unused = _UNUSED
    if not any(map(_IMAGE_BRANCH.match, keys)):
        unused = _UNUSED_WITHOUT_IMAGES
    ignored = {
        key
        for bare, key in keys.items()
        if unused.fullmatch(bare) or _is_of_another_model(unwrapped[key], prefix)
    }
    return ModelPart(
        tensors={bare: tensors[key] for bare, key in keys.items() if key not in ignored},
        ignored=tuple(key for key in tensors if key in ignored),
    )


def keys_by_name(path: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Return keys by name from `names`, which has names by key.

    Raises:
        CheckpointError: two keys have the same name.
    """
    keys: dict[str, str] = {}
    for key, name in names.items():
        if name in keys:
            raise CheckpointError(
                path, f"holds {name} twice, as {keys[name]} and {key}: use another file"
            )
        keys[name] = key
    return keys


def refuse_several(path: Path, prefixes: Collection[str], models: str) -> None:
    """Raise CheckpointError if several prefixes have one such model each."""
    if len(prefixes) > 1:
        named = " and ".join(map(repr, prefixes))
        reason = f"holds {len(prefixes)} {models}, under the prefixes {named}"
        raise CheckpointError(path, f"{reason}: save the one to use in a file alone")


def _model_prefix(path: Path, keys: Iterable[str]) -> str:
    """Return the prefix of the diffusion model keys: "" for a bare model and for other files.

    A whole model has this prefix before both the patch embedding and the blocks, known or not.
    Without a whole model it is the only block prefix, so that messages can name the missing
    tensors. Training averages count only if the file has no other weights.

    Raises:
        CheckpointError: several prefixes have a whole model each. The message has the prefixes.
    """
    blocks: dict[str, None] = {}
    patches: dict[str, None] = {}
    for key in keys:
        if (found := _BLOCK.match(key)) is not None:
            blocks[found[1]] = None
        elif (found := _PATCHES.fullmatch(key)) is not None:
            patches[found[1]] = None
    whole = _without_averages([prefix for prefix in blocks if prefix in patches])
    refuse_several(path, whole, "diffusion models")
    prefixes = whole or _without_averages(list(blocks))
    return prefixes[0] if len(prefixes) == 1 else ""


def _without_averages(prefixes: list[str]) -> list[str]:
    """Return the prefixes of weights other than averages.

    All of them if the file has only averages.
    """
    return [prefix for prefix in prefixes if not _AVERAGES.search(prefix)] or prefixes


def _is_of_another_model(key: str, prefix: str) -> bool:
    """Return True for another model's key in a checkpoint with this diffusion model prefix."""
    found = _OTHER.match(key)
    return found is not None and not key.startswith(prefix) and prefix.startswith(found[1])
