"""Streamed CLIP vision encoder for the image branch of Wan2.1 I2V.

The encoder is CLIP's ViT-H/14 (0.6 B parameters, 1.3 GB in fp16). The layers pass through two buffers, like the
experts' blocks, and compute in fp32: 0.2 GB of device memory in all. Wan uses the hidden states before the last layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from ..offload import FileHeader, FileSource, FileTensor, attach_offload, copy_together, streamed_names
from ..plan import BlockKey
from ..schema import OffloadPolicy
from .checkpoint.components import (
    CONFIG,
    CONVERTED_DTYPES,
    STORED_DTYPES,
    ComponentFile,
    build_on_meta,
    component_file,
    component_folder,
    match_weights,
    precision_warnings,
    read_component,
    read_config,
    require_config,
    require_sizes,
)
from .checkpoint.files import CheckpointError, read_checkpoint
from .checkpoint.meta_model import called_before, set_parameters

WIDTH = 1280
HEADS = 16
"""ViT-H attention heads. Tensor shapes do not determine them."""

WEIGHTS = "model.safetensors"
PREFIX = "vision_model."
MARK = "embeddings.class_embedding"
MARKS = (MARK, "cls_embedding", "ln_pre.weight")
"""Names of a tensor found in every encoder: in transformers, Wan's own release and OpenCLIP."""
ROOTS = ("embeddings", "encoder", "pre_layrnorm", "post_layernorm")
OTHER_ROOTS = {
    "class_embedding": MARK,
    "cls_embedding": MARK,
    "conv1": "embeddings.patch_embedding",
    "patch_embedding": "embeddings.patch_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "pos_embedding": "embeddings.position_embedding.weight",
    "ln_pre": "pre_layrnorm",
    "pre_norm": "pre_layrnorm",
    "ln_post": "post_layernorm",
    "post_norm": "post_layernorm",
}
"""First parts of other names, and their names in transformers."""
_OTHER_LAYER = re.compile(r"transformer\.(?:resblocks\.)?(\d{1,3})\.(.+?)[._](weight|bias)")
_OTHER_MODULES = {
    "ln_1": "layer_norm1",
    "norm1": "layer_norm1",
    "ln_2": "layer_norm2",
    "norm2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "attn.proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.0": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "mlp.2": "mlp.fc2",
}
"""Layer modules in Wan's own release and in OpenCLIP, and their names in transformers."""
_JOINED = ("attn.in_proj", "attn.to_qkv")
"""Modules with query, key and value rows."""
POSITION_IDS = "embeddings.position_ids"
"""0, 1, 2, ... in files by old transformers versions."""
LAYER = re.compile(r"encoder\.layers\.(\d{1,3})\.")
STACK = "clip"

# Mean and standard deviation for red, green and blue in training (OPENAI_CLIP_MEAN and _STD in transformers).
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipVisionOutput:
    """Image embedding, under the attribute name in ComfyUI's CLIP_VISION_OUTPUT."""

    penultimate_hidden_states: torch.Tensor
    """[N, tokens, 1280] fp32, on the CPU."""


def open_image_encoder(path: Path | str) -> ImageEncoder:
    """Open the encoder in a diffusers pipeline folder, an `image_encoder` folder, or ComfyUI's `clip_vision_h` file.

    Reads only headers and the config.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or not a safetensors file. The config or the
            tensors do not belong to a CLIP vision model with width 1280.
    """
    path = Path(path)
    if path.is_file():
        stored = _vision_file(read_checkpoint(path))
        config = _config_from_shapes(path, stored.weights)
        described = "the rest of the file"
    else:
        folder = component_folder(path, "image_encoder")
        config, described = _config_of(folder), CONFIG
        path = folder / CONFIG
        stored = _vision_file(read_checkpoint(folder, weights=WEIGHTS))
    model = build_on_meta(path, lambda: _model(config))
    weights = match_weights(
        path,
        stored.weights,
        model,
        dtypes=(*STORED_DTYPES, *CONVERTED_DTYPES),
        described_by=described,
        key_of=lambda name: PREFIX + name,
        packed=frozenset(_streamed(list(model.encoder.layers))),  # type: ignore[arg-type, union-attr]
    )
    return ImageEncoder(
        model,
        weights,
        stored.scales,
        image_size=config["image_size"],
        notes=stored.notes,
        warnings=precision_warnings(stored.path, weights.values(), "use clip_vision_h in fp16"),
    )


