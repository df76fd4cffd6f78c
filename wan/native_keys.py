"""Names: what ComfyUI's single files call a parameter that diffusers knows by another name.

Pure text. Shapes are the same on both sides and nothing is transposed, so a name is all that differs.
"""

from __future__ import annotations

import re

# Modules and bare parameters by the names of diffusers: outside the blocks, and within a block.
OUTER = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}

_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}

BLOCK = {
    **{f"attn1.{theirs}": f"self_attn.{native}" for theirs, native in _ATTENTION.items()},
    **{f"attn2.{theirs}": f"cross_attn.{native}" for theirs, native in _ATTENTION.items()},
    # The image branch of Wan2.1 I2V.
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    # The norm before cross attention: second in diffusers, third in the native model.
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "scale_shift_table": "modulation",
}

_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


def native_transformer_name(name: str) -> str:
    """The native name of a parameter of a `WanTransformer3DModel` of Wan2.1 or Wan2.2 A14B.

    Raises `ValueError` for a name that such a model does not have.
    """
    in_block = _BLOCK_NAME.fullmatch(name)
    prefix, table, local = (f"blocks.{in_block[1]}.", BLOCK, in_block[2]) if in_block else ("", OUTER, name)
    module, dot, leaf = _split_leaf(local)
    if module not in table:
        raise ValueError(f"{name!r} is not a parameter of a Wan2.1 or Wan2.2 A14B transformer")
    return f"{prefix}{table[module]}{dot}{leaf}"


def _split_leaf(name: str) -> tuple[str, str, str]:
    """`"attn1.to_q.weight"` -> `("attn1.to_q", ".", "weight")`; a bare parameter has no leaf."""
    if name.endswith((".weight", ".bias")):
        return name.rpartition(".")
    return name, "", ""


_VAE_WHOLE = {
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

_VAE_MIDDLE = re.compile(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d+)\.(.+)")
_VAE_DOWN = re.compile(r"encoder\.down_blocks\.(\d+)\.(.+)")
_VAE_UP = re.compile(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)")

# Natively the decoder is one flat list: three residual blocks and a resampler for each of diffusers' up blocks.
_LAYERS_PER_UP_BLOCK = 4


def native_vae_name(name: str) -> str:
    """The native name of a parameter of `AutoencoderKLWan` (Wan2.1, which A14B uses).

    Raises `ValueError` for a name that this VAE does not have.
    """
    module, _, leaf = name.rpartition(".")
    if module in _VAE_WHOLE:
        return f"{_VAE_WHOLE[module]}.{leaf}"
    if middle := _VAE_MIDDLE.fullmatch(module):
        half, kind, index, layer = middle.groups()
        # The middle is resnet, attention, resnet.
        position = 1 if kind == "attentions" else 2 * int(index)
        return f"{half}.middle.{position}.{_RESNET.get(layer, layer)}.{leaf}"
    if down := _VAE_DOWN.fullmatch(module):
        index, layer = down.groups()
        return f"encoder.downsamples.{index}.{_RESNET.get(layer, layer)}.{leaf}"
    if up := _VAE_UP.fullmatch(module):
        block, kind, index, layer = up.groups()
        position = _LAYERS_PER_UP_BLOCK * int(block) + (3 if kind == "upsamplers" else int(index))
        return f"decoder.upsamples.{position}.{_RESNET.get(layer, layer)}.{leaf}"
    raise ValueError(f"{name!r} is not a parameter of the Wan2.1 VAE")
