"""Detection of the Wan model in a checkpoint from the names and shapes of its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...schema import HEAD_DIM, ExpertShape
from ..latent_space import WAN21, WAN22
from .files import CheckpointError, json_object
from .key_names import both_names

Shape = tuple[int, ...]
Family = Literal["t2v", "i2v", "control", "ti2v"]

IMAGE_LAYER = "condition_embedder.image_embedder.ff.net.0.proj.weight"
LATENT_CHANNELS = WAN21.channels
IMAGE_CONDITION_CHANNELS = 20  # 4 mask channels, 16 latent channels
REFERENCE_LAYER = "ref_conv.weight"
"""Convolution of a reference image's latent to tokens (Fun Control)."""
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
"""Input channels of the experts of A14B pairs."""

# Parameters that only Wan2.1 I2V has: the embedder of CLIP image features, and their projections in each block.
IMAGE_BRANCH = re.compile(r"condition_embedder\.image_embedder\.|blocks\.\d+\.attn2\.(add_[kv]_proj|norm_added_k)\.")

# Key prefixes of model variants, under native and diffusers' names; a plain expert has none of
# them. The first match wins, so "audio_proj.audio_proj_glob" has to precede "audio_proj.".
OTHER_MODELS = (
    (("vace_blocks.", "vace_patch_embedding."), "a VACE model"),
    (("face_adapter.", "motion_encoder.", "pose_patch_embedding."), "an Animate model"),
    (("casual_audio_encoder.", "audio_injector.", "trainable_cond_mask."), "a speech-to-video model"),
    (("audio_proj.audio_proj_glob",), "a HuMo model"),
    (("audio_proj.",), "an InfiniteTalk or MultiTalk model"),
    (("patch_embedding_mask.",), "a SCAIL-2 model"),
    (("patch_embedding_pose.",), "a SCAIL model"),
    (("patch_embedding_global.",), "a WanDancer model"),
    (("control_adapter.",), "a camera control model"),
    (("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"), "a first and last frame model of Wan2.1"),
    (("lora_unet_", "lora_transformer_"), "a LoRA"),
)

LORA = re.compile(r".*[._](?:lora|lokr|hada|dora)_")
"""Start of a LoRA key, with any prefix."""

# Variants by input channels, where no tensor name identifies them.
OTHER_CHANNELS = {
    20: "a SCAIL model",
    32: "a camera control model of Wan2.1",
}

TYPE_FIELD = "config"
"""Metadata field with a JSON config; ComfyUI merges its "transformer" entry over the config that it detects."""
KNOWN_TYPES = ("t2v", "i2v", "ti2v")
DIFFUSERS_CLASS, ORIGINAL_CLASS = "WanTransformer3DModel", "WanModel"
"""Supported classes in a folder's config.json: that of diffusers, and that of the folders published by Wan-AI."""
ONLY_THESE = "only the T2V, I2V and Fun models of Wan2.1 and Wan2.2, and TI2V-5B can run"


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """The sizes of a Wan transformer, under the names of diffusers' WanTransformer3DModel."""

    num_attention_heads: int
    num_layers: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    patch_size: tuple[int, int, int]
    image_dim: int | None = None
    """Width of the image embeddings for the image branch; None for a model without one."""
    reference_channels: int | None = None
    """Input channels of `ref_conv` (Fun Control), which diffusers' model does not have; None for a model without it."""

    @property
    def family(self) -> Family:
        """Family by channels: 48 out (5B) is "ti2v"; 16 in is "t2v", 36 (image condition) "i2v", others "control"."""
        if self.out_channels == WAN22.channels:
            return "ti2v"
        if self.in_channels == LATENT_CHANNELS:
            return "t2v"
        return "i2v" if self.in_channels == LATENT_CHANNELS + IMAGE_CONDITION_CHANNELS else "control"

    @property
    def width(self) -> int:
        """Width of the model."""
        return self.num_attention_heads * HEAD_DIM

    @property
    def shape(self) -> ExpertShape:
        """Sizes that the planner and measurements need."""
        return ExpertShape(
            width=self.width,
            ffn_width=self.ffn_dim,
            blocks=self.num_layers,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            image_width=self.image_dim,
        )

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of WanTransformer3DModel; the others have the same default in all Wan models."""
        added = None if self.image_dim is None else self.width
        sizes = asdict(self)
        del sizes["reference_channels"]
        return {**sizes, "attention_head_dim": HEAD_DIM, "added_kv_proj_dim": added}


def refuse_other_models(path: Path, keys: Iterable[str]) -> None:
    """Refuse the checkpoint of a variant that is more than a plain expert, by its keys.

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
        raise CheckpointError(path, f"is a LoRA: it holds {factors[0]}; choose it in Wan LoRA (pair)")


