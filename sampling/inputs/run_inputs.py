"""Run inputs: tensors checked on construction.

Every error has the numbers and a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...wan.latents import SPACES, WAN22, space_of
from ..steps.errors import RequestError
from ..steps.schedules import PURE_NOISE
from .extra_tokens import NO_TOKENS, ExtraTokens, check_batch, check_tokens

IMAGE_CONDITION_CHANNELS = (20, 32, 36, 52, 100)
"""Channels of an image condition: I2V and Fun InP, Fun Control 2.1 and 2.2, and Fun InP and Fun
Control 5B."""
TEXT_WIDTH = 4096
Texts: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""[1 or B, L, 4096] for B samples, or a sequence with one [1, L, 4096] per sample, in any
lengths."""

SAME_SIGMA = 1e-5
"""Largest difference between equal sigmas computed by two programs."""

CONDITIONS = {
    0: "text-to-video",
    20: "image-to-video",
    32: "Wan2.1 Fun Control",
    36: "Wan2.2 Fun Control",
    52: "Fun InP 5B",
    100: "Fun Control 5B",
}
"""Models by condition channels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunInputs:
    """Tensors for a run with B samples.

    All samples may share texts, image condition, mask and image embedding.

    Raises:
        RequestError: a tensor has another shape or type.
    """

    noise: torch.Tensor
    """[B, 16, T, h, w] float32, standard normal. TI2V-5B has 48 channels, here and below. Odd sides
    are padded to whole patches in each forward pass, as in ComfyUI."""
    positive: Texts
    """[1 or B, L, 4096] UMT5 embedding, any L >= 1, or one [1, L, 4096] per sample, in any
    lengths."""
    negative: Texts | None = None
    """Like `positive`, in any lengths. Required if a guidance is not 1, or for NAG."""
    image_condition: torch.Tensor | None = None
    """[1 or B, C, T, h, w], joined to the latents. C = 20 for I2V and Fun InP: 4 mask channels (1 =
    known), then the image latent. 36 for Fun Control 2.2: control video, mask, start image. 32 for
    2.1: without the mask. Fun 5B: 52 and 100."""
    image_embedding: torch.Tensor | None = None
    """[1 or B, N, 1280] CLIP embedding of the start image, for a model with an image branch (Wan2.1
    I2V)."""
    latent: torch.Tensor | None = None
    """[B, 16, T, h, w] to start from, mixed with the noise at the first sigma. None: start from
    noise alone."""
    mask: torch.Tensor | None = None
    """[1 or B, 1 or 16, T, h, w], 1 where to denoise, 0 where `latent` is kept (without a latent:
    zeros). Its mean over a frame is the frame's timestep scale for TI2V-5B."""
    add_noise: bool = True
    """False: `latent` already has noise, and `noise` gives the shape only. The run starts from (1 -
    sigma) * latent, as ComfyUI's samplers do with leftover noise from another sampler."""
    latent_sigma: float | None = None
    """Noise level at which another run left `latent`, if known. A run that starts at another level
    is refused."""
    tokens: ExtraTokens = NO_TOKENS
    """Tokens next to the video: a reference image, context videos and images."""
    negative_tokens: ExtraTokens | None = None
    """Tokens for the negative lanes. None: `tokens`."""

    def __post_init__(self) -> None:
        _check_noise(self.noise)
        _check_texts("positive", self.positive, self.batch)
        if self.negative is not None:
            _check_texts("negative", self.negative, self.batch)
        shared = (1, self.batch)
        own = (self.channels,)
        self._check_latent("image_condition", IMAGE_CONDITION_CHANNELS, shared)
        self._check_latent("latent", own, (self.batch,))
        self._check_latent("mask", (1, *own), shared)
        if self.image_embedding is not None:
            content = "the hidden states of CLIP before its last layer, "
            check_batch(
                "image_embedding", self.image_embedding, self.batch, "tokens, width", content
            )
        for name, tokens in zip(("positive", "negative"), self.tokens_of_sides, strict=True):
            check_tokens(name, tokens, batch=self.batch)

    def _check_latent(self, name: str, channels: Sequence[int], batches: Sequence[int]) -> None:
        """Raise RequestError unless the tensor `name`, if any, has the size of the noise."""
        value: torch.Tensor | None = getattr(self, name)
        if value is None:
            return
        size = self.noise.shape[2:]
        fits = value.ndim == 5 and value.shape[0] in batches and value.shape[1] in channels
        if not fits or value.shape[2:] != size:
            choices = [" or ".join(map(str, sorted(set(sizes)))) for sizes in (batches, channels)]
            wanted = ", ".join(map(str, [*choices, *size]))
            raise RequestError(
                f"{name} is {list(value.shape)}: give [{wanted}], to match the noise"
            )
        if not value.is_floating_point():
            raise RequestError(f"{name} is {value.dtype}: give floating point values")

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.noise.shape[0]

    @property
    def channels(self) -> int:
        """Number of latent channels: 16, or 48 for TI2V-5B."""
        return self.noise.shape[1]

    @property
    def condition_channels(self) -> int:
        """Number of channels joined to the latents."""
        return 0 if self.image_condition is None else self.image_condition.shape[1]

    @property
    def control_channels(self) -> int:
        """Number of control video channels, the first ones in the condition. 0 without a video."""
        # Only Fun Control has two latents in the condition.
        if self.condition_channels < 2 * self.channels:
            return 0
        return self.channels

    @property
    def timestep_scales(self) -> tuple[tuple[float, ...] | None, ...]:
        """Timestep scale by latent frame, for each sample (TI2V-5B).

        None for a sample whose scales are all 1.

        It is the mask's mean over the frame, in float32 as in ComfyUI.
        """
        if self.mask is None or self.channels != WAN22.channels:
            return (None,) * self.batch
        mask = self.mask.expand(self.batch, *self.mask.shape[1:])
        scales = mask.float().mean(dim=(1, 3, 4)).tolist()
        return tuple(None if set(of_sample) == {1.0} else tuple(of_sample) for of_sample in scales)

    @property
    def tokens_of_sides(self) -> tuple[ExtraTokens, ExtraTokens]:
        """Tokens next to the video, for the positive and the negative lanes."""
        if self.negative_tokens is None:
            return self.tokens, self.tokens
        return self.tokens, self.negative_tokens

    @property
    def tokens_words(self) -> str:
        """Description of the tokens next to the video, equal in requests that can be merged."""
        return " and ".join(tokens.words for tokens in self.tokens_of_sides)

    def check_start(self, sigma: float, *, step: int) -> None:
        """Raise RequestError if the latent cannot continue at `sigma`, where `step` starts."""
        left = self.latent_sigma
        if self.add_noise:
            # None is an unknown level, and 0 a finished video: both may get new noise.
            if left:
                raise RequestError(
                    f"the latent still carries noise (left at sigma {left:.5f}), and add_noise "
                    "would add more to it: turn add_noise off here, or leftover_noise off in the "
                    "sampler before"
                )
            return
        if self.latent is None:
            raise RequestError(
                "add_noise is off and the latent is empty: turn add_noise on, or connect a latent"
            )
        if sigma > PURE_NOISE:
            raise RequestError(
                f"add_noise is off and step {step} starts at sigma {sigma:g}, which is pure noise: "
                "set start_step to the end_step of the sampler before, or turn add_noise on"
            )
        if left is None or abs(left - sigma) <= SAME_SIGMA:
            return
        remedy = "turn leftover_noise on in the sampler before, or add_noise on here"
        if left:
            remedy = (
                "give both samplers the same steps, schedule and flow_shift (or sigmas), and this "
                "one as start_step the end_step of the sampler before"
            )
        raise RequestError(
            f"the latent was left at sigma {left:.5f}, and step {step} starts at sigma "
            f"{sigma:.5f}: {remedy}"
        )

    def check_channels(self, in_channels: int, latent: int) -> None:
        """Raise RequestError unless the inputs have the model's channels.

        Args:
            in_channels: input channels of the model: latent and condition.
            latent: latent channels of the model, 16 or 48.
        """
        given = self.channels + self.condition_channels
        if (given, self.channels) == (in_channels, latent):
            return
        if self.channels != latent:
            raise RequestError(
                f"the latent has {self.channels} channels, as {space_of(self.channels).models} "
                f"have, and the model takes those of {space_of(latent).models}, with {latent}: "
                "connect a latent that was made for this model, or open another one"
            )
        problem = _condition_problem(self.condition_channels, in_channels - latent, latent)
        raise RequestError(f"{problem} ({in_channels} channels expected, {given} given)")


