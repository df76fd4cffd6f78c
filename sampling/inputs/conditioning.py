"""Native ComfyUI values: CONDITIONING and LATENT to the tensors of a request, and back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...schema import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ...wan import SPACES, WAN21, denormalise, normalise, space_of
from ..errors import ConditioningError
from ..noise import seeded_noise
from .conditioning_keys import IMAGE_SEEN, check_keys
from .mask import latent_mask

LEFTOVER_KEY = "wanstream_leftover"
"""The key of the mark in a LATENT: {"sigma": float, "fingerprint": int}."""

PROBES = 1024
"""About how many values make a fingerprint."""


def leftover_mark(samples: torch.Tensor, sigma: float) -> dict[str, Any]:
    """The mark of raw `samples` that a run left at `sigma`; 0 is a finished video."""
    return {"sigma": sigma, "fingerprint": _fingerprint(samples)}


def leftover_sigma(latent: Mapping[str, Any]) -> float | None:
    """The noise level at which a run left this LATENT; None if no run of ours did, or its samples are other ones."""
    mark = latent.get(LEFTOVER_KEY)
    if mark is None or mark["fingerprint"] != _fingerprint(latent["samples"]):
        return None
    sigma: float = mark["sigma"]
    return sigma


def _fingerprint(samples: torch.Tensor) -> int:
    """A checksum over the shape and evenly spread values: sampling, scaling or cutting a latent changes them all."""
    spread = samples.flatten()[:: max(1, samples.numel() // PROBES)]
    return zlib.crc32(spread.float().cpu().numpy().tobytes(), zlib.crc32(repr(tuple(samples.shape)).encode()))


MASK_CHANNELS = 4
SIZE_HINT = "downscale_ratio_spacial"
"""Where an empty LATENT says how many pixels of a side it stands for; the name is ComfyUI's."""

Conditioning = Sequence[Sequence[Any]]
Latent = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeInputs:
    """The tensors of a `DenoiseRequest`, taken from native values."""

    positive: torch.Tensor
    negative: torch.Tensor | None
    image_condition: torch.Tensor | None
    image_embedding: torch.Tensor | None
    """[1 or B, N, width] of CLIP's hidden states before its last layer."""
    latent: torch.Tensor | None
    """Normalised; None for an empty latent, whose zeros stand for "nothing yet" and not for grey."""
    mask: torch.Tensor | None
    """[1 or B, 1 or 16 (48), T, h, w] float32, 1 where to denoise; None: everywhere."""
    latent_sigma: float | None
    """Noise level at which a run of ours left the latent, where it did."""
    shape: torch.Size
    batch_index: Sequence[int] | None

    def noise(self, seed: int | None) -> torch.Tensor:
        """What ComfyUI draws for this latent and seed; zeros for no seed, where no noise is added."""
        if seed is None:
            return torch.zeros(self.shape)
        return seeded_noise(self.shape, seed, batch_index=self.batch_index)


def native_inputs(positive: Conditioning, negative: Conditioning | None, latent: Latent) -> NativeInputs:
    """Read native values. Raises `ConditioningError` for what no request has a place for, with the side and the key."""
    samples = _samples(latent)
    noise_mask = latent.get("noise_mask")
    mask = None if noise_mask is None else latent_mask(noise_mask, samples.shape)
    text, image = _side("positive", positive, samples.shape, mask)
    seen = _image_embedding(positive)
    negative_text = None
    if negative is not None:
        negative_text, negative_image = _side("negative", negative, samples.shape, mask)
        if not _same(image, negative_image) or not _same(seen, _image_embedding(negative)):
            raise ConditioningError(
                "positive and negative carry different start images: connect both outputs of one image-to-video node"
            )
    return NativeInputs(
        positive=text,
        negative=negative_text,
        image_condition=image,
        image_embedding=None if seen is None else _repeated(seen, samples.shape[0]),
        latent=normalise(samples) if torch.count_nonzero(samples) else None,
        mask=mask,
        latent_sigma=leftover_sigma(latent),
        shape=samples.shape,
        batch_index=latent.get("batch_index"),
    )


def native_latent(latents: torch.Tensor, like: Latent, *, sigma: float = 0.0) -> dict[str, Any]:
    """A LATENT with `latents` (normalised) as its raw samples on the CPU, and whatever else `like` carries.

    `sigma` is the noise level that they are at. Noise that is left over stays in as ComfyUI's samplers hand it on:
    divided by 1 - sigma, which the next sampler multiplies by.
    """
    # A hint for empty latents of another size per pixel; native samplers drop it as well.
    kept = {key: value for key, value in like.items() if key != SIZE_HINT}
    samples = denormalise(latents.float() / (1 - sigma)).cpu()
    return {**kept, "samples": samples, LEFTOVER_KEY: leftover_mark(samples, sigma)}


