"""Native names must be the exact inverse of diffusers' converter."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from wanstream.wan.checkpoint.key_names import native_transformer_name


@pytest.mark.parametrize("image", [{}, {"image_dim": 1280, "added_kv_proj_dim": 5120}], ids=str)
def test_names_are_the_inverse_of_diffusers_converter(image):
    with torch.device("meta"):
        names = list(WanTransformer3DModel(num_layers=12, **image).state_dict())
    native = {native_transformer_name(name): name for name in names}
    assert convert_wan_transformer_to_diffusers(native) == {name: name for name in names}


@pytest.mark.parametrize(
    "name", ["blocks.0.attn1.add_k_proj.weight", "blocks.0.norm3.weight", "blocks.x.norm2.bias", ""]
)
def test_name_outside_the_model_is_refused(name):
    with pytest.raises(ValueError, match="not a parameter"):
        native_transformer_name(name)
