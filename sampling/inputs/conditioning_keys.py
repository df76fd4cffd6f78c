"""CONDITIONING keys: read, ignored and refused ones.

An unknown key with a tensor is refused, because a Wan model in a later ComfyUI may use it. Without
it, an edit or a reference would give another video. The lists cover ComfyUI 0.18.1 and later Wan
nodes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

from ..steps.errors import ConditioningError
from .extra_tokens import CONTEXT_KEY, REFERENCE_KEY

logger = logging.getLogger("wanstream.sampling")

Conditioning: TypeAlias = "Sequence[Sequence[Any]]"
"""Native CONDITIONING: entries with a text and options."""

IMAGE_EMBEDDING_KEY = "clip_vision_output"
"""Key of the start image's CLIP embedding, as ComfyUI's image-to-video nodes set it."""

IMAGE_KEY, MASK_KEY, MASK_INDEX_KEY = "concat_latent_image", "concat_mask", "concat_mask_index"
"""Keys for the channels joined to the latents, their mask, and the mask's place among them (Fun
Control)."""

READ = frozenset(
    {IMAGE_KEY, MASK_KEY, MASK_INDEX_KEY, IMAGE_EMBEDDING_KEY, REFERENCE_KEY, CONTEXT_KEY}
)
"""Keys converted into a request."""

RANGES = (("start_percent", "end_percent"), ("clip_start_percent", "clip_end_percent"))
"""Keys that limit an entry to some steps."""

# Keys that native sampling uses for some Wan model and that a request does not support. Some are
# used only with other weights (VACE, Animate). A user who connects them wants their effect, so they
# are refused too.
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

# Tensors that come with a text, whatever the model. No Wan model in ComfyUI reads them.
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

# Tensors that a user connects and that native sampling ignores for the supported weights. They are
# logged.
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
"""Upper limit for containers and objects searched for a tensor in one value, which takes some
tenths of a second.

A larger value counts as one with a tensor: it is a model or a program's state. A missed tensor
would change the video silently, whereas a refusal names the key. For comparison, a logger with all
the loggers it refers to has fewer than 5,000 objects.
"""


# Modules, classes and functions are code. Objects that they refer to are not part of the value.
_CODE = type | ModuleType | FunctionType | BuiltinFunctionType
_PLAIN = bool | int | float | complex | str | bytes | _CODE


def check_keys(side: str, options: Mapping[str, Any]) -> None:
    """Check an entry's options on `side`, and log those that native sampling ignores too.

    An unknown key without a tensor is accepted: it is a number, a flag or a note, and has no effect
    alone.

    Raises:
        ConditioningError: a key is not supported. The message names it.
    """
    for key, value in options.items():
        if key in READ or key in TEXT_TENSORS or _is_nothing(value):
            continue
        if key in REFUSED:
            raise ConditioningError(
                f"{side} carries {REFUSED[key]} ({key}), which the models that run here cannot "
                "use: remove that node"
            )
        if key in IGNORED:
            text = "%s carries %s, which is ignored, as native sampling does: %s"
            logger.info(text, side, key, IGNORED[key])
        elif holds_tensor(value):
            known = ", ".join(sorted([*READ, *TEXT_TENSORS, *IGNORED]))
            raise ConditioningError(
                f"{side} carries a tensor, or too many objects to search, under '{key}', which is "
                "not known here and may change the video: remove the node that writes it. Known "
                f"tensors: {known}"
            )
    _check_ranges(side, options)
    if options.get("strength") == 0:  # any other strength cancels out, as there is only one entry
        raise ConditioningError(
            f"{side} has strength 0, for which native sampling skips it: give another strength"
        )


def _check_ranges(side: str, options: Mapping[str, Any]) -> None:
    for start, end in RANGES:
        # None is no limit, as where the key is missing.
        begins = options.get(start)
        ends = options.get(end)
        if (begins is not None and begins > 0.0) or (ends is not None and ends < 1.0):
            raise ConditioningError(
                f"{side} is limited to a range of steps ({start}, {end}), which is not supported: "
                "remove the time range"
            )


def _is_nothing(value: object) -> bool:
    """Return True for None and empty containers, which nodes write to remove a value."""
    return value is None or (isinstance(value, list | tuple | dict | set | str) and not value)


def holds_tensor(value: object) -> bool:
    """Return True if a value is or contains a tensor or an array with at least one dimension.

    Containers and attributes are searched at any depth. A value with more than `MAX_SEARCHED`
    objects counts as one with a tensor.
    """
    waiting = deque([value])
    # The values stay alive, so that no id is used twice.
    seen: dict[int, object] = {}
    while waiting:
        found = waiting.popleft()
        if found is None or isinstance(found, _PLAIN) or id(found) in seen:
            continue
        # By attributes: arrays from numpy and other libraries count too.
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
            # Objects with slots, and most built-in ones, have no `__dict__`.
            waiting.extend(getattr(found, "__dict__", {}).values())
    return False


def single_entry(name: str, conditioning: Conditioning) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the text and options in the only entry on side `name`.

    Raises:
        ConditioningError: there are several entries, or no text. Also as in `check_keys`.
    """
    if len(conditioning) != 1:
        raise ConditioningError(
            f"{name} has {len(conditioning)} entries, only one can be used: do not combine "
            "conditionings"
        )
    text, options = conditioning[0]
    if not isinstance(text, torch.Tensor):
        raise ConditioningError(
            f"{name} has no text, but a {type(text).__name__}: connect a text encoder"
        )
    check_keys(name, options)
    return text, options