class ImageEncoder:
    """Opened CLIP vision model. Between calls it keeps only small tensors on the device."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, FileTensor],
        scales: Mapping[str, FileTensor],
        *,
        image_size: int,
        notes: tuple[str, ...],
        warnings: tuple[str, ...],
    ) -> None:
        self._model = model
        self._weights = weights
        self._scales = scales
        self._image_size = image_size
        self.notes = notes
        """Sentences about unused file tensors."""
        self.warnings = warnings
        """Sentences about a loss of precision in the file."""
        self._layers: list[nn.Module] = list(model.encoder.layers)  # type: ignore[arg-type, union-attr]

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
        self._read_small_tensors(device)
        policy = OffloadPolicy.layerwise(1)
        # Attached for this call only: the experts need the buffer memory afterwards.
        with (
            attach_offload({STACK: self._layers}, policy=policy, device=device, source=self._source()),
            called_before(self._layers, check),
            torch.no_grad(),
        ):
            hidden = self._model(pixel_values=pixels.to(device), output_hidden_states=True).hidden_states[-2]
        return ClipVisionOutput(penultimate_hidden_states=hidden.float().cpu())

    def _source(self) -> FileSource:
        blocks = {}
        scales = {}
        for index, layer in enumerate(self._layers):
            names = {name: _in_layer(index, name) for name in streamed_names(layer)}
            blocks[BlockKey(STACK, index)] = {name: self._weights[full] for name, full in names.items()}
            scales[BlockKey(STACK, index)] = {
                name: self._scales[full] for name, full in names.items() if full in self._scales
            }
        return FileSource(blocks, computed_dtypes=torch.float32, scales=scales)

    def _read_small_tensors(self, device: torch.device) -> None:
        """Read the tensors that are not streamed: patch and position embeddings, norms and biases."""
        streamed = set(_streamed(self._layers))
        small = {name: tensor for name, tensor in self._weights.items() if name not in streamed}
        scales = {name: scale for name, scale in self._scales.items() if name in small}
        # Parameters stay in the model after this call, so they must not be inference tensors: a later call outside
        # inference mode could not compute with them.
        with torch.inference_mode(False):
            set_parameters(self._model, copy_together(read_component(small, scales, torch.float32), device))
            # No file contains the position id buffer, so it is still on `meta`.
            positions = self._weights["embeddings.position_embedding.weight"].shape[0]
            embeddings = self._model.get_submodule("embeddings")
            embeddings.register_buffer("position_ids", torch.arange(positions, device=device)[None], persistent=False)


def clip_pixels(images: torch.Tensor, size: int, *, crop: bool = False) -> torch.Tensor:
    """Convert images [N, H, W, 3 or 4] in 0..1 to CLIP's input, [N, 3, size, size] fp32.

    The whole image is resized to the square, as in Wan's own code. `crop` takes the central square, as in diffusers'
    pipeline. Scaled and rounded to 8 bits as in ComfyUI's `clip_preprocess`.

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
        top, left = (height - size) // 2, (width - size) // 2
        pixels = pixels[..., top : top + size, left : left + size]
    mean, deviation = (torch.tensor(each, device=pixels.device).view(3, 1, 1) for each in (PIXEL_MEAN, PIXEL_STD))
    return ((pixels * 255).clamp(0, 255).round() / 255 - mean) / deviation


def _model(config: Mapping[str, Any]) -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = CLIPVisionModel(CLIPVisionConfig(**config))
    # The inner vision model in transformers 4. In transformers 5 it is the model itself.
    core: nn.Module = getattr(model, PREFIX.removesuffix("."), model)
    return core


def _in_layer(index: int, name: str) -> str:
    return f"encoder.layers.{index}.{name}"


