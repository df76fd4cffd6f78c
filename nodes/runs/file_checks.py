"""File header checks in `validate_inputs`, before any node computes.

A linked name is None until the run, so only the node itself checks it. A result is kept until the
file changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch

from ...host import WEIGHT_DTYPES, Files, Host
from ...sampling.steps import RequestError
from ...schema.records import Notice
from ...schema.refs import ExpertsRef
from ...wan import open_image_encoder, open_lora, open_pair
from ...wan.checkpoint import ModelVersion, model_version, open_expert
from ...wan.text import encoder_version, open_text_encoder
from ...wan.vae import LATENT_SCALES, RAW, VAE_DTYPES, WanVae, open_tiny_vae, open_vae
from .notices import accepted_warnings, file_notices

ENCODER_FOLDERS = ("diffusers", "vae")
"""Model folders for VAE encoders."""
DECODER_FOLDERS = ("diffusers", "vae", "vae_approx")
"""Model folders for VAE decoders. Tiny ones are in `vae_approx`."""
PREVIEW_FOLDERS = ("vae_approx", "vae")
CLIP_FOLDERS = ("diffusers", "clip_vision")
TEXT_FOLDERS = ("diffusers", "text_encoders")
LORA_FOLDERS = ("loras",)
EXPERT_FOLDERS = ("diffusion_models", "diffusers")
MODEL_FOLDERS = ("diffusion_models",)
"""Model folders for native models."""
CHECKPOINT_FOLDERS = ("checkpoints",)
"""Model folders for files with a MODEL, a CLIP and a VAE."""

ENCODERS_OF_A_CLIP = ("text_encoders",)
"""Model folders for the text encoders of a native CLIP."""

SAME_FOLDER = "from the same pipeline folder"
"""Choice for the low-noise expert: the folder with the high-noise expert."""
NONE = "none"
"""Choice for no file."""

KEPT = 64
"""Number of kept results per check."""


def check_experts(files: Files, high_noise: object, low_noise: object) -> None:
    """Raise the errors from opening two experts. They must belong together."""
    high = optional_path(files, high_noise, EXPERT_FOLDERS)
    low = optional_path(files, low_noise, EXPERT_FOLDERS, no_file=SAME_FOLDER)
    if high is not None and low_noise is not None:
        # Only headers are checked, so any dtype will do, and fp32 works on every device.
        open_pair(ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32"))
        return
    for path in (high, low):  # the other one is linked, and may be in the same folder
        if path is not None and path.is_file():
            open_expert(path)


def check_single_model(files: Files, name: object) -> None:
    """Raise the errors from opening a single model."""
    path = optional_path(files, name, EXPERT_FOLDERS)
    if path is not None:
        open_pair(ExpertsRef(high_noise=path, single=True, compute_dtype="float32"))


def check_native_model(
    host: Host, name: object, weight_dtype: object, folders: Sequence[str] = MODEL_FOLDERS
) -> None:
    """Raise the errors in the header of a native model."""
    path = optional_path(host.files, name, folders)
    if path is not None:
        dtype = _choice("weight_dtype", weight_dtype, WEIGHT_DTYPES, unknown="default")
        _native_model(host.native.check_model, path, model_version(path), dtype)


def check_native_clip(host: Host, *names: object) -> None:
    """Raise the errors in the headers of text encoders for a native CLIP."""
    for name in names:
        path = optional_path(host.files, name, ENCODERS_OF_A_CLIP)
        if path is not None:
            host.native.check_clip(path)


def check_encoder(host: Host, name: object) -> tuple[Notice, ...]:
    """Raise the errors from opening a VAE, and an error for a VAE without encoder."""
    path = optional_path(host.files, name, ENCODER_FOLDERS)
    return _checked(host, path, partial(_vae, open_vae, scale=RAW, encodes=True))


def check_decoder(
    host: Host, name: object, compute_dtype: object = None, latent_scale: object = None
) -> tuple[Notice, ...]:
    """Raise the errors from opening a VAE decoder.

    None is an unknown setting, and is not refused.
    """
    dtype = VAE_DTYPES[_choice("compute_dtype", compute_dtype, VAE_DTYPES, unknown="fp32")]
    path = optional_path(host.files, name, DECODER_FOLDERS)
    return _checked(host, path, partial(_vae, open_vae, dtype=dtype, scale=_scale(latent_scale)))


def check_preview_vae(host: Host, name: object, latent_scale: object = None) -> tuple[Notice, ...]:
    """Raise the errors from opening a tiny VAE for previews."""
    path = optional_path(host.files, name, PREVIEW_FOLDERS)
    return _checked(host, path, partial(_vae, open_tiny_vae, scale=_scale(latent_scale)))


def check_clip_vision(host: Host, name: object) -> tuple[Notice, ...]:
    """Raise the errors from opening an image encoder. "none" is no file."""
    path = optional_path(host.files, name, CLIP_FOLDERS, no_file=NONE)
    return _checked(host, path, _clip_vision)


def check_text_encoder(files: Files, name: object) -> tuple[Notice, ...]:
    """Raise the errors from opening a text encoder."""
    path = optional_path(files, name, TEXT_FOLDERS)
    if path is None:
        return ()
    return _text_encoder(path, encoder_version(path))


def check_lora(files: Files, name: object) -> None:
    """Raise the errors from opening a LoRA. "none" is no file."""
    path = optional_path(files, name, LORA_FOLDERS, no_file=NONE)
    if path is not None:
        open_lora(path)


def optional_path(
    files: Files, name: object, kinds: Sequence[str], *, no_file: str | None = None
) -> Path | None:
    """Return a model path, or None for the choice `no_file` and for a linked name (None)."""
    if name is None or name == no_file:
        return None
    return files.model_path(str(name), *kinds)


def _checked(
    host: Host, path: Path | None, notices_of: Callable[[Path, ModelVersion], tuple[Notice, ...]]
) -> tuple[Notice, ...]:
    """Return the notices on a file, or none without a file. Raises StrictError."""
    if path is None:
        return ()
    notices = notices_of(path, model_version(path))
    # Outside the cached function, because the user may change strict mode at any time.
    accepted_warnings(host, notices)
    return notices


def _scale(latent_scale: object) -> str:
    return _choice("latent_scale", latent_scale, LATENT_SCALES, unknown=RAW)


def _choice(name: str, value: object, choices: Collection[str], *, unknown: str) -> str:
    # ComfyUI does not compare a choice with the list if the node's own check reads it.
    if value is None:
        return unknown
    if value not in choices:
        raise RequestError(f"{name} is {value!r}: choose {' or '.join(choices)}")
    return str(value)


# `version` is unused but part of the key: a replaced file is checked again.
@lru_cache(KEPT)
def _vae(
    opened: Callable[[Path, torch.dtype, str], WanVae],
    path: Path,
    version: ModelVersion,
    *,
    scale: str,
    dtype: torch.dtype = torch.float32,
    encodes: bool = False,
) -> tuple[Notice, ...]:
    with opened(path, dtype, scale) as vae:
        if encodes:
            vae.check_encodes()
        return file_notices(vae.warnings, vae.notes)


@lru_cache(KEPT)
def _clip_vision(path: Path, version: ModelVersion) -> tuple[Notice, ...]:
    encoder = open_image_encoder(path)
    return file_notices(encoder.warnings, encoder.notes)


@lru_cache(KEPT)
def _text_encoder(path: Path, version: ModelVersion) -> tuple[Notice, ...]:
    with open_text_encoder(path) as encoder:
        return file_notices((), encoder.notes)


@lru_cache(KEPT)
def _native_model(
    check: Callable[[Path, str], None], path: Path, version: ModelVersion, weight_dtype: str
) -> None:
    check(path, weight_dtype)
