"""Latent files in the format of ComfyUI's SaveLatent and LoadLatent, with size metadata."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ...devices import is_out_of_memory
from ...shapes import FRAMES_PER_LATENT
from .space import SPACES, LatentSpaceError, space_of

TENSOR = "latent_tensor"
UNSCALED = "latent_format_version_0"
"""Name of an empty tensor: ComfyUI's mark for values that LoadLatent must not scale."""
DESCRIPTION = "wanstream_latent"
"""Metadata key for model, size and noise level, as JSON."""


class LatentFileError(ValueError):
    """The file is not a saved Wan video latent. The message has the path and a remedy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredLatent:
    """Content of a latent file."""

    samples: torch.Tensor
    """Raw VAE latent [B, 16 or 48, T, h, w], float32, on the CPU."""
    sigma: float
    """Noise level, 0 for a finished video and where the file does not state it."""
    metadata: Mapping[str, str]


def write_latent(
    path: Path,
    samples: torch.Tensor,
    *,
    sigma: float = 0.0,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write raw `samples` as a `.latent` file, also readable by ComfyUI's LoadLatent.

    Args:
        path: file to write, or to replace once the new one is complete.
        samples: raw VAE latent. The metadata describe a Wan video latent, [B, 16 or 48, T, h, w].
        sigma: noise level.
        metadata: JSON values by key.

    Raises:
        OSError: the disk is full, or RAM is too small to build the file. No partial file is left.
    """
    stored = {key: json.dumps(value) for key, value in (metadata or {}).items()}
    stored |= _described(samples, sigma)
    part = path.with_name(f"{path.name}.part")
    try:
        tensors = {TENSOR: samples.contiguous().cpu(), UNSCALED: torch.empty(0)}
        part.write_bytes(safetensors.torch.save(tensors, metadata=stored or None))
        part.replace(path)
    # torch raises RuntimeError if RAM for a tensor is short, and Python MemoryError.
    except (MemoryError, RuntimeError) as err:
        if isinstance(err, RuntimeError) and not is_out_of_memory(err):
            raise
        size = samples.nbytes / 1e6
        raise OSError(
            errno.ENOMEM, f"there is too little memory for a copy of {size:.1f} MB: {err}"
        ) from err
    finally:
        part.unlink(missing_ok=True)


def _described(samples: torch.Tensor, sigma: float) -> dict[str, str]:
    if samples.ndim != 5 or samples.shape[1] not in [space.channels for space in SPACES]:
        return {}
    videos, channels, frames, height, width = samples.shape
    space = space_of(channels)
    described = {
        "models": space.models,
        "videos": videos,
        "frames": (frames - 1) * FRAMES_PER_LATENT + 1,
        "width": width * space.pixels,
        "height": height * space.pixels,
        "sigma": sigma,
    }
    return {DESCRIPTION: json.dumps(described)}


def read_latent(path: Path) -> StoredLatent:
    """Read a latent file from this package or from ComfyUI's SaveLatent.

    Raises:
        LatentFileError: the file is missing, cannot be opened, is not a latent file or is
            incomplete, or does not have a Wan video latent, or the latent contains NaN or infinity.
    """
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            names = {*file.keys()}
            metadata = dict(file.metadata() or {})
            samples = file.get_tensor(TENSOR) if TENSOR in names else None
    except FileNotFoundError as err:
        raise LatentFileError(
            f"{path} does not exist: save the latent again, or choose another file"
        ) from err
    except OSError as err:  # a folder, or a file that may not be read
        reason = "is a folder" if path.is_dir() else f"cannot be read: {err}"
        raise LatentFileError(
            f"{path} {reason}: choose a file of Wan Save Latent that you may read"
        ) from err
    except safetensors.SafetensorError as err:
        raise LatentFileError(f"{path} is not a latent file, or is incomplete: {err}") from err
    if samples is None:
        found = ", ".join(sorted(names)[:3]) or "no tensor"
        raise LatentFileError(
            f"{path} has no tensor {TENSOR}, but {found}: choose a file of Wan Save Latent"
        )
    if UNSCALED not in names:
        raise LatentFileError(
            f"{path} was saved by an old ComfyUI, which scaled latents of images: save it again"
        )
    _check_samples(path, samples)
    return StoredLatent(samples=samples.float(), sigma=_sigma(path, metadata), metadata=metadata)


def _check_samples(path: Path, samples: torch.Tensor) -> None:
    shape = list(samples.shape)
    if samples.ndim != 5 or 0 in shape or not samples.is_floating_point():
        raise LatentFileError(
            f"{path} has a latent {shape} ({samples.dtype}): a video's is [B, 16 or 48, T, h, w]"
        )
    try:
        space_of(shape[1])
    except LatentSpaceError as err:
        raise LatentFileError(f"{path}: {err}") from err
    if not samples.isfinite().all():
        raise LatentFileError(f"{path} has a latent with NaN or infinity: sample it again")


def _sigma(path: Path, metadata: Mapping[str, str]) -> float:
    if DESCRIPTION not in metadata:
        return 0.0
    try:
        described: Any = json.loads(metadata[DESCRIPTION])
        sigma = float(described["sigma"])
    # JSON may hold an integer beyond the range of float, or lists nested too deeply.
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as err:
        raise LatentFileError(f"{path} has malformed metadata {DESCRIPTION}: {err!r:.100}") from err
    # Below 1, because samples with leftover noise are stored divided by 1 - sigma.
    if not (math.isfinite(sigma) and 0.0 <= sigma < 1.0):
        raise LatentFileError(f"{path} has noise level {sigma}: a latent has one from 0 to below 1")
    return sigma


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of shape, dtype and values in hex."""
    # Flat and as bytes: a 0-d tensor has no view as bytes, and numpy has no bf16.
    values = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
