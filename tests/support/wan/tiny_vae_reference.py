"""Definition of a tiny VAE's decoder in float64.

It decodes whole videos, layer by layer, in the published files' order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import conv2d


def reference_frames(tensors: Mapping[str, torch.Tensor], latents: torch.Tensor) -> torch.Tensor:
    """Decode latents [C, T, h, w] to frames [4T - 3, H, W, 3] in 0..1.

    The latents have the scale the tensors were trained on.

    Layers are numbered as in the files: 1 first convolution, 3 to 5 memory blocks, 6 doubling, 7
    growth in time, 8 convolution, and so on to 22. 0, 2 and 21 have no tensors.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    x = latents.double().permute(1, 0, 2, 3)
    for layer in range(23):
        name = f"decoder.{layer}"
        if layer == 0:
            x = 3 * torch.tanh(x / 3)
        elif layer in (2, 21):
            x = x.clamp(min=0)
        elif layer in (6, 12, 18):
            x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        elif f"{name}.conv.0.weight" in weights:
            x = _memory_block(weights, name, x)
        elif f"{name}.conv.weight" in weights:
            x = _grow(weights[f"{name}.conv.weight"], x)
        else:
            x = conv2d(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), padding=1)
    side = 1 if x.shape[1] == 3 else 2
    frames, _, height, width = x.shape
    # A channel is a patch's (colour, row, column).
    x = x.view(frames, 3, side, side, height, width).permute(0, 4, 2, 5, 3, 1)
    return x.reshape(frames, side * height, side * width, 3)[3:].clamp(0, 1)


def _memory_block(weights: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    y = torch.cat([x, before], dim=1)
    for layer in (0, 2, 4):
        weight, bias = (weights[f"{name}.conv.{layer}.{kind}"] for kind in ("weight", "bias"))
        y = conv2d(y, weight, bias, padding=1)
        if layer < 4:
            y = y.clamp(min=0)
    return (y + x).clamp(min=0)


def _grow(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return each frame's new frames, in order.

    The first frame has the first `width` outputs of the 1x1 matrix.
    """
    matrices = weight[:, :, 0, 0].split(x.shape[1])
    grown = [torch.einsum("oc,chw->ohw", each, frame) for frame in x for each in matrices]
    return torch.stack(grown)
