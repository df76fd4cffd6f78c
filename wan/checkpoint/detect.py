"""Detection of the Wan model in a checkpoint by tensor names and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...shapes import HEAD_DIM, ExpertShape
from ..latents.space import WAN21, WAN22
from .files import CheckpointError, json_object
from .key_names import both_names

Shape = tuple[int, ...]
Family = Literal["t2v", "i2v", "control", "ti2v"]

IMAGE_LAYER = "condition_embedder.image_embedder.ff.net.0.proj.weight"
LATENT_CHANNELS = WAN21.channels
IMAGE_CONDITION_CHANNELS = 20  # 4 mask channels, 16 latent channels
REFERENCE_LAYER = "ref_conv.weight"
"""Convolution from a reference latent to tokens (Fun Control)."""
KNOWN_CHANNELS = {
    (16, 16): "T2V",
    (36, 16): "I2V or Fun InP",
    (52, 16): "Fun Control of Wan2.2 A14B",
    (48, 16): "Fun Control of Wan2.1",
    (48, 48): "Wan2.2 TI2V-5B",
    (100, 48): "Fun InP 5B",
    (148, 48): "Fun Control 5B",
}
"""Supported models by input and output channels."""
PAIR_CHANNELS = (16, 36, 52)
"""Input channels of A14B experts."""

# Parameters found only in Wan2.1 I2V: the embedder for CLIP image features, and its projections in
# each block.
IMAGE_BRANCH = re.compile(
    r"condition_embedder\.image_embedder\.|blocks\.\d+\.attn2\.(add_[kv]_proj|norm_added_k)\."
)

# Key prefixes of model variants, under native and diffusers' names. A plain expert has none. The
# first match wins, so "audio_proj.audio_proj_glob" has to precede "audio_proj.".
OTHER_MODELS = (
    (("vace_blocks.", "vace_patch_embedding."), "a VACE model"),
    (("face_adapter.", "motion_encoder.", "pose_patch_embedding."), "an Animate model"),
    (
        ("casual_audio_encoder.", "audio_injector.", "trainable_cond_mask."),
        "a speech-to-video model",
    ),
    (("audio_proj.audio_proj_glob",), "a HuMo model"),
    (("audio_proj.",), "an InfiniteTalk or MultiTalk model"),
    (("patch_embedding_mask.",), "a SCAIL-2 model"),
    (("patch_embedding_pose.",), "a SCAIL model"),
    (("patch_embedding_global.",), "a WanDancer model"),
    (("control_adapter.",), "a camera control model"),
    (
        ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
        "a first and last frame model of Wan2.1",
    ),
    (("lora_unet_", "lora_transformer_"), "a LoRA"),
)

LORA = re.compile(r".*[._](?:lora|lokr|hada|dora)_")
"""Start of a LoRA key, with any prefix."""

# Variants by input channels, where no tensor name identifies them.
OTHER_CHANNELS = {20: "is a SCAIL model: ", 32: "is a camera control model of Wan2.1: "}

TYPE_FIELD = "config"
"""Metadata field with a JSON config. ComfyUI merges its "transformer" entry over the detected
config."""
KNOWN_TYPES = ("t2v", "i2v", "ti2v")
DIFFUSERS_CLASS = "WanTransformer3DModel"
ORIGINAL_CLASS = "WanModel"
"""Supported classes in a folder's config.json: diffusers' class, and the one in folders published
by Wan-AI."""
ONLY_THESE = "only the T2V, I2V and Fun models of Wan2.1 and Wan2.2, and TI2V-5B can run"


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """Sizes of a Wan transformer, under the names in diffusers' WanTransformer3DModel."""

    num_attention_heads: int
    num_layers: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    patch_size: tuple[int, int, int]
    image_dim: int | None = None
    """Width of the image embeddings for the image branch, or None without a branch."""
    reference_channels: int | None = None
    """Input channels of `ref_conv` (Fun Control), or None without it. diffusers' model has no such
    layer."""

    @property
    def family(self) -> Family:
        """Family by channels: 48 out (5B) is "ti2v".

        16 in is "t2v", 36 (image condition) "i2v", others "control".
        """
        if self.out_channels == WAN22.channels:
            return "ti2v"
        if self.in_channels == LATENT_CHANNELS:
            return "t2v"
        if self.in_channels == LATENT_CHANNELS + IMAGE_CONDITION_CHANNELS:
            return "i2v"
        return "control"

    @property
    def width(self) -> int:
        """Width of the model."""
        return self.num_attention_heads * HEAD_DIM

    @property
    def shape(self) -> ExpertShape:
        """Sizes for the planner and measurements."""
        return ExpertShape(
            width=self.width,
            ffn_width=self.ffn_dim,
            blocks=self.num_layers,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            image_width=self.image_dim,
        )

    def model_arguments(self) -> dict[str, Any]:
        """Return arguments for WanTransformer3DModel.

        Arguments left out have the same default in all Wan models.
        """
        arguments = {**vars(self), "attention_head_dim": HEAD_DIM, "added_kv_proj_dim": None}
        del arguments["reference_channels"]
        if self.image_dim is not None:
            arguments["added_kv_proj_dim"] = self.width
        return arguments


