"""ComfyUI's native values: CONDITIONING and LATENT to the tensors of a request, and latents back to a LATENT.

Between native nodes a latent is raw VAE output; the model wants it normalised. This file is where the two meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..wan.vae import LATENT_CHANNELS, denormalise, normalise
from .errors import ConditioningError
from .noise import seeded_noise

MASK_CHANNELS = 4

# What a native node may write beside the text and native sampling would obey, but A14B experts or this sampler cannot.
# Keys that native sampling ignores for these experts too (clip_vision_output, reference_latents) are not listed.
REFUSED = {
    "control": "a ControlNet",
    "hooks": "hooks",
    "area": "an area",
    "mask": "a conditioning mask",
    "concat_mask_index": "Fun control channels",
    "control_video": "a control video",
    "camera_conditions": "a camera path",
    "time_dim_concat": "frames appended in time",
    "vace_frames": "VACE frames",
    "vace_mask": "a VACE mask",
    "vace_strength": "a VACE strength",
    "audio_embed": "audio",
    "reference_motion": "reference motion",
    "pose_video_latent": "a pose video",
    "face_video_pixels": "a face video",
}

Conditioning = Sequence[Sequence[Any]]
Latent = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeInputs:
    """The tensors of a `DenoiseRequest`, taken from native values."""

    positive: torch.Tensor
    negative: torch.Tensor | None
    image_condition: torch.Tensor | None
    latent: torch.Tensor | None
    """Normalised; None for an empty latent, whose zeros stand for "nothing yet" and not for grey."""
    shape: torch.Size
    batch_index: Sequence[int] | None

    def noise(self, seed: int) -> torch.Tensor:
        """What ComfyUI draws for this latent and seed."""
        return seeded_noise(self.shape, seed, batch_index=self.batch_index)


def native_inputs(positive: Conditioning, negative: Conditioning | None, latent: Latent) -> NativeInputs:
    """Read native values. Raises `ConditioningError` for what Wan2.2 A14B cannot use, naming the side and the key."""
    samples = _samples(latent)
    text, image = _side("positive", positive)
    negative_text = None
    if negative is not None:
        negative_text, negative_image = _side("negative", negative)
        if not _same(image, negative_image):
            raise ConditioningError(
                "positive and negative carry different start images: connect both outputs of one image-to-video node"
            )
    return NativeInputs(
        positive=text,
        negative=negative_text,
        image_condition=image,
        latent=normalise(samples) if torch.count_nonzero(samples) else None,
        shape=samples.shape,
        batch_index=latent.get("batch_index"),
    )


def native_latent(latents: torch.Tensor, like: Latent) -> dict[str, Any]:
    """A LATENT with `latents` (normalised) as its raw samples on the CPU, and whatever else `like` carries."""
    # A hint for empty latents of another size per pixel; native samplers drop it as well.
    kept = {key: value for key, value in like.items() if key != "downscale_ratio_spacial"}
    return {**kept, "samples": denormalise(latents.float()).cpu()}


def image_condition(image: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The 20 channels an I2V expert reads beside the latent.

    `image` is a raw latent [b, 16, T, h, w]. `mask` is [b or 1, any, T or less, h, w] in ComfyUI's sense, 1 where the
    model is free; frames it does not reach, or all of them without a mask, are free. Returns [b, 20, T, h, w]: 4 mask
    channels in the model's sense, 1 where the image is known, then the normalised image.
    """
    if image.ndim != 5 or image.shape[1] != LATENT_CHANNELS:
        raise ConditioningError(f"concat_latent_image is {list(image.shape)}: give [b, {LATENT_CHANNELS}, T, h, w]")
    frames = image.shape[2]
    if mask is None:
        known = image.new_zeros(1, MASK_CHANNELS, *image.shape[2:])
    elif mask.ndim != 5 or mask.shape[3:] != image.shape[3:] or mask.shape[2] > frames:
        raise ConditioningError(
            f"concat_mask is {list(mask.shape)}, its image {list(image.shape)}: T, h and w must match"
        )
    else:
        known = 1.0 - (mask if mask.shape[1] == MASK_CHANNELS else mask.mean(dim=1, keepdim=True))
        known = F.pad(known, (0, 0, 0, 0, 0, frames - mask.shape[2]))
    return torch.cat([known.expand(image.shape[0], MASK_CHANNELS, -1, -1, -1), normalise(image)], dim=1)


def _samples(latent: Latent) -> torch.Tensor:
    samples: torch.Tensor = latent["samples"]
    if samples.ndim != 5 or samples.shape[1] != LATENT_CHANNELS:
        raise ConditioningError(
            f"the latent is {list(samples.shape)}, Wan2.2 A14B needs [B, {LATENT_CHANNELS}, T, h, w]: "
            "use an empty video latent"
        )
    if latent.get("noise_mask") is not None:
        raise ConditioningError("the latent has a noise mask, and masked denoising is not supported: remove the mask")
    return samples.float()


def _side(name: str, conditioning: Conditioning) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Text and image condition of one side."""
    if len(conditioning) != 1:
        raise ConditioningError(
            f"{name} has {len(conditioning)} entries, only one can be used: do not combine conditionings"
        )
    text, options = conditioning[0]
    for key, what in REFUSED.items():
        if options.get(key) is not None:
            raise ConditioningError(
                f"{name} carries {what} ({key}), which Wan2.2 A14B experts cannot use: remove that node"
            )
    if options.get("start_percent", 0.0) > 0.0 or options.get("end_percent", 1.0) < 1.0:
        raise ConditioningError(f"{name} is limited to a range of steps, which is not supported: remove the time range")
    image = options.get("concat_latent_image")
    if image is None:
        return text, None
    return text, image_condition(image, options.get("concat_mask"))


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
