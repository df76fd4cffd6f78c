"""Layers that multiply codes, made from codes, scales, bias and patch."""

from torch import nn


def loaded(layer, codes, scale, bias=None, patch=(None, None)):
    """Return `layer` with these tensors."""
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = scale
    layer.bias = bias if bias is None else nn.Parameter(bias, requires_grad=False)
    layer.patch_up, layer.patch_down = patch
    return layer
