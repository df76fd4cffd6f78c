"""A custom node for tests: `TestClip` replaces `CLIPLoader` and loads sample text encoders.

`CLIPLoader` identifies UMT5-XXL by a tensor in block 24 and takes every size from a bundled
configuration. This node has the same inputs and calls the same loader, but adds such a tensor and
derives the sizes from the model file. The module belongs in ComfyUI's `custom_nodes` folder and
imports ComfyUI's modules.
"""

import re

import comfy.sd
import comfy.utils
import folder_paths
import torch

MARK = "encoder.block.23.layer.1.DenseReluDense.wi_1.weight"
FIRST = "encoder.block.0.layer."


def read(path):
    """A file's tensors, with old marks of quantised layers converted."""
    if not hasattr(comfy.utils, "convert_old_quants"):  # before ComfyUI 0.4
        return comfy.utils.load_torch_file(path, safe_load=True)
    tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    return comfy.utils.convert_old_quants(tensors, model_prefix="", metadata=metadata)[0]


def sizes(tensors):
    """Encoder sizes, by ComfyUI's own configuration names."""
    heads = tensors[FIRST + "0.SelfAttention.relative_attention_bias.weight"].shape[1]
    blocks = {found[1] for name in tensors if (found := re.match(r"encoder\.block\.(\d+)\.", name))}
    return {
        "num_layers": len(blocks),
        "num_heads": heads,
        "d_kv": tensors[FIRST + "0.SelfAttention.q.weight"].shape[0] // heads,
        "d_ff": tensors[FIRST + "1.DenseReluDense.wi_0.weight"].shape[0],
        "vocab_size": tensors["shared.weight"].shape[0],
    }


class TestClip:
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "clip_name": (folder_paths.get_filename_list("text_encoders"),),
                "type": (["wan"],),
            },
            "optional": {"device": (["default", "cpu"],)},
        }

    def load(self, clip_name, type="wan", device="default"):
        path = folder_paths.get_full_path_or_raise("text_encoders", clip_name)
        tensors = read(path)
        config = sizes(tensors)
        tensors[MARK] = torch.zeros(1).expand(10240, 4096)
        clip = comfy.sd.load_text_encoder_state_dicts(
            [tensors],
            clip_type=comfy.sd.CLIPType.WAN,
            model_options={"umt5xxl_model_config": config},
        )
        return (clip,)


NODE_CLASS_MAPPINGS = {"TestClip": TestClip}
