"""Native names must be the exact inverse of diffusers' converter."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from wanstream.wan.checkpoint.key_names import native_transformer_name


@pytest.mark.parametrize(
    "image", [{}, {"image_dim": 1280, "added_kv_proj_dim": 5120}], ids=["plain", "image branch"]
)
def test_transformer_names_are_the_inverse_of_diffusers_converter(image: dict[str, int]) -> None:
    with torch.device("meta"):
        names = list(WanTransformer3DModel(num_layers=12, **image).state_dict())

    there_and_back = convert_wan_transformer_to_diffusers(
        {native_transformer_name(name): name for name in names}
    )

    assert there_and_back == {name: name for name in names}


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("blocks.39.norm2.bias", "blocks.39.norm3.bias"),
        ("blocks.0.scale_shift_table", "blocks.0.modulation"),
        ("scale_shift_table", "head.modulation"),
        ("blocks.7.attn2.to_out.0.weight", "blocks.7.cross_attn.o.weight"),
        ("condition_embedder.time_proj.bias", "time_projection.1.bias"),
    ],
)
def test_the_names_that_are_easy_to_get_wrong(name: str, native: str) -> None:
    assert native_transformer_name(name) == native


@pytest.mark.parametrize(
    "name", ["blocks.0.attn1.add_k_proj.weight", "blocks.0.norm3.weight", "blocks.x.norm2.bias", ""]
)
def test_a_name_outside_the_model_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a parameter"):
        native_transformer_name(name)
