"""Native ComfyUI values: CONDITIONING and LATENT as run inputs, and latents as a LATENT."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import pad

from ...shapes import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ...wan.latents import SPACES, WAN21, denormalise, normalise, space_of
from ..steps.errors import ConditioningError
from ..steps.schedules import seeded_noise
from .conditioning_keys import (
    IMAGE_EMBEDDING_KEY,
    IMAGE_KEY,
    MASK_INDEX_KEY,
    MASK_KEY,
    Conditioning,
    single_entry,
)
from .extra_tokens import ExtraTokens, native_tokens, same_tokens
from .mask import latent_mask
from .run_inputs import RunInputs

SIZE_HINT = "downscale_ratio_spacial"
"""Key in an empty LATENT for the pixels per latent pixel along either side. ComfyUI spells it
so."""

MASK_CHANNELS = 4
"""Mask channels in a condition."""

LEFTOVER_KEY = "wanstream_leftover"
"""LATENT key written by our samplers, for {"sigma": float, "fingerprint": int}."""

PROBES = 1024
"""Approximate number of values in a fingerprint."""

Latent: TypeAlias = "Mapping[str, Any]"
"""A native LATENT."""


def native_inputs(
    positive: Conditioning, negative: Conditioning | None, latent: Latent, seed: int | None = None
) -> RunInputs:
    """Convert native values into run inputs.

    Args:
        positive: texts, images and tokens for the positive side.
        negative: the same for the negative side. None: no step reads it.
        latent: native LATENT. Zeros mean an empty latent, not a grey video.
        seed: seed for ComfyUI's noise for this latent. None: no noise is added.

    Raises:
        ConditioningError: a value is not supported. The message has the side and the key.
        RequestError: a tensor has an unsupported shape or type.
    """
    samples = _samples(latent)
    mask = None
    if latent.get("noise_mask") is not None:
        mask = latent_mask(latent["noise_mask"], samples.shape)
    given = _side("positive", positive, samples.shape, mask)
    negative_text = negative_tokens = None
    if negative is not None:
        other = _side("negative", negative, samples.shape, mask)
        if not _same(given.image, other.image) or not _same(given.embedding, other.embedding):
            raise ConditioningError(
                "positive and negative carry different start images: connect both outputs of one "
                "image-to-video node"
            )
        negative_text = other.text
        if not same_tokens(given.tokens, other.tokens):
            negative_tokens = other.tokens
    noise = torch.zeros(samples.shape)
    if seed is not None:
        noise = seeded_noise(samples.shape, seed, batch_index=latent.get("batch_index"))
    return RunInputs(
        noise=noise,
        positive=given.text,
        negative=negative_text,
        image_condition=given.image,
        image_embedding=given.embedding,
        latent=normalise(samples) if torch.count_nonzero(samples) else None,
        mask=mask,
        add_noise=seed is not None,
        latent_sigma=leftover_sigma(latent),
        tokens=given.tokens,
        negative_tokens=negative_tokens,
    )


def side_tokens(name: str, conditioning: Conditioning) -> ExtraTokens:
    """Return one side's tokens next to the video.

    Raises:
        ConditioningError: a value is not supported. The message has the side and the key.
    """
    return native_tokens(name, single_entry(name, conditioning)[1])


def native_latent(latents: torch.Tensor, like: Latent, *, sigma: float = 0.0) -> dict[str, Any]:
    """Return a LATENT with normalised `latents` as raw CPU samples, and the other keys in `like`.

    Args:
        sigma: noise level of the latents.
    """
    # The size hint applies to empty latents only. Native samplers drop it too.
    kept = {key: value for key, value in like.items() if key != SIZE_HINT}
    # ComfyUI's samplers divide leftover noise by 1 - sigma, and the next sampler multiplies by it
    # again.
    samples = denormalise(latents.float() / (1 - sigma)).cpu()
    return {**kept, **marked_latent(samples, sigma)}


def _samples(latent: Latent) -> torch.Tensor:
    """Return the samples [B, 16 or 48, T, h, w] float32.

    Empty latents for other models are converted by size.
    """
    samples: torch.Tensor = latent["samples"]
    if not isinstance(samples, torch.Tensor):
        raise ConditioningError(
            f"the latent is a {type(samples).__name__} of several parts, Wan generates only video: "
            "use an empty video latent"
        )
    if samples.ndim == 4 and not torch.count_nonzero(samples):
        # An empty latent for a model that may have other than 8 pixels per latent pixel.
        ratio = (latent.get(SIZE_HINT) or PIXELS_PER_LATENT) / PIXELS_PER_LATENT
        size = (round(side * ratio) for side in samples.shape[-2:])
        samples = samples.new_zeros(len(samples), WAN21.channels, 1, *size)
    elif samples.ndim == 4:
        # An image latent is a video with one frame.
        samples = samples.unsqueeze(2)
    if samples.ndim != 5 or samples.shape[1] not in [space.channels for space in SPACES]:
        raise ConditioningError(
            f"the latent is {list(samples.shape)}, Wan needs [B, {WAN21.channels}, T, h, w], and "
            "TI2V-5B 48 channels: use an empty video latent"
        )
    return samples.float()


class _Side(NamedTuple):
    """One side's tensors, with one sample or as many as the latent."""

    text: torch.Tensor
    image: torch.Tensor | None
    embedding: torch.Tensor | None
    tokens: ExtraTokens


