"""File header checks in `validate_inputs`, before any node computes.

A linked name is None until the run, so only its node checks it. A result is kept until the file changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...host import WEIGHT_DTYPES, current_host
from ...sampling import RequestError
from ...schema import ExpertsRef, Notice
from ...wan import (
    LATENT_SCALES,
    RAW,
    VAE_DTYPES,
    ModelVersion,
    encoder_version,
    model_version,
    open_expert,
    open_image_encoder,
    open_lora,
    open_pair,
    open_text_encoder,
    open_tiny_vae,
    open_vae,
)
from ..inputs import refuse_if_strict, show_notices

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

SAME_FOLDER = "from the same pipeline folder"
"""Choice for the low-noise expert: the folder of the high-noise expert."""
NONE = "none"
"""Choice for no file."""

KEPT = 64
"""Number of kept results per check."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """Findings in the header of a usable file."""

    warnings: tuple[str, ...] = ()
    """Sentences about a loss of precision. Errors in strict mode."""
    notes: tuple[str, ...] = ()
    """Sentences about unused tensors."""


NOTHING = FileReport()


def reports_ui(*reports: FileReport, notes: Sequence[str] = ()) -> dict[str, Any] | None:
    """Show these reports and notes on the executing node, and return the UI output. See `show_notices`."""
    warnings = [Notice(text=warning, level="warning") for report in reports for warning in report.warnings]
    known = [*(note for report in reports for note in report.notes), *notes]
    return show_notices(*warnings, *map(Notice.of, known)) or None


def check_experts(high_noise: object, low_noise: object) -> None:
    """Raise the errors from opening two experts. They must belong together."""
    high = _path(high_noise, EXPERT_FOLDERS)
    low = None if low_noise == SAME_FOLDER else _path(low_noise, EXPERT_FOLDERS)
    if high is not None and low_noise is not None:
        open_pair(ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32"))
        return
    for path in (high, low):  # the other one is linked, and may be in the same folder
        if path is not None and path.is_file():
            open_expert(path)


def check_single_model(name: object) -> None:
    """Raise the errors from opening a single model."""
    path = _path(name, EXPERT_FOLDERS)
    if path is not None:
        open_pair(ExpertsRef(high_noise=path, single=True, compute_dtype="float32"))


def check_native_model(name: object, weight_dtype: object) -> None:
    """Raise the errors in the header of a native model."""
    path = _path(name, MODEL_FOLDERS)
    if path is not None:
        dtype = _choice("weight_dtype", weight_dtype, WEIGHT_DTYPES, unknown=next(iter(WEIGHT_DTYPES)))
        _native_model(path, model_version(path), dtype)


def check_encoder(name: object) -> FileReport:
    """Raise the errors from opening a VAE, and an error for a VAE without encoder."""
    path = _path(name, ENCODER_FOLDERS)
    return NOTHING if path is None else _strict(_encoder(path, model_version(path)))


def check_decoder(name: object, compute_dtype: object = None, latent_scale: object = None) -> FileReport:
    """Raise the errors from opening a VAE decoder. None is an unknown setting, and is not refused."""
    dtype = VAE_DTYPES[_choice("compute_dtype", compute_dtype, VAE_DTYPES, unknown="fp32")]
    path = _path(name, DECODER_FOLDERS)
    return NOTHING if path is None else _strict(_decoder(path, model_version(path), dtype, _scale(latent_scale)))


def check_preview_vae(name: object, latent_scale: object = None) -> FileReport:
    """Raise the errors from opening a tiny VAE for previews."""
    path = _path(name, PREVIEW_FOLDERS)
    return NOTHING if path is None else _strict(_preview_vae(path, model_version(path), _scale(latent_scale)))


def check_clip_vision(name: object) -> FileReport:
    """Raise the errors from opening an image encoder. "none" is no file."""
    path = None if name == NONE else _path(name, CLIP_FOLDERS)
    return NOTHING if path is None else _strict(_clip_vision(path, model_version(path)))


def check_text_encoder(name: object) -> FileReport:
    """Raise the errors from opening a text encoder."""
    path = _path(name, TEXT_FOLDERS)
    return NOTHING if path is None else _text_encoder(path, encoder_version(path))


def check_lora(name: object) -> None:
    """Raise the errors from opening a LoRA. "none" is no file."""
    path = None if name == NONE else _path(name, LORA_FOLDERS)
    if path is not None:
        open_lora(path)


def _path(name: object, kinds: Sequence[str]) -> Path | None:
    return None if name is None else current_host().model_path(str(name), *kinds)


def _strict(report: FileReport) -> FileReport:
    refuse_if_strict(report.warnings)
    return report


def _scale(latent_scale: object) -> str:
    return _choice("latent_scale", latent_scale, LATENT_SCALES, unknown=RAW)


def _choice(name: str, value: object, choices: Collection[str], *, unknown: str) -> str:
    # ComfyUI does not compare a choice with the list if the node's own check reads it.
    if value is not None and value not in choices:
        raise RequestError(f"{name} is {value!r}: choose {' or '.join(choices)}")
    return unknown if value is None else str(value)


@lru_cache(KEPT)
def _encoder(path: Path, version: ModelVersion) -> FileReport:
    with open_vae(path, latent_scale=RAW) as vae:
        vae.check_encodes()
        return FileReport(warnings=vae.warnings, notes=vae.notes)


@lru_cache(KEPT)
def _decoder(path: Path, version: ModelVersion, dtype: torch.dtype, scale: str) -> FileReport:
    with open_vae(path, dtype, scale) as vae:
        return FileReport(warnings=vae.warnings, notes=vae.notes)


@lru_cache(KEPT)
def _preview_vae(path: Path, version: ModelVersion, scale: str) -> FileReport:
    with open_tiny_vae(path, latent_scale=scale) as vae:
        return FileReport(warnings=vae.warnings, notes=vae.notes)


@lru_cache(KEPT)
def _clip_vision(path: Path, version: ModelVersion) -> FileReport:
    encoder = open_image_encoder(path)
    return FileReport(warnings=encoder.warnings, notes=encoder.notes)


@lru_cache(KEPT)
def _text_encoder(path: Path, version: ModelVersion) -> FileReport:
    with open_text_encoder(path) as encoder:
        return FileReport(notes=encoder.notes)


@lru_cache(KEPT)
def _native_model(path: Path, version: ModelVersion, weight_dtype: str) -> None:
    current_host().check_model(path, weight_dtype)
