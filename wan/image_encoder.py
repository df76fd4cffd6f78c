"""Streamed CLIP vision encoder for the image branch of Wan2.1 I2V.

The encoder is CLIP's ViT-H/14 (0.6 B parameters, 1.3 GB in fp16). The layers pass through two
buffers, like the expert blocks, and compute in fp32: 0.2 GB of device memory in all. Wan uses the
hidden states before the last layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from ..offload.formats import FileHeader, FileTensor
from .checkpoint import components
from .checkpoint.block_stack import BlockStack
from .checkpoint.files import CheckpointError, read_checkpoint

WIDTH = 1280
HEADS = 16
"""ViT-H attention heads. Tensor shapes do not determine them."""

CLIP = {"model_type": "clip_vision_model", "hidden_size": WIDTH}
SIZES = (
    "image_size",
    "patch_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
WEIGHTS = "model.safetensors"
PREFIX = "vision_model."
MARK = "embeddings.class_embedding"
MARKS = (MARK, "cls_embedding", "ln_pre.weight")
"""Names of a tensor in every encoder: in transformers, in Wan's own release and in OpenCLIP."""
ROOTS = ("embeddings", "encoder", "pre_layrnorm", "post_layernorm")
OTHER_ROOTS = {
    **dict.fromkeys(("class_embedding", "cls_embedding"), MARK),
    **dict.fromkeys(("conv1", "patch_embedding"), "embeddings.patch_embedding"),
    **dict.fromkeys(
        ("positional_embedding", "pos_embedding"), "embeddings.position_embedding.weight"
    ),
    **dict.fromkeys(("ln_pre", "pre_norm"), "pre_layrnorm"),
    **dict.fromkeys(("ln_post", "post_norm"), "post_layernorm"),
}
"""First parts of other names, and their names in transformers."""
_OTHER_LAYER = re.compile(r"transformer\.(?:resblocks\.)?(\d{1,3})\.(.+?)[._](weight|bias)")
_OTHER_MODULES = {
    **dict.fromkeys(("ln_1", "norm1"), "layer_norm1"),
    **dict.fromkeys(("ln_2", "norm2"), "layer_norm2"),
    **dict.fromkeys(("attn.out_proj", "attn.proj"), "self_attn.out_proj"),
    **dict.fromkeys(("mlp.c_fc", "mlp.0"), "mlp.fc1"),
    **dict.fromkeys(("mlp.c_proj", "mlp.2"), "mlp.fc2"),
}
"""Layer modules in Wan's own release and in OpenCLIP, and their names in transformers."""
_JOINED = ("attn.in_proj", "attn.to_qkv")
"""Modules with query, key and value rows."""
POSITION_IDS = "embeddings.position_ids"
"""0, 1, 2, ... in files by old transformers versions."""
LAYER = re.compile(r"encoder\.layers\.(\d{1,3})\.")
IMAGE_STACK = "clip"

# Mean and standard deviation for red, green and blue in training (OPENAI_CLIP_MEAN and _STD in
# transformers).
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipVisionOutput:
    """Image embedding, under the attribute name in ComfyUI's CLIP_VISION_OUTPUT."""

    penultimate_hidden_states: torch.Tensor
    """[N, tokens, 1280] fp32, on the CPU."""


def open_image_encoder(path: Path | str) -> ImageEncoder:
    """Open the encoder in a diffusers folder or in ComfyUI's `clip_vision_h` file.

    The folder is a pipeline or an `image_encoder` folder. Reads only headers and the config.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or not a safetensors file. The
            config or the tensors do not belong to a CLIP vision model with width 1280.
    """
    path = Path(path)
    if path.is_file():
        stored = _vision_file(read_checkpoint(path))
        config = _config_from_shapes(path, stored.weights)
        described = "the rest of the file"
    else:
        folder = components.component_folder(path, "image_encoder")
        config = components.read_config(folder)
        model_name = "the image encoder of a Wan2.1 I2V pipeline (CLIP ViT-H)"
        components.require_config(folder, config, CLIP, SIZES, model_name)
        described = components.CONFIG
        path = folder / components.CONFIG
        stored = _vision_file(read_checkpoint(folder, weights=WEIGHTS))
    model = components.build_on_meta(path, lambda: _model(config))
    layers: list[nn.Module] = list(model.encoder.layers)  # type: ignore[arg-type, union-attr]
    stack = BlockStack(name=IMAGE_STACK, prefix="encoder.layers.", model=model, blocks=layers)
    file = components.match_weights(
        path,
        stored,
        model,
        remedy="use clip_vision_h in fp16",
        described_by=described,
        key_of=lambda name: PREFIX + name,
        packed=stack.streamed,
    )
    return ImageEncoder(file, stack, image_size=config["image_size"])