def _check_noise(noise: torch.Tensor) -> None:
    channels = [space.channels for space in SPACES]
    if noise.ndim != 5 or noise.shape[1] not in channels or 0 in noise.shape:
        raise RequestError(
            f"noise is {list(noise.shape)}: give [B, {' or '.join(map(str, channels))}, T, h, w]"
        )
    if noise.dtype != torch.float32:
        raise RequestError(f"noise is {noise.dtype}: give float32")


def _check_texts(name: str, texts: Texts, batch: int) -> None:
    if isinstance(texts, torch.Tensor):
        _check_text(name, texts, batch)
        return
    if len(texts) != batch:
        raise RequestError(f"{name} has {len(texts)} texts for {batch} samples: give one for each")
    for number, text in enumerate(texts, 1):
        _check_text(f"{name} {number} of {batch}", text, 1)


def _check_text(name: str, text: torch.Tensor, batch: int) -> None:
    shape = list(text.shape)
    if text.ndim != 3 or shape[2] != TEXT_WIDTH:
        raise RequestError(
            f"{name} is {shape}: give a UMT5 embedding [1 or {batch}, tokens, {TEXT_WIDTH}]"
        )
    if shape[1] == 0:
        raise RequestError(f"{name} is {shape}: it has no tokens; encode an empty prompt instead")
    if shape[0] not in (1, batch):
        raise RequestError(f"{name} has {shape[0]} texts for {batch} samples: give 1 or {batch}")
    if not text.is_floating_point():
        raise RequestError(
            f"{name} is {text.dtype}: give floating point embeddings, not token numbers"
        )


