"""What CLIP sees in an image: the embedding that the image branch of Wan2.1 I2V takes.

The encoder is CLIP's ViT-H/14 (0.6 B parameters, 1.3 GB in fp16). Its layers pass through two buffers, as the experts'
blocks do, and compute in fp32: 0.2 GB of device memory in all. Of its hidden states Wan takes those before the last
layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from ..offload import FileSource, FileTensor, attach_offload, read_tensors, streamed_names
from ..plan import BlockKey
from ..schema import OffloadPolicy
from .checkpoint.components import (
    CONFIG,
    build_on_meta,
    component_folder,
    match_weights,
    read_config,
    require_config,
    require_sizes,
)
from .checkpoint.files import CheckpointError, read_stored
from .checkpoint.meta_model import set_parameters

if TYPE_CHECKING:
    from transformers import CLIPVisionModel

WIDTH = 1280
HEADS = 16
"""Of ViT-H; no tensor tells it."""

WEIGHTS = "model.safetensors"
PREFIX = "vision_model."
PROJECTION = "visual_projection.weight"
"""To what CLIP compares with texts; Wan has no use for it."""
POSITION_IDS = "embeddings.position_ids"
LAYER = re.compile(r"encoder\.layers\.(\d{1,3})\.")
STACK = "clip"

# What CLIP was trained on: mean and deviation of red, green and blue (OPENAI_CLIP_MEAN and _STD of transformers).
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenImage:
    """What CLIP sees, under the name by which ComfyUI's CLIP_VISION_OUTPUT carries it."""

    penultimate_hidden_states: torch.Tensor
    """[N, tokens, 1280] fp32, on the CPU."""


def open_image_encoder(path: Path | str) -> ImageEncoder:
    """Open the encoder of a diffusers pipeline folder, its `image_encoder` folder, or ComfyUI's `clip_vision_h` file.

    Reads headers and the config only.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or no safetensors file; the config or the tensors
            are not those of a CLIP vision model that is 1280 wide.
    """
    path = Path(path)
    if path.is_file():
        stored = read_stored(path)
        tensors = _own_tensors(path, stored.tensors)
        config, described = _config_from_shapes(path, tensors), "the rest of the file"
    else:
        folder = component_folder(path, "image_encoder")
        config, described = _config_of(folder), CONFIG
        path = folder / CONFIG
        tensors = _own_tensors(folder, read_stored(folder, weights=WEIGHTS).tensors)
    model = build_on_meta(path, lambda: _model(config))
    weights = match_weights(path, tensors, model, described_by=described, key_of=lambda name: PREFIX + name)
    return ImageEncoder(model, weights, image_size=config["image_size"])


class ImageEncoder:
    """An opened CLIP vision model. Nothing of any size is held between calls."""

    def __init__(self, model: nn.Module, weights: Mapping[str, FileTensor], *, image_size: int) -> None:
        self._model, self._weights, self._image_size = model, weights, image_size
        self._layers: list[nn.Module] = list(model.encoder.layers)  # type: ignore[arg-type, union-attr]

    def encode(self, images: torch.Tensor, *, device: torch.device | str, crop: bool = False) -> SeenImage:
        """What CLIP sees in images [N, H, W, 3 or 4] in 0..1, each by itself; see `clip_pixels` for `crop`.

        Raises:
            ValueError: they are anything but images.
        """
        pixels = clip_pixels(images, self._image_size, crop=crop)
        place = torch.device(device)
        self._read_what_stays(place)
        policy = OffloadPolicy.layerwise(1)
        with (
            attach_offload({STACK: self._layers}, policy=policy, device=place, source=self._source()),
            torch.no_grad(),
        ):
            given = pixels.to(place)
            seen = self._model(pixel_values=given, output_hidden_states=True).hidden_states[-2]
        return SeenImage(penultimate_hidden_states=seen.float().cpu())

    def _source(self) -> FileSource:
        blocks = {
            BlockKey(STACK, index): {
                name: self._weights[f"encoder.layers.{index}.{name}"] for name in streamed_names(layer)
            }
            for index, layer in enumerate(self._layers)
        }
        return FileSource(blocks, computed_dtypes=torch.float32)

    def _read_what_stays(self, device: torch.device) -> None:
        """Embeddings of pixels and places, norms and biases; the places' numbers are in no file."""
        streamed = {
            f"encoder.layers.{index}.{name}"
            for index, layer in enumerate(self._layers)
            for name in streamed_names(layer)
        }
        staying = {name: tensor for name, tensor in self._weights.items() if name not in streamed}
        with torch.inference_mode(False):
            values = read_tensors(staying)
            set_parameters(self._model, {name: value.to(device, torch.float32) for name, value in values.items()})
            places = self._weights["embeddings.position_embedding.weight"].shape[0]
            embeddings = self._model.get_submodule("embeddings")
            embeddings.register_buffer("position_ids", torch.arange(places, device=device)[None], persistent=False)


