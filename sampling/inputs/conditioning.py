"""Native ComfyUI values: the accepted keys of a CONDITIONING, and CONDITIONING and LATENT as tensors of a request.

An unknown key with a tensor is refused, because a Wan model of a later ComfyUI may use it: without it, an edit or a
reference would give another video. The lists cover ComfyUI 0.18.1 and later Wan nodes.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from ...schema import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ...wan import SPACES, WAN21, denormalise, normalise, space_of
from ..errors import ConditioningError
from ..schedules import seeded_noise
from .extra_tokens import CONTEXT_KEY, REFERENCE_KEY, ExtraTokens, native_tokens, same_tokens
from .mask import latent_mask

logger = logging.getLogger("wanstream.sampling")

IMAGE_EMBEDDING_KEY = "clip_vision_output"
"""Key of the start image's CLIP embedding, as ComfyUI's image-to-video nodes set it."""

IMAGE_KEY, MASK_KEY, MASK_INDEX_KEY = "concat_latent_image", "concat_mask", "concat_mask_index"
"""Keys of the channels that are joined to the latents, of their mask, and of its place among them (Fun Control)."""

READ = frozenset({IMAGE_KEY, MASK_KEY, MASK_INDEX_KEY, IMAGE_EMBEDDING_KEY, REFERENCE_KEY, CONTEXT_KEY})
"""Keys that are converted into a request."""

RANGES = (("start_percent", "end_percent"), ("clip_start_percent", "clip_end_percent"))
"""Keys that limit an entry to some steps."""

# Keys that native sampling uses for some Wan model and that a request does not support. Some are used with other
# weights only (VACE, Animate); a user who connects them wants their effect, so they are refused too.
REFUSED: Mapping[str, str] = {
    "control": "a ControlNet",
    "hooks": "hooks",
    "model_conds": "inputs of another model",
    "noise_concat": "channels of another model",
    "gligen": "boxes of GLIGEN",
    "area": "an area",
    "mask": "a conditioning mask",
    "timestep_start": "a range of noise levels",
    "timestep_end": "a range of noise levels",
    "denoise_mask": "a noise mask of its own",
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
    "clip_vision_output_pose": "a CLIP vision output of a pose (Animate-2)",
    "cross_attn_pose": "the text of a pose (Animate-2)",
    "driving_mask_28ch": "a driving mask (SCAIL-2)",
    "ref_mask_28ch": "a reference mask (SCAIL-2)",
    "clip_vision_output_ref": "a CLIP vision output of a reference (WanDancer)",
}

# Tensors that come with a text, whatever the model; no Wan model of ComfyUI reads them.
TEXT_TENSORS: Mapping[str, str] = {
    "pooled_output": "one vector of a text; UMT5 makes none",
    "pooled_output_controlnet": "the same, for a ControlNet, which is refused",
    "cross_attn": "overwritten by the text of the entry",
    "cross_attn_controlnet": "a text for a ControlNet, which is refused",
    "attention_mask": "marks the padding of a text; Wan attends to padding",
    "attention_mask_img_shape": "the same, for an image in a text",
    "attention_mask_mt5xl": "the same, of Hunyuan-DiT",
    "conditioning_mt5xl": "a second text of Hunyuan-DiT",
    "conditioning_byt5small": "glyphs of HunyuanImage",
    "conditioning_llama3": "a second text of HiDream",
    "conditioning_lyrics": "lyrics of ACE-Step",
    "t5xxl_ids": "tokens of Cosmos-Predict2 and Anima",
    "t5xxl_weights": "weights of those tokens",
}

# Tensors that a user connects and that native sampling ignores for the supported weights; they are logged.
IGNORED: Mapping[str, str] = {
    "reference_latents_text_embeds": "read by Z-Image alone",
    "clip_vision_outputs": "read by Z-Image alone",
    "unclip_conditioning": "read by unCLIP models and Z-Image",
    "concat_image": "read by the Stable Diffusion upscaler alone",
    "ref_latent": "read by HunyuanVideo alone",
    "time_dim_replace": "read by Kandinsky 5 alone",
    "keyframe_idxs": "read by LTX-Video alone",
    "guide_attention_entries": "read by LTX-Video alone",
    "ref_audio": "read by LTX-Video alone",
    "reference_audio_timbre_latents": "read by ACE-Step alone",
    "audio_codes": "read by ACE-Step alone",
    "condition": "read by SeedVR2 alone",
    "embeds": "read by Trellis 2 alone",
    "generated_keyframes": "read by LTX-Video alone",
    "lq_latent": "read by PiD alone",
    "minimax_keyframes": "read by MiniMax-H3 alone",
    "minimax_refs": "read by MiniMax-H3 alone",
    "minimax_token_tags": "read by MiniMax-H3 alone",
    "text_input_ids": "read by HiDream-O1 alone",
}

MAX_SEARCHED = 100_000
"""Most containers and objects of one value that are searched for a tensor, which takes some tenths of a second.