def _condition_problem(given: int, expected: int, latent: int) -> str:
    """Describe a condition with `given` channels for a model with `expected`, with a remedy."""
    if expected == 0 and latent == WAN22.channels and given in (20, 52):
        return (
            "Wan2.2 5B takes a start image as the first frame of the latent, and this request has "
            "one as a condition (image_condition), as A14B takes it: choose the VAE of Wan2.2 5B "
            "in WanStream Image to Video"
        )
    model = CONDITIONS[expected]
    if given in (32, 36, 100):
        return (
            f"these are {model} experts, and the conditioning of {CONDITIONS[given]} is connected "
            f"(concat_latent_image of two latents{', with concat_mask_index' * (given != 32)}): "
            "remove its node, or choose the experts that it was made for"
        )
    if expected in (32, 36, 100):
        found = "no control video" if given == 0 else "only a start image"
        return (
            f"these are {model} experts, and {found} is connected: connect positive and negative "
            "through WanStream Fun Control"
        )
    if expected == 52:
        return (
            f"these are {model} experts, and no start image of theirs is connected "
            "(concat_latent_image): connect positive and negative through ComfyUI's "
            "WanFunInpaintToVideo"
        )
    if given == 0:
        return (
            f"these are {model} experts, and no start image is connected (image_condition): "
            "connect positive and negative through WanStream Image to Video, or choose "
            "text-to-video experts, whose files have t2v in their names"
        )
    return (
        f"these are {model} experts, and a start image is connected (image_condition): connect "
        "positive and negative straight from the text encoder, or choose image-to-video experts, "
        "whose files have i2v in their names"
    )