def image_condition(image: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The 20 channels an I2V expert reads beside the latent.

    `image` is a raw latent [b, 16, T, h, w]. `mask` is [b or 1, any, T or less, h, w] in ComfyUI's sense, 1 where the
    model is free; frames it does not reach, or all of them without a mask, are free. Returns [b, 20, T, h, w]: 4 mask
    channels in the model's sense, 1 where the image is known, then the normalised image.
    """
    if image.ndim != 5 or image.shape[1] != WAN21.channels:
        raise ConditioningError(
            f"concat_latent_image is {list(image.shape)}, Wan2.2 A14B reads [b, {WAN21.channels}, T, h, w]: remove "
            "the node for Fun control, or for another model, that made it"
        )
    frames = image.shape[2]
    if mask is None:
        known = image.new_zeros(1, MASK_CHANNELS, *image.shape[2:])
    elif mask.ndim != 5 or mask.shape[3:] != image.shape[3:] or mask.shape[2] > frames:
        raise ConditioningError(
            f"concat_mask is {list(mask.shape)}, its image {list(image.shape)}: T, h and w must match"
        )
    else:
        free = mask.to(image.device)
        known = 1.0 - (free if free.shape[1] == MASK_CHANNELS else free.mean(dim=1, keepdim=True))
        known = F.pad(known, (0, 0, 0, 0, 0, frames - mask.shape[2]))
    batch = max(len(known), len(image))
    sides = known.expand(batch, MASK_CHANNELS, -1, -1, -1), normalise(image).expand(batch, -1, -1, -1, -1)
    return torch.cat(sides, dim=1)


def _samples(latent: Latent) -> torch.Tensor:
    """The samples [B, 16 or 48, T, h, w] float32. Empty ones stand for a size, whatever they were made for."""
    samples: torch.Tensor = latent["samples"]
    if not isinstance(samples, torch.Tensor):
        raise ConditioningError(
            f"the latent is a {type(samples).__name__} of several parts, Wan2.2 A14B makes video alone: "
            "use an empty video latent"
        )
    if samples.ndim == 4 and not torch.count_nonzero(samples):
        samples = samples.new_zeros(len(samples), WAN21.channels, 1, *_hinted_size(latent))
    elif samples.ndim == 4:
        samples = samples.unsqueeze(2)
    if samples.ndim != 5 or samples.shape[1] not in [space.channels for space in SPACES]:
        raise ConditioningError(
            f"the latent is {list(samples.shape)}, Wan needs [B, {WAN21.channels}, T, h, w], and TI2V-5B 48 channels: "
            "use an empty video latent"
        )
    return samples.float()


def _hinted_size(latent: Latent) -> tuple[int, int]:
    """Height and width of an empty latent that may be of a model with other pixels per latent than Wan's 8."""
    ratio = (latent.get(SIZE_HINT) or PIXELS_PER_LATENT) / PIXELS_PER_LATENT
    height, width = latent["samples"].shape[-2:]
    return round(height * ratio), round(width * ratio)


def _side(
    name: str, conditioning: Conditioning, shape: torch.Size, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Text and image condition of one side, for a latent of `shape` under a noise mask."""
    text, options = single_entry(name, conditioning)
    image = options.get("concat_latent_image")
    if image is None:
        return _repeated(text, shape[0]), None
    _check_image_size(name, image, shape)
    # Without a mask of its own, ComfyUI tells an I2V expert by the noise mask what of the image is known.
    return _repeated(text, shape[0]), image_condition(image, options.get("concat_mask", mask))


def _image_embedding(conditioning: Conditioning) -> torch.Tensor | None:
    """The hidden states before CLIP's last layer, which ComfyUI carries in an object of its own."""
    output = conditioning[0][1].get(IMAGE_SEEN)
    if output is None:
        return None
    states = getattr(output, "penultimate_hidden_states", None)
    if not isinstance(states, torch.Tensor):
        raise ConditioningError(
            f"{IMAGE_SEEN} is a {type(output).__name__} without penultimate_hidden_states: connect the output of "
            "CLIP Vision Encode"
        )
    return states


def single_entry(name: str, conditioning: Conditioning) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """The text of the side `name` and what belongs to it.

    Raises `ConditioningError` for several entries, and as of `check_keys`.
    """
    if len(conditioning) != 1:
        raise ConditioningError(
            f"{name} has {len(conditioning)} entries, only one can be used: do not combine conditionings"
        )
    text, options = conditioning[0]
    if not isinstance(text, torch.Tensor):
        raise ConditioningError(f"{name} has no text, but a {type(text).__name__}: connect a text encoder")
    check_keys(name, options)
    return text, options


def _repeated(text: torch.Tensor, batch: int) -> torch.Tensor:
    """Texts for `batch` samples: one for all stays one, others are repeated in turn and cut as ComfyUI does."""
    if text.ndim != 3 or len(text) in (0, 1, batch):
        return text
    return text.repeat(-(-batch // len(text)), 1, 1)[:batch]


def _check_image_size(name: str, image: torch.Tensor, shape: torch.Size) -> None:
    """Refuse an image of another size than the latent; ComfyUI would stretch it, and its mask, to fit."""
    if image.ndim == 5 and image.shape[2:] != shape[2:]:
        raise ConditioningError(
            f"{name} carries a start image for {video_text(image.shape)}, the latent is {video_text(shape)}: connect "
            "the latent of the image-to-video node, or give both nodes the same width, height and frames"
        )


def video_text(shape: torch.Size) -> str:
    """The size of the video that a latent of `shape` [B, 16 or 48, T, h, w] stands for, in words."""
    channels, frames, height, width = shape[1:]
    pixels = space_of(channels).pixels
    return f"{width * pixels} x {height * pixels} pixels and {(frames - 1) * FRAMES_PER_LATENT + 1} frames"


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