A larger value counts as one with a tensor: it is a model or the state of a program. To overlook a tensor would change
the video silently, whereas a refusal names the key. For comparison, a logger with all loggers that it refers to has
fewer than 5,000 objects.
"""


# Modules, classes and functions are code: the objects that they refer to are not part of the value.
_PLAIN = (bool, int, float, complex, str, bytes, type, ModuleType, FunctionType, BuiltinFunctionType)


def check_keys(side: str, options: Mapping[str, Any]) -> None:
    """Check the options of an entry of `side`, and log those that native sampling ignores too.

    An unknown key without a tensor is accepted: it is a number, a flag or a note, which has no effect alone.

    Raises:
        ConditioningError: a key is not supported; the message names it.
    """
    for key, value in options.items():
        if key in READ or key in TEXT_TENSORS or _is_nothing(value):
            continue
        if key in REFUSED:
            raise ConditioningError(
                f"{side} carries {REFUSED[key]} ({key}), which the models that run here cannot use: remove that node"
            )
        if key in IGNORED:
            logger.info("%s carries %s, which is ignored, as native sampling does: %s", side, key, IGNORED[key])
        elif holds_tensor(value):
            known = ", ".join(sorted([*READ, *TEXT_TENSORS, *IGNORED]))
            raise ConditioningError(
                f"{side} carries a tensor, or too many objects to search, under '{key}', which is not known here and "
                "may change the video: remove the node that writes it. Known tensors: "
                f"{known}"
            )
    _check_ranges(side, options)
    if options.get("strength") == 0:  # any other strength cancels out, as there is only one entry
        raise ConditioningError(f"{side} has strength 0, for which native sampling skips it: give another strength")


def _check_ranges(side: str, options: Mapping[str, Any]) -> None:
    for start, end in RANGES:
        begins, ends = options.get(start), options.get(end)  # None is no limit, as where the key is missing
        if (begins is not None and begins > 0.0) or (ends is not None and ends < 1.0):
            raise ConditioningError(
                f"{side} is limited to a range of steps ({start}, {end}), which is not supported: remove the time range"
            )


def _is_nothing(value: object) -> bool:
    """Return True for None and empty containers, which nodes write to remove a value."""
    return value is None or (isinstance(value, list | tuple | dict | set | str) and not value)


def holds_tensor(value: object) -> bool:
    """Return True if a value is, or contains at any depth, a tensor or an array with at least one dimension.

    Containers and attributes are searched. A value of more than `MAX_SEARCHED` objects counts as one with a tensor.
    """
    waiting, seen = deque([value]), dict[int, object]()  # the values stay alive, so that no id is used twice
    while waiting:
        found = waiting.popleft()
        if found is None or isinstance(found, _PLAIN) or id(found) in seen:
            continue
        if hasattr(found, "shape") and hasattr(found, "dtype"):
            if found.shape == ():
                continue
            return True
        if len(seen) == MAX_SEARCHED:
            return True
        seen[id(found)] = found
        if isinstance(found, Mapping):
            waiting.extend(found.values())
        elif isinstance(found, list | tuple | set | frozenset | deque):
            waiting.extend(found)
        else:
            waiting.extend(getattr(found, "__dict__", {}).values())
    return False


LEFTOVER_KEY = "wanstream_leftover"
"""Key of a LATENT for {"sigma": float, "fingerprint": int}, which our samplers write."""

PROBES = 1024
"""Approximate number of values in a fingerprint."""


def leftover_mark(samples: torch.Tensor, sigma: float) -> dict[str, Any]:
    """Return the value of `LEFTOVER_KEY` for raw `samples` at noise level `sigma`; 0 is a finished video."""
    return {"sigma": sigma, "fingerprint": _fingerprint(samples)}


def leftover_sigma(latent: Mapping[str, Any]) -> float | None:
    """Return the noise level of a LATENT from one of our runs; None for others, and if the samples have changed."""
    mark = latent.get(LEFTOVER_KEY)
    if mark is None or mark["fingerprint"] != _fingerprint(latent["samples"]):
        return None
    return float(mark["sigma"])


def _fingerprint(samples: torch.Tensor) -> int:
    """Return a checksum over the shape and evenly spread values, which any sampling, scaling or cutting changes."""
    spread = samples.flatten()[:: max(1, samples.numel() // PROBES)]
    return zlib.crc32(spread.float().cpu().numpy().tobytes(), zlib.crc32(repr(tuple(samples.shape)).encode()))


MASK_CHANNELS = 4
SIZE_HINT = "downscale_ratio_spacial"
"""Key of an empty LATENT for the pixels per latent pixel on each side; the spelling is ComfyUI's."""