class ImageEncoder:
    """Opened CLIP vision model. Between calls it keeps only small tensors on the device."""

    def __init__(
        self, file: components.ComponentFile, stack: BlockStack, *, image_size: int
    ) -> None:
        self._file = file
        self._stack = stack
        self._image_size = image_size
        self.notes = file.notes
        """Sentences about unused file tensors."""
        self.warnings = file.warnings
        """Sentences about a loss of precision in the file."""

    def encode(
        self,
        images: torch.Tensor,
        *,
        device: torch.device | str,
        crop: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> ClipVisionOutput:
        """Embed images [N, H, W, 3 or 4] in 0..1. See `clip_pixels` for `crop`.

        `check` is called before every layer and may raise to end the computation.

        Raises:
            ValueError: the tensor has another shape.
        """
        pixels = clip_pixels(images, self._image_size, crop=crop)
        device = torch.device(device)
        # For this call only: the experts need the buffer memory afterwards.
        with self._stack.streaming(self._file, lambda _: torch.float32, device=device, check=check):
            self._set_positions(device)
            hidden = self._stack.model(
                pixel_values=pixels.to(device), output_hidden_states=True
            ).hidden_states[-2]
        return ClipVisionOutput(penultimate_hidden_states=hidden.float().cpu())

    def _set_positions(self, device: torch.device) -> None:
        """Set the position ids, a buffer still on `meta` because no file contains it."""
        positions = self._file.weights["embeddings.position_embedding.weight"].shape[0]
        embeddings = self._stack.model.get_submodule("embeddings")
        # It stays in the model, as the parameters do.
        with torch.inference_mode(False):
            embeddings.register_buffer(
                "position_ids", torch.arange(positions, device=device)[None], persistent=False
            )


def clip_pixels(images: torch.Tensor, size: int, *, crop: bool = False) -> torch.Tensor:
    """Convert images [N, H, W, 3 or 4] in 0..1 to CLIP's input, [N, 3, size, size] fp32.

    The whole image is resized to the square, as in Wan's own code. `crop` takes the central square,
    as in diffusers' pipeline. Scaled and rounded to 8 bits as in ComfyUI's `clip_preprocess`.

    Raises:
        ValueError: the tensor has another shape.
    """
    if images.ndim != 4 or images.shape[-1] not in (3, 4) or 0 in images.shape:
        raise ValueError(f"the images are {list(images.shape)}: give images [N, H, W, 3]")
    pixels = images[..., :3].movedim(-1, 1).float()
    height, width = pixels.shape[-2:]
    if (height, width) != (size, size):
        scale = size / min(height, width)
        height, width = (round(scale * height), round(scale * width)) if crop else (size, size)
        pixels = interpolate(pixels, size=(height, width), mode="bicubic", antialias=True)
        top = (height - size) // 2
        left = (width - size) // 2
        pixels = pixels[..., top : top + size, left : left + size]
    mean, deviation = (
        torch.tensor(each, device=pixels.device).view(3, 1, 1) for each in (PIXEL_MEAN, PIXEL_STD)
    )
    return ((pixels * 255).clamp(0, 255).round() / 255 - mean) / deviation


def _model(config: Mapping[str, Any]) -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = CLIPVisionModel(CLIPVisionConfig(**config))
    # The inner vision model in transformers 4. In transformers 5 it is the model itself.
    core: nn.Module = getattr(model, PREFIX.removesuffix("."), model)
    return core


def _vision_file(header: FileHeader) -> components.ComponentFile:
    """Return the vision model tensors by their names in transformers, without a text model."""
    roots = (*ROOTS, *OTHER_ROOTS, "transformer")
    found = components.component_file(header, marks=MARKS, roots=roots, unused=[POSITION_IDS])
    if MARK not in found.weights:
        found = replace(found, weights=_renamed(found.weights), scales=_renamed(found.scales))
    if MARK not in found.weights:
        first = next(iter(found.weights), "none")
        reason = f"it has {len(found.weights)} tensors (first: {first}); use clip_vision_h"
        raise CheckpointError(header.path, f"is not a CLIP vision model: {reason}")
    return found


def _renamed(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return tensors by name in transformers, with one tensor per part of joined matrices."""
    renamed: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        layer = _OTHER_LAYER.fullmatch(name)
        if layer is None:
            root, dot, rest = name.partition(".")
            renamed[OTHER_ROOTS.get(root, root) + dot + rest] = _without_batch(tensor)
            continue
        index, module, leaf = layer.groups()
        prefix = f"encoder.layers.{int(index)}"
        if module not in _JOINED:
            renamed[f"{prefix}.{_OTHER_MODULES.get(module, module)}.{leaf}"] = tensor
            continue
        for part, projection in zip(_thirds(tensor), "qkv", strict=True):
            renamed[f"{prefix}.self_attn.{projection}_proj.{leaf}"] = part
    return renamed


def _without_batch(tensor: FileTensor) -> FileTensor:
    """Return an embedding without leading ones. Wan's own release has them for a batch."""
    shape = tensor.shape
    while shape[:1] == (1,):
        shape = shape[1:]
    return replace(tensor, shape=shape)


def _thirds(tensor: FileTensor) -> list[FileTensor]:
    """Return a tensor's rows in three parts.

    A one-number scale applies to each part, whatever its shape.
    """
    if tensor.packing is None and math.prod(tensor.shape) == 1:
        return [tensor] * 3
    if tensor.packing is not None or tensor.shape[0] % 3:
        found = tensor.packing.name if tensor.packing is not None else f"{list(tensor.shape)}"
        raise CheckpointError(
            tensor.path, f"has joined queries, keys and values in {found}: use clip_vision_h"
        )
    # Rows of the queries come first, then of the keys and the values.
    rows = tensor.shape[0] // 3
    return [tensor.rows(start, start + rows) for start in range(0, 3 * rows, rows)]


def _config_from_shapes(path: Path, tensors: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Return the encoder sizes under the names in config.json.

    Raises:
        CheckpointError: they do not belong to ViT-H.
    """

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        found = tensors[name].shape if name in tensors else ()
        if len(found) != dimensions or 0 in found:
            fault = f"is {list(found)}" if name in tensors else "is missing"
            raise CheckpointError(
                path, f"{PREFIX}{name} {fault}; {dimensions} sizes above 0 are expected"
            )
        return found

    width, _, patch, _ = shape("embeddings.patch_embedding.weight", 4)
    positions = shape("embeddings.position_embedding.weight", 2)[0]
    if width != WIDTH:
        raise CheckpointError(
            path, f"is {width} wide; Wan2.1 I2V takes CLIP ViT-H ({WIDTH} wide): use clip_vision_h"
        )
    side = math.isqrt(positions - 1)
    if side * side != positions - 1:
        raise CheckpointError(
            path, f"has {positions} positions; one more than a square number is expected"
        )
    return {
        "hidden_size": width,
        "intermediate_size": shape("encoder.layers.0.mlp.fc1.weight", 2)[0],
        "num_hidden_layers": len({found[1] for name in tensors if (found := LAYER.match(name))}),
        "num_attention_heads": HEADS,
        "patch_size": patch,
        "image_size": side * patch,
        # transformers' default is quick_gelu, as in OpenAI's CLIP, but ViT-H has gelu.
        "hidden_act": "gelu",
    }