def _streamed(layers: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the names of the streamed parameters, within the model."""
    return (_in_layer(index, name) for index, layer in enumerate(layers) for name in streamed_names(layer))


def _vision_file(header: FileHeader) -> ComponentFile:
    """Return the vision model tensors by their names in transformers, without a text model."""
    roots = (*ROOTS, *OTHER_ROOTS, "transformer")
    found = component_file(header, marks=MARKS, roots=roots, unused=[POSITION_IDS])
    if MARK not in found.weights:
        found = replace(found, weights=_renamed(found.weights), scales=_renamed(found.scales))
    if MARK not in found.weights:
        first = next(iter(found.weights), "none")
        raise CheckpointError(
            header.path,
            f"is not a CLIP vision model: it has {len(found.weights)} tensors (first: {first}); use clip_vision_h",
        )
    return found


def _renamed(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return tensors by their names in transformers, and one tensor for each part of joined matrices."""
    renamed: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        layer = _OTHER_LAYER.fullmatch(name)
        if layer is None:
            root, dot, rest = name.partition(".")
            renamed[OTHER_ROOTS.get(root, root) + dot + rest] = _without_batch(tensor)
            continue
        index, module, leaf = layer.groups()
        if module not in _JOINED:
            renamed[_in_layer(int(index), f"{_OTHER_MODULES.get(module, module)}.{leaf}")] = tensor
            continue
        for part, projection in zip(_thirds(tensor), "qkv", strict=True):
            renamed[_in_layer(int(index), f"self_attn.{projection}_proj.{leaf}")] = part
    return renamed


def _without_batch(tensor: FileTensor) -> FileTensor:
    """Return an embedding without leading ones. Wan's own release has them for a batch."""
    shape = tensor.shape
    while shape[:1] == (1,):
        shape = shape[1:]
    return replace(tensor, shape=shape)


def _thirds(tensor: FileTensor) -> list[FileTensor]:
    """Return a tensor's rows in three parts. A scale of one number counts for each part, whatever its shape."""
    if tensor.packing is None and math.prod(tensor.shape) == 1:
        return [tensor] * 3
    if tensor.packing is not None or tensor.shape[0] % 3:
        found = tensor.packing.name if tensor.packing is not None else f"{list(tensor.shape)}"
        raise CheckpointError(tensor.path, f"has joined queries, keys and values in {found}: use clip_vision_h")
    rows = tensor.shape[0] // 3
    return [tensor.rows(start, start + rows) for start in range(0, 3 * rows, rows)]


def _config_of(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    wanted = {"model_type": "clip_vision_model", "hidden_size": WIDTH}
    require_config(folder, config, wanted, "the image encoder of a Wan2.1 I2V pipeline (CLIP ViT-H)")
    sizes = ("image_size", "patch_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    require_sizes(folder, config, sizes)
    return config


def _config_from_shapes(path: Path, tensors: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Return the encoder sizes under the names in config.json.

    Raises:
        CheckpointError: they do not belong to ViT-H.
    """

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        if name not in tensors or len(tensors[name].shape) != dimensions or 0 in tensors[name].shape:
            found = f"is {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise CheckpointError(path, f"{PREFIX}{name} {found}; {dimensions} sizes above 0 are expected")
        return tensors[name].shape

    width, _, patch, _ = shape("embeddings.patch_embedding.weight", 4)
    positions = shape("embeddings.position_embedding.weight", 2)[0]
    if width != WIDTH:
        raise CheckpointError(path, f"is {width} wide; Wan2.1 I2V takes CLIP ViT-H ({WIDTH} wide): use clip_vision_h")
    side = math.isqrt(positions - 1)
    if side * side != positions - 1:
        raise CheckpointError(path, f"has {positions} positions; one more than a square number is expected")
    return {
        "hidden_size": width,
        "intermediate_size": shape("encoder.layers.0.mlp.fc1.weight", 2)[0],
        "num_hidden_layers": len({found[1] for name in tensors if (found := LAYER.match(name))}),
        "num_attention_heads": HEADS,
        "patch_size": patch,
        "image_size": side * patch,
        "hidden_act": "gelu",
    }