def refuse_other_models(path: Path, keys: Iterable[str]) -> None:
    """Refuse a checkpoint variant that is more than a plain expert, by its keys.

    Raises:
        CheckpointError: names the variant and its first tensor.
    """
    keys = list(keys)
    for starts, model in OTHER_MODELS:
        found = [key for key in keys if key.startswith(starts)]
        if found:
            raise CheckpointError(path, f"is {model}: it holds {found[0]}; {ONLY_THESE}")
    factors = [key for key in keys if LORA.match(key)]
    if factors:
        raise CheckpointError(
            path, f"is a LoRA: it holds {factors[0]}; choose it in Wan LoRA (pair)"
        )


def refuse_other_types(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file whose metadata declare a variant with the same tensors as a plain model.

    Wan-Animate-2 has the same tensors as Wan2.1 I2V. FlowRVS and causal models have the same as
    T2V. A file without the field passes. An unreadable field is refused because ComfyUI does not
    load such a file either.

    Raises:
        CheckpointError: names the variant or the fault.
    """
    if TYPE_FIELD not in metadata:
        return
    found = f"has a {TYPE_FIELD} in its header that "
    remedy = ": download it again"
    declared = json_object(path, metadata[TYPE_FIELD], found, remedy=remedy).get("transformer", {})
    if not isinstance(declared, dict):
        raise CheckpointError(path, f"{found}is not a JSON object{remedy}")
    for name, known in (("model_type", KNOWN_TYPES), ("image_model", ("wan2.1",))):
        value = declared.get(name)
        if value is not None and value not in known:
            raise CheckpointError(
                path, f"is another model: its header says that {name} is {value!r}; {ONLY_THESE}"
            )
    if declared.get("causal_ar"):
        raise CheckpointError(
            path,
            "is a causal model, which makes frames one after the other (causal_ar in its header); "
            f"{ONLY_THESE}",
        )


def refuse_other_classes(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose config.json names an unsupported class or model type.

    A config without them passes.

    Raises:
        CheckpointError: names the class or the type.
    """
    named = config.get("_class_name", DIFFUSERS_CLASS)
    if named not in (DIFFUSERS_CLASS, ORIGINAL_CLASS):
        raise CheckpointError(
            path, f"is a {named}, not a {DIFFUSERS_CLASS} or {ORIGINAL_CLASS}; {ONLY_THESE}"
        )
    kind = config.get("model_type")
    # Only the original class has a model type; diffusers ignores this key.
    if named == ORIGINAL_CLASS and kind is not None and kind not in KNOWN_TYPES:
        raise CheckpointError(
            path, f"is another model: its config.json has the model_type {kind!r}; {ONLY_THESE}"
        )


def config_from_shapes(path: Path, shapes: Mapping[str, Shape]) -> WanConfig:
    """Derive the config from tensor shapes by parameter name.

    Raises:
        CheckpointError: a tensor that determines a size is missing, or the sizes belong to another
            model.
    """

    def shape(name: str, dimensions: int) -> Shape:
        if name not in shapes:
            raise CheckpointError(path, f"{both_names(name)} is missing")
        if len(shapes[name]) != dimensions or 0 in shapes[name]:
            raise CheckpointError(
                path, f"{name} is {list(shapes[name])}; {dimensions} sizes above 0 are expected"
            )
        return shapes[name]

    # Count the blocks instead of taking the highest index, so that a gap is reported as a missing
    # tensor.
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    width, in_channels, *patch = shape("patch_embedding.weight", 5)
    config = WanConfig(
        # No tensor shows the head size. Every Wan model has 128.
        num_attention_heads=width // HEAD_DIM,
        num_layers=len(blocks),
        ffn_dim=shape("blocks.0.ffn.net.0.proj.weight", 2)[0],
        in_channels=in_channels,
        # The rows are output channels x values in a patch.
        out_channels=shape("proj_out.weight", 2)[0] // math.prod(patch),
        text_dim=shape("condition_embedder.text_embedder.linear_1.weight", 2)[1],
        freq_dim=shape("condition_embedder.time_embedder.linear_1.weight", 2)[1],
        patch_size=(patch[0], patch[1], patch[2]),
        # By any tensor in the branch, so a missing first layer is reported.
        image_dim=shape(IMAGE_LAYER, 2)[1] if any(map(IMAGE_BRANCH.match, shapes)) else None,
        reference_channels=shape(REFERENCE_LAYER, 4)[1] if REFERENCE_LAYER in shapes else None,
    )
    _check_family(path, config, width)
    return config


def _check_family(path: Path, config: WanConfig, width: int) -> None:
    channels = (config.in_channels, config.out_channels)
    if channels not in KNOWN_CHANNELS:
        named = OTHER_CHANNELS.get(channels[0], "")
        known = (f"{given} to {made} is {kind}" for (given, made), kind in KNOWN_CHANNELS.items())
        raise CheckpointError(
            path,
            f"{named}patch_embedding.weight takes {channels[0]} channels and proj_out.weight gives "
            f"{channels[1]}; {', '.join(known)}",
        )
    if config.image_dim is not None and channels not in ((36, 16), (48, 16)):
        reason = f"has an image branch, but takes {channels[0]} channels"
        expected = "with one, 36 (I2V) or 48 (Fun Control) are expected"
        raise CheckpointError(path, f"{reason}; {expected}")
    if config.reference_channels not in (None, config.out_channels):
        raise CheckpointError(
            path,
            f"{REFERENCE_LAYER} takes {config.reference_channels} channels, and the latents of "
            f"this model have {config.out_channels}",
        )
    if width == 0 or width % HEAD_DIM:
        raise CheckpointError(
            path, f"patch_embedding.weight is {width} wide, which is not a multiple of {HEAD_DIM}"
        )