def _side(
    name: str, conditioning: Conditioning, shape: torch.Size, mask: torch.Tensor | None
) -> _Side:
    """Return one side's tensors, for a latent with `shape` under a noise mask."""
    text, options = single_entry(name, conditioning)
    image = options.get(IMAGE_KEY)
    if image is not None:
        _check_image_size(name, image, shape)
        # Without concat_mask, ComfyUI uses the noise mask as the mask of the image condition.
        image = image_condition(
            image,
            options.get(MASK_KEY, mask),
            mask_index=options.get(MASK_INDEX_KEY, 0),
            latent_channels=shape[1],
        )
    embedding = _image_embedding(options)
    if embedding is not None:
        embedding = _repeated(embedding, shape[0])
    tokens = native_tokens(name, options).mapped(lambda latents: _repeated(latents, shape[0]))
    return _Side(_repeated(text, shape[0]), image, embedding, tokens)


def _image_embedding(options: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the hidden states before CLIP's last layer from ComfyUI's output object, if any."""
    output = options.get(IMAGE_EMBEDDING_KEY)
    if output is None:
        return None
    states = getattr(output, "penultimate_hidden_states", None)
    if not isinstance(states, torch.Tensor):
        raise ConditioningError(
            f"{IMAGE_EMBEDDING_KEY} is a {type(output).__name__} without "
            "penultimate_hidden_states: connect the output of CLIP Vision Encode"
        )
    return states


def _repeated(values: torch.Tensor, batch: int) -> torch.Tensor:
    """Return values for `batch` samples: several are repeated in turn and cut, as in ComfyUI.

    A single value stays single.
    """
    # Tensors with other dimensions are refused by name later.
    if values.ndim not in {3, 5} or len(values) in (0, 1, batch):
        return values
    return values.repeat(-(-batch // len(values)), *[1] * (values.ndim - 1))[:batch]


def _check_image_size(name: str, image: torch.Tensor, shape: torch.Size) -> None:
    """Raise ConditioningError if the image and the latent differ in size."""
    # ComfyUI would stretch the image and its mask, which hides a wrong connection.
    if image.ndim == 5 and image.shape[2:] != shape[2:]:
        raise ConditioningError(
            f"{name} carries a start image for {video_text(image.shape)}, the latent is "
            f"{video_text(shape)}: connect the latent of the image-to-video node, or give both "
            "nodes the same width, height and frames"
        )


def video_text(shape: torch.Size) -> str:
    """Describe the video size for a latent with `shape` [B, 16 or 48, T, h, w]."""
    channels, frames, height, width = shape[1:]
    pixels = space_of(channels).pixels
    return (
        f"{width * pixels} x {height * pixels} pixels and {(frames - 1) * FRAMES_PER_LATENT + 1} "
        "frames"
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def image_condition(
    image: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    mask_index: int = 0,
    latent_channels: int = WAN21.channels,
) -> torch.Tensor:
    """Return an expert's condition channels, [b, C, T, h, w], from native values.

    * One latent (I2V, Fun InP): 4 mask channels, then the image.
    * Two latents with a mask index (Fun Control 2.2): the control video, the mask, the start image.
    * Two latents without a mask index (Fun Control 2.1): both, and no mask.

    The expert's mask is the inverse of ComfyUI's: 1 where the image is known. Latents are
    normalised one by one.

    Args:
        image: raw latent [b, 16 or 32, T, h, w]. For 5B with 48 or 96 channels.
        mask: [b or 1, any, T or less, h, w], 1 where the model generates. Missing frames count as
            1, and without a mask all frames do.
        mask_index: number of channels before the mask.
        latent_channels: channels per latent.

    Raises:
        ConditioningError: the shapes do not fit.
    """
    if image.ndim != 5 or image.shape[1] not in (latent_channels, 2 * latent_channels):
        raise ConditioningError(
            f"{IMAGE_KEY} is {list(image.shape)}, this model reads [b, {latent_channels}, T, h, "
            f"w], and Fun Control {2 * latent_channels} channels: remove the node for another "
            "model that made it"
        )
    latents = image.split(latent_channels, dim=1)
    if mask_index not in (0, latent_channels * (len(latents) - 1)):
        raise ConditioningError(
            f"{MASK_INDEX_KEY} is {mask_index} for {image.shape[1]} channels of {IMAGE_KEY}, and "
            f"Fun Control has the mask between two latents of {latent_channels} channels: remove "
            "the node that made it"
        )
    control = map(normalise, latents[:-1])
    start = normalise(latents[-1])
    if len(latents) > 1 and mask_index == 0:
        return torch.cat([*control, start], dim=1)
    known = _known_mask(image, mask)
    batch = max(len(known), len(image))
    return torch.cat(
        [each.expand(batch, -1, -1, -1, -1) for each in (*control, known, start)], dim=1
    )


def _known_mask(image: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the expert's mask [b, 4, T, h, w] for `image`."""
    frames = image.shape[2]
    if mask is None:
        return image.new_zeros(1, MASK_CHANNELS, *image.shape[2:])
    if mask.ndim != 5 or mask.shape[3:] != image.shape[3:] or mask.shape[2] > frames:
        raise ConditioningError(
            f"{MASK_KEY} is {list(mask.shape)}, its image {list(image.shape)}: T, h and w must "
            "match"
        )
    free = mask.to(image.device)
    if free.shape[1] != MASK_CHANNELS:
        # As in ComfyUI, other numbers of channels are averaged.
        free = free.mean(dim=1, keepdim=True)
    # After the inversion, 0 means unknown, so zeros are right for missing frames.
    known = pad(1.0 - free, (0, 0, 0, 0, 0, frames - mask.shape[2]))
    return known.expand(-1, MASK_CHANNELS, -1, -1, -1)


def marked_latent(samples: torch.Tensor, sigma: float) -> dict[str, Any]:
    """Return a LATENT with raw `samples` at noise level `sigma`. 0 is a finished video."""
    return {
        "samples": samples,
        LEFTOVER_KEY: {"sigma": sigma, "fingerprint": _fingerprint(samples)},
    }


def leftover_sigma(latent: Mapping[str, Any]) -> float | None:
    """Return the noise level of a LATENT from one of our runs.

    None for other LATENTs, and if the samples have changed.
    """
    mark = latent.get(LEFTOVER_KEY)
    if mark is None or mark["fingerprint"] != _fingerprint(latent["samples"]):
        return None
    return float(mark["sigma"])


def _fingerprint(samples: torch.Tensor) -> int:
    """Return a checksum over the shape and evenly spread values.

    Sampling, scaling or cutting changes it.
    """
    spread = samples.flatten()[:: max(1, samples.numel() // PROBES)]
    return zlib.crc32(
        spread.float().cpu().numpy().tobytes(), zlib.crc32(repr(tuple(samples.shape)).encode())
    )