def clip_pixels(images: torch.Tensor, size: int, *, crop: bool = False) -> torch.Tensor:
    """Images [N, H, W, 3 or 4] in 0..1 -> what CLIP takes, [N, 3, size, size] fp32.

    The whole image is pressed into the square, as Wan's own code does; with `crop` the square in its middle is taken,
    as diffusers' pipeline does. Scaled and rounded to 8 bits as in ComfyUI's `clip_preprocess`.

    Raises:
        ValueError: they are anything but images.
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

    return _core(CLIPVisionModel(CLIPVisionConfig(**config)))


def _core(model: CLIPVisionModel) -> nn.Module:
    """What computes: in transformers 4 it is inside the model, in transformers 5 the model itself."""
    core: nn.Module = getattr(model, PREFIX.removesuffix("."), model)
    return core


def _own_tensors(path: Path, tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """The tensors of the vision model, by their names within it."""
    own = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items() if key != PROJECTION}
    own.pop(POSITION_IDS, None)  # numbers from 0 on, in old files
    if "embeddings.class_embedding" not in own:
        first = next(iter(tensors), "none")
        raise CheckpointError(
            path, f"is no CLIP vision model: it holds {len(tensors)} tensors, {first} first; use clip_vision_h"
        )
    return own


def _config_of(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    wanted = {"model_type": "clip_vision_model", "hidden_size": WIDTH}
    require_config(folder, config, wanted, "the image encoder of a Wan2.1 I2V pipeline (CLIP ViT-H)")
    sizes = ("image_size", "patch_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    require_sizes(folder, config, sizes)
    return config


def _config_from_shapes(path: Path, tensors: Mapping[str, FileTensor]) -> dict[str, Any]:
    """The sizes of the encoder in the words of its config.json.

    Raises CheckpointError where they belong to no ViT-H.
    """

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        if name not in tensors or len(tensors[name].shape) != dimensions or 0 in tensors[name].shape:
            found = f"is {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise CheckpointError(path, f"{PREFIX}{name} {found}; {dimensions} sizes above 0 are expected")
        return tensors[name].shape

    width, _, patch, _ = shape("embeddings.patch_embedding.weight", 4)
    places = shape("embeddings.position_embedding.weight", 2)[0]
    if width != WIDTH:
        raise CheckpointError(path, f"is {width} wide; Wan2.1 I2V takes CLIP ViT-H ({WIDTH} wide): use clip_vision_h")
    side = math.isqrt(places - 1)
    if side * side != places - 1:
        raise CheckpointError(path, f"has {places} places; one and a square number are expected")
    return {
        "hidden_size": width,
        "intermediate_size": shape("encoder.layers.0.mlp.fc1.weight", 2)[0],
        "num_hidden_layers": len({found[1] for name in tensors if (found := LAYER.match(name))}),
        "num_attention_heads": HEADS,
        "patch_size": patch,
        "image_size": side * patch,
        "hidden_act": "gelu",
    }
