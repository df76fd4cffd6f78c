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