Conditioning = Sequence[Sequence[Any]]
Latent = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class NativeInputs:
    """Tensors of a `DenoiseRequest`, converted from native values."""

    positive: torch.Tensor
    negative: torch.Tensor | None
    image_condition: torch.Tensor | None
    image_embedding: torch.Tensor | None
    """[1 or B, N, width]: CLIP's hidden states before its last layer."""
    tokens: ExtraTokens
    negative_tokens: ExtraTokens | None
    """None: those of the positive."""
    latent: torch.Tensor | None
    """Normalised; None for an empty latent, whose zeros do not mean a grey video."""
    mask: torch.Tensor | None
    """[1 or B, 1 or 16 (48), T, h, w] float32, 1 where to denoise; None: everywhere."""
    latent_sigma: float | None
    """Noise level of the latent if it comes from one of our runs."""
    shape: torch.Size
    batch_index: Sequence[int] | None

    def noise(self, seed: int | None) -> torch.Tensor:
        """Return the noise that ComfyUI draws for this latent and seed; zeros for None (no noise is added)."""
        if seed is None:
            return torch.zeros(self.shape)
        return seeded_noise(self.shape, seed, batch_index=self.batch_index)


def native_inputs(positive: Conditioning, negative: Conditioning | None, latent: Latent) -> NativeInputs:
    """Convert native values.

    Raises:
        ConditioningError: a value is not supported; the message has the side and the key.
    """
    samples = _samples(latent)
    noise_mask = latent.get("noise_mask")
    mask = None if noise_mask is None else latent_mask(noise_mask, samples.shape)
    text, image = _side("positive", positive, samples.shape, mask)
    embedding = _image_embedding(positive)
    tokens, negative_tokens = _tokens("positive", positive, samples.shape[0]), None
    negative_text = None
    if negative is not None:
        negative_tokens = _tokens("negative", negative, samples.shape[0])
        negative_text, negative_image = _side("negative", negative, samples.shape, mask)
        if not _same(image, negative_image) or not _same(embedding, _image_embedding(negative)):
            raise ConditioningError(
                "positive and negative carry different start images: connect both outputs of one image-to-video node"
            )
    return NativeInputs(
        positive=text,
        negative=negative_text,
        image_condition=image,
        image_embedding=None if embedding is None else _repeated(embedding, samples.shape[0]),
        tokens=tokens,
        negative_tokens=None if negative_tokens is None or same_tokens(tokens, negative_tokens) else negative_tokens,
        latent=normalise(samples) if torch.count_nonzero(samples) else None,
        mask=mask,
        latent_sigma=leftover_sigma(latent),
        shape=samples.shape,
        batch_index=latent.get("batch_index"),
    )


