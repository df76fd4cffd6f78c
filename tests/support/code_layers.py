"""Layers that multiply codes, made from codes, scales, bias and patch."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from wanstream.block_kernels import ScaledLinear

LayerT = TypeVar("LayerT", bound=ScaledLinear)


def loaded(layer, codes, scale, bias=None, patch=(None, None)) -> LayerT:
    """Return `layer` with these tensors."""
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = scale
    layer.bias = bias if bias is None else nn.Parameter(bias, requires_grad=False)
    layer.patch_up, layer.patch_down = patch
    return layer