def refuse_other_types(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file whose metadata declare a variant with the same tensors as a plain model.

    Wan-Animate-2 has the tensors of Wan2.1 I2V; FlowRVS and causal models have those of T2V. A file without the field
    passes. An unreadable field is refused because ComfyUI does not load such a file either.

    Raises:
        CheckpointError: names the variant or the fault.
    """
    if TYPE_FIELD not in metadata:
        return
    declared = _declared(path, metadata[TYPE_FIELD])
    kind, image_model = declared.get("model_type"), declared.get("image_model")
    for name, value, known in (("model_type", kind, KNOWN_TYPES), ("image_model", image_model, ("wan2.1",))):
        if value is not None and value not in known:
            raise CheckpointError(path, f"is another model: its header says that {name} is {value!r}; {ONLY_THESE}")
    if declared.get("causal_ar"):
        raise CheckpointError(
            path, f"is a causal model, which makes frames one after the other (causal_ar in its header); {ONLY_THESE}"
        )


def _declared(path: Path, text: str) -> Mapping[str, Any]:
    """Return the object "transformer" of the metadata field `TYPE_FIELD`."""
    found, remedy = f"has a {TYPE_FIELD} in its header that ", ": download it again"
    declared = json_object(path, text, found, remedy=remedy).get("transformer", {})
    if not isinstance(declared, dict):
        raise CheckpointError(path, f"{found}is not a JSON object{remedy}")
    return declared


def refuse_other_classes(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose config.json names an unsupported class or model type; a config without them passes.

    Raises:
        CheckpointError: names the class or the type.
    """
    named = config.get("_class_name", DIFFUSERS_CLASS)
    if named not in (DIFFUSERS_CLASS, ORIGINAL_CLASS):
        raise CheckpointError(path, f"is a {named}, not a {DIFFUSERS_CLASS} or {ORIGINAL_CLASS}; {ONLY_THESE}")
    kind = config.get("model_type")
    # Only the original class has a model type; diffusers ignores this key.
    if named == ORIGINAL_CLASS and kind is not None and kind not in KNOWN_TYPES:
        raise CheckpointError(path, f"is another model: its config.json has the model_type {kind!r}; {ONLY_THESE}")


def config_from_shapes(path: Path, shapes: Mapping[str, Shape]) -> WanConfig:
    """Derive the config from the shapes of the tensors, by parameter name.

    Raises:
        CheckpointError: a tensor that determines a size is missing, or the sizes are those of another model.
    """

    def shape(name: str, dimensions: int) -> Shape:
        if name not in shapes:
            raise CheckpointError(path, f"{both_names(name)} is missing")
        if len(shapes[name]) != dimensions or 0 in shapes[name]:
            raise CheckpointError(path, f"{name} is {list(shapes[name])}; {dimensions} sizes above 0 are expected")
        return shapes[name]

    # Count the blocks instead of taking the highest index, so that a gap is reported as a missing tensor.
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    width, in_channels, *patch = shape("patch_embedding.weight", 5)
    config = WanConfig(
        num_attention_heads=width // HEAD_DIM,
        num_layers=len(blocks),
        ffn_dim=shape("blocks.0.ffn.net.0.proj.weight", 2)[0],
        in_channels=in_channels,
        out_channels=shape("proj_out.weight", 2)[0] // math.prod(patch),
        text_dim=shape("condition_embedder.text_embedder.linear_1.weight", 2)[1],
        freq_dim=shape("condition_embedder.time_embedder.linear_1.weight", 2)[1],
        patch_size=(patch[0], patch[1], patch[2]),
        image_dim=shape(IMAGE_LAYER, 2)[1] if any(map(IMAGE_BRANCH.match, shapes)) else None,
        reference_channels=shape(REFERENCE_LAYER, 4)[1] if REFERENCE_LAYER in shapes else None,
    )
    _check_family(path, config, width)
    return config


def _check_family(path: Path, config: WanConfig, width: int) -> None:
    channels = (config.in_channels, config.out_channels)
    if channels not in KNOWN_CHANNELS:
        named = f"is {OTHER_CHANNELS[channels[0]]}: " if channels[0] in OTHER_CHANNELS else ""
        raise CheckpointError(
            path,
            f"{named}patch_embedding.weight takes {channels[0]} channels and proj_out.weight gives {channels[1]}; "
            + ", ".join(f"{given} to {made} is {model}" for (given, made), model in KNOWN_CHANNELS.items()),
        )
    if config.image_dim is not None and channels not in ((36, 16), (48, 16)):
        raise CheckpointError(
            path,
            f"has an image branch, but takes {channels[0]} channels; with one, 36 (I2V) or 48 (Fun Control) are "
            "expected",
        )
    if config.reference_channels not in (None, config.out_channels):
        raise CheckpointError(
            path,
            f"{REFERENCE_LAYER} takes {config.reference_channels} channels, and the latents of this model have "
            f"{config.out_channels}",
        )
    if width == 0 or width % HEAD_DIM:
        raise CheckpointError(path, f"patch_embedding.weight is {width} wide, which is not a multiple of {HEAD_DIM}")