def native_latent(latents: torch.Tensor, like: Latent, *, sigma: float = 0.0) -> dict[str, Any]:
    """Return a LATENT with normalised `latents` as raw samples on the CPU, and the other keys of `like`.

    Args:
        sigma: noise level of the latents.
    """
    # The size hint applies to empty latents only; native samplers drop it too.
    kept = {key: value for key, value in like.items() if key != SIZE_HINT}
    # ComfyUI's samplers divide leftover noise by 1 - sigma, and the next sampler multiplies by it again.
    samples = denormalise(latents.float() / (1 - sigma)).cpu()
    return {**kept, "samples": samples, LEFTOVER_KEY: leftover_mark(samples, sigma)}


def image_condition(
    image: torch.Tensor, mask: torch.Tensor | None, *, mask_index: int = 0, latent_channels: int = WAN21.channels
) -> torch.Tensor:
    """Return the condition channels of an expert, [b, C, T, h, w], from native values.

    * One latent (I2V, Fun InP): 4 channels of the mask, then the image.
    * Two latents with a mask index (Fun Control 2.2): the control video, the mask, the start image.
    * Two latents without one (Fun Control 2.1): both, and no mask.

    The expert's mask is the inverse of ComfyUI's: 1 where the image is known. Latents are normalised one by one.

    Args:
        image: raw latent [b, 16 or 32, T, h, w]; for 5B with 48 or 96 channels.
        mask: [b or 1, any, T or less, h, w], 1 where the model generates; missing frames count as 1, as do all frames
            without a mask.
        mask_index: number of channels before the mask.
        latent_channels: channels of one latent.

    Raises:
        ConditioningError: the shapes do not fit.
    """
    if image.ndim != 5 or image.shape[1] not in (latent_channels, 2 * latent_channels):
        raise ConditioningError(
            f"{IMAGE_KEY} is {list(image.shape)}, this model reads [b, {latent_channels}, T, h, w], and Fun Control "
            f"{2 * latent_channels} channels: remove the node for another model that made it"
        )
    latents = image.split(latent_channels, dim=1)
    if mask_index not in (0, latent_channels * (len(latents) - 1)):
        raise ConditioningError(
            f"{MASK_INDEX_KEY} is {mask_index} for {image.shape[1]} channels of {IMAGE_KEY}, and Fun Control has the "
            f"mask between two latents of {latent_channels} channels: remove the node that made it"
        )
    control, start = map(normalise, latents[:-1]), normalise(latents[-1])
    if len(latents) > 1 and mask_index == 0:
        return torch.cat([*control, start], dim=1)
    known = _known_mask(image, mask)
    batch = max(len(known), len(image))
    return torch.cat([each.expand(batch, -1, -1, -1, -1) for each in (*control, known, start)], dim=1)


