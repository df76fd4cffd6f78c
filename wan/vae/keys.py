"""Parameter names of VAEs in ComfyUI's single files, from the names of diffusers.

Only names differ: shapes are the same in both, and nothing is transposed.
"""

from __future__ import annotations

import re

_WHOLE = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "encoder.conv_in": "encoder.conv1",
    "decoder.conv_in": "decoder.conv1",
    "encoder.norm_out": "encoder.head.0",
    "decoder.norm_out": "decoder.head.0",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_out": "decoder.head.2",
}

_RESNET = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}

_MIDDLE = re.compile(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d+)\.(.+)")
_DOWN = re.compile(r"encoder\.down_blocks\.(\d+)\.(.+)")
_UP = re.compile(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)")
_WAN22_BLOCK = re.compile(r"(encoder\.down|decoder\.up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\.(.+)")

# The native decoder of Wan2.1 is one flat list: three residual blocks and a resampler for each up block of diffusers.
_LAYERS_PER_UP_BLOCK = 4
# In the VAE of Wan2.2 the resampler of a block is the last item of the block's list.
_WAN22_RESAMPLER = {"encoder.down": 2, "decoder.up": 3}


def native_vae_name(name: str) -> str:
    """Return the native name of a parameter of Wan2.1's `AutoencoderKLWan`, which A14B also uses.

    Raises:
        ValueError: this VAE has no such parameter.
    """
    module, _, leaf = name.rpartition(".")
    native = _outside_blocks(module)
    if native is None and (down := _DOWN.fullmatch(module)):
        index, layer = down.groups()
        native = f"encoder.downsamples.{index}.{_RESNET.get(layer, layer)}"
    if native is None and (up := _UP.fullmatch(module)):
        block, kind, index, layer = up.groups()
        position = _LAYERS_PER_UP_BLOCK * int(block) + (3 if kind == "upsamplers" else int(index))
        native = f"decoder.upsamples.{position}.{_RESNET.get(layer, layer)}"
    if native is None:
        raise ValueError(f"{name!r} is not a parameter of the Wan2.1 VAE")
    return f"{native}.{leaf}"


def native_wan22_vae_name(name: str) -> str:
    """Return the native name of a parameter of Wan2.2 5B's `AutoencoderKLWan`, whose blocks contain nested lists.

    Raises:
        ValueError: this VAE has no such parameter.
    """
    module, _, leaf = name.rpartition(".")
    native = _outside_blocks(module)
    if native is None and (inside := _WAN22_BLOCK.fullmatch(module)):
        half, block, index, layer = inside.groups()
        position = _WAN22_RESAMPLER[half] if index is None else index
        native = f"{half}samples.{block}.{half.partition('.')[2]}samples.{position}.{_RESNET.get(layer, layer)}"
    if native is None:
        raise ValueError(f"{name!r} is not a parameter of the Wan2.2 VAE")
    return f"{native}.{leaf}"


def _outside_blocks(module: str) -> str | None:
    """Return the native name of a module that both VAEs have (first and last layers, middle); None for others."""
    if middle := _MIDDLE.fullmatch(module):
        half, kind, index, layer = middle.groups()
        # The middle is resnet, attention, resnet.
        position = 1 if kind == "attentions" else 2 * int(index)
        return f"{half}.middle.{position}.{_RESNET.get(layer, layer)}"
    return _WHOLE.get(module)