def _known_mask(image: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the expert's mask [b, 4, T, h, w] of `image`."""
    frames = image.shape[2]
    if mask is None:
        return image.new_zeros(1, MASK_CHANNELS, *image.shape[2:])
    if mask.ndim != 5 or mask.shape[3:] != image.shape[3:] or mask.shape[2] > frames:
        raise ConditioningError(
            f"{MASK_KEY} is {list(mask.shape)}, its image {list(image.shape)}: T, h and w must match"
        )
    free = mask.to(image.device)
    known = 1.0 - (free if free.shape[1] == MASK_CHANNELS else free.mean(dim=1, keepdim=True))
    known = F.pad(known, (0, 0, 0, 0, 0, frames - mask.shape[2]))
    return known.expand(-1, MASK_CHANNELS, -1, -1, -1)


def _samples(latent: Latent) -> torch.Tensor:
    """Return the samples [B, 16 or 48, T, h, w] float32; empty ones of other models are converted by their size."""
    samples: torch.Tensor = latent["samples"]
    if not isinstance(samples, torch.Tensor):
        raise ConditioningError(
            f"the latent is a {type(samples).__name__} of several parts, Wan generates only video: use an empty video "
            "latent"
        )
    if samples.ndim == 4 and not torch.count_nonzero(samples):
        # An empty latent of a model that may have other than 8 pixels per latent pixel.
        ratio = (latent.get(SIZE_HINT) or PIXELS_PER_LATENT) / PIXELS_PER_LATENT
        size = (round(side * ratio) for side in samples.shape[-2:])
        samples = samples.new_zeros(len(samples), WAN21.channels, 1, *size)
    elif samples.ndim == 4:
        samples = samples.unsqueeze(2)
    if samples.ndim != 5 or samples.shape[1] not in [space.channels for space in SPACES]:
        raise ConditioningError(
            f"the latent is {list(samples.shape)}, Wan needs [B, {WAN21.channels}, T, h, w], and TI2V-5B 48 channels: "
            "use an empty video latent"
        )
    return samples.float()


def _side(
    name: str, conditioning: Conditioning, shape: torch.Size, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the text and the image condition of one side, for a latent of `shape` under a noise mask."""
    text, options = single_entry(name, conditioning)
    image = options.get(IMAGE_KEY)
    if image is None:
        return _repeated(text, shape[0]), None
    _check_image_size(name, image, shape)
    # Without concat_mask, ComfyUI uses the noise mask as the mask of the image condition.
    condition = image_condition(
        image,
        options.get(MASK_KEY, mask),
        mask_index=options.get(MASK_INDEX_KEY, 0),
        latent_channels=shape[1],
    )
    return _repeated(text, shape[0]), condition


def _tokens(name: str, conditioning: Conditioning, batch: int) -> ExtraTokens:
    """Return the tokens of one side next to those of the video."""
    tokens = native_tokens(name, conditioning[0][1])
    reference = None if tokens.reference is None else _repeated(tokens.reference, batch)
    return replace(tokens, reference=reference, context=tuple(_repeated(latents, batch) for latents in tokens.context))


def _image_embedding(conditioning: Conditioning) -> torch.Tensor | None:
    """Return the hidden states before CLIP's last layer from ComfyUI's output object, if there is one."""
    output = conditioning[0][1].get(IMAGE_EMBEDDING_KEY)
    if output is None:
        return None
    states = getattr(output, "penultimate_hidden_states", None)
    if not isinstance(states, torch.Tensor):
        raise ConditioningError(
            f"{IMAGE_EMBEDDING_KEY} is a {type(output).__name__} without penultimate_hidden_states: "
            "connect the output of CLIP Vision Encode"
        )
    return states


def single_entry(name: str, conditioning: Conditioning) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the text and the options of the only entry of side `name`.

    Raises:
        ConditioningError: there are several entries, or no text; and as `check_keys`.
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


def _repeated(values: torch.Tensor, batch: int) -> torch.Tensor:
    """Return values for `batch` samples: several are repeated in turn and cut, as in ComfyUI; one stays one."""
    if values.ndim not in {3, 5} or len(values) in (0, 1, batch):
        return values
    return values.repeat(-(-batch // len(values)), *[1] * (values.ndim - 1))[:batch]


def _check_image_size(name: str, image: torch.Tensor, shape: torch.Size) -> None:
    """Raise ConditioningError if the image and the latent differ in size."""
    # ComfyUI would stretch the image and its mask, which hides a wrong connection.
    if image.ndim == 5 and image.shape[2:] != shape[2:]:
        raise ConditioningError(
            f"{name} carries a start image for {video_text(image.shape)}, the latent is {video_text(shape)}: connect "
            "the latent of the image-to-video node, or give both nodes the same width, height and frames"
        )


def video_text(shape: torch.Size) -> str:
    """Describe the size of the video of a latent of `shape` [B, 16 or 48, T, h, w]."""
    channels, frames, height, width = shape[1:]
    pixels = space_of(channels).pixels
    return f"{width * pixels} x {height * pixels} pixels and {(frames - 1) * FRAMES_PER_LATENT + 1} frames"


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
