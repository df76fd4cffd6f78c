"""LoRA file keys: each spelling's meaning, and keys without a meaning."""

from __future__ import annotations

import re

import pytest

from wanstream.wan.checkpoint.detect import WanConfig
from wanstream.wan.checkpoint.key_names import native_transformer_name
from wanstream.wan.checkpoint.meta_model import parameter_shapes
from wanstream.wan.lora.keys import (
    ENDINGS,
    FLAT_PREFIXES,
    KeyMeaning,
    key_meaning,
    other_algorithm,
    other_model,
    unknown_prefix,
)

CONFIG = WanConfig(
    num_attention_heads=1,
    num_layers=12,
    ffn_dim=8,
    in_channels=16,
    out_channels=16,
    text_dim=8,
    freq_dim=8,
    patch_size=(1, 2, 2),
)
PARAMETERS = list(parameter_shapes(CONFIG))
WEIGHTS = [name for name in PARAMETERS if not name.endswith(".bias")]
Q = "blocks.7.attn1.to_q"

# Written out by hand, from trainers' files.
KNOWN = {
    "diffusion_model.blocks.7.self_attn.q.lora_down.weight": (f"{Q}.weight", "down"),
    "diffusion_model.blocks.7.self_attn.q.lora_up.weight": (f"{Q}.weight", "up"),
    "diffusion_model.blocks.7.self_attn.q.alpha": (f"{Q}.weight", "alpha"),
    "diffusion_model.blocks.7.self_attn.q.diff_b": (f"{Q}.bias", "diff"),
    "diffusion_model.blocks.7.self_attn.norm_k.diff": ("blocks.7.attn1.norm_k.weight", "diff"),
    "diffusion_model.blocks.7.norm3.diff": ("blocks.7.norm2.weight", "diff"),
    "diffusion_model.blocks.7.norm3.diff_b": ("blocks.7.norm2.bias", "diff"),
    "diffusion_model.blocks.7.norm3.w_norm": ("blocks.7.norm2.weight", "diff"),
    "diffusion_model.blocks.7.norm3.b_norm": ("blocks.7.norm2.bias", "diff"),
    "diffusion_model.blocks.7.modulation.diff": ("blocks.7.scale_shift_table", "diff"),
    "diffusion_model.blocks.7.diff_m": ("blocks.7.scale_shift_table", "diff"),
    "diffusion_model.head.diff_m": ("scale_shift_table", "diff"),
    "diffusion_model.head.modulation.diff": ("scale_shift_table", "diff"),
    "diffusion_model.head.head.diff": ("proj_out.weight", "diff"),
    "diffusion_model.time_projection.1.diff_b": ("condition_embedder.time_proj.bias", "diff"),
    "diffusion_model.text_embedding.2.lora_up.weight": (
        "condition_embedder.text_embedder.linear_2.weight",
        "up",
    ),
    "diffusion_model.patch_embedding.lora_A.weight": ("patch_embedding.weight", "down"),
    "blocks.7.cross_attn.o.lora_B.default.weight": ("blocks.7.attn2.to_out.0.weight", "up"),
    "blocks.7.self_attn.q.bias.diff": (f"{Q}.bias", "diff"),
    "transformer.blocks.7.attn1.to_q.lora_B.bias": (f"{Q}.bias", "up bias"),
    "base_model.model.transformer.blocks.7.ffn.net.0.proj.lora_A": (
        "blocks.7.ffn.net.0.proj.weight",
        "down",
    ),
    "lora_unet_blocks_7_ffn_2.lora_down.weight": ("blocks.7.ffn.net.2.weight", "down"),
    "lora_unet__blocks_11_cross_attn_k.lora_up.weight": ("blocks.11.attn2.to_k.weight", "up"),
    "lora_unet_time_embedding_0.alpha": (
        "condition_embedder.time_embedder.linear_1.weight",
        "alpha",
    ),
    "lora_transformer_blocks_7_attn2_to_out_0.lora_up.weight": (
        "blocks.7.attn2.to_out.0.weight",
        "up",
    ),
}

KNOWN |= {
    "base_model.model.blocks.7.attn1.to_q.lora_A.my_style.weight": (f"{Q}.weight", "down"),
    "base_model.model.blocks.7.attn1.to_q.lora_B.my_style": (f"{Q}.weight", "up"),
    "base_model.model.blocks.7.attn1.to_q.lora_B.my_style.bias": (f"{Q}.bias", "up bias"),
    "base_model.model.blocks.7.attn1.to_q.lora_magnitude_vector.default.weight": (
        f"{Q}.weight",
        "magnitude",
    ),
    "base_model.model.blocks.7.attn1.to_q.lokr_w2_a.default": (f"{Q}.weight", "lokr_w2_a"),
    "diffusion_model.blocks.7.cross_attn.k_img.lora_down.weight": (
        "blocks.7.attn2.add_k_proj.weight",
        "down",
    ),
    "lora_unet_blocks_7_cross_attn_v_img.lora_up.weight": (
        "blocks.7.attn2.add_v_proj.weight",
        "up",
    ),
    "diffusion_model.blocks.7.cross_attn.norm_k_img.diff": (
        "blocks.7.attn2.norm_added_k.weight",
        "diff",
    ),
    "transformer.blocks.7.attn2.add_k_proj.lora_B.weight": (
        "blocks.7.attn2.add_k_proj.weight",
        "up",
    ),
    "diffusion_model.img_emb.proj.1.lora_up.weight": (
        "condition_embedder.image_embedder.ff.net.0.proj.weight",
        "up",
    ),
    "diffusion_model.img_emb.proj.4.diff_b": (
        "condition_embedder.image_embedder.norm2.bias",
        "diff",
    ),
}

MEANINGLESS = [
    "",
    "blocks",
    "blocks.7.self_attn.q",
    "blocks.7.self_attn.q.weight",
    "blocks.7.self_attn.q.lora_down",
    "blocks.7.self_attn.q.diff_m",
    "diffusion_model.diff_m",
    "blocks.x.self_attn.q.diff",
    "blocks.7.self_attn.diff",
    "blocks.7.norm2.norm3.diff",
    "xblocks.7.self_attn.q.diff",
    "blocks.7.self_attn.q.extra.diff",
    "diffusion_model.blocks.7.cross_attn.norm_k_img.diff_b",
    "diffusion_model.blocks.7.self_attn.norm_q.diff_b",
    "diffusion_model.blocks.7.modulation.diff_b",
    "diffusion_model.double_blocks.0.img_attn.qkv.lora_up.weight",
    "transformer_blocks.7.attn1.to_q.lora_down.weight",
    "transformer.transformer_blocks.7.attn1.to_q.lora_down.weight",
    "lycoris_transformer_blocks_7_attn1_to_q.lokr_w1",
    "lora_unet_down_blocks_7_attn1_to_q.lora_down.weight",
    "vace.blocks.7.self_attn.q.lora_down.weight",
    "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight",
    "unknown.blocks.7.self_attn.q.diff",
    "blocks.\N{ARABIC-INDIC DIGIT SEVEN}.self_attn.q.diff",
    f"blocks.{'7' * 5000}.self_attn.q.diff",
    f"lora_unet_{'model_' * 50_000}blocks_7_self_attn_q.diff",
    f"{'model.' * 50_000}blocks.7.self_attn.q.diff",
]


@pytest.mark.parametrize(("key", "meaning"), KNOWN.items(), ids=KNOWN)
def test_known_keys(key, meaning):
    assert key_meaning(key) == KeyMeaning(parameter=meaning[0], role=meaning[1])


@pytest.mark.parametrize("key", MEANINGLESS)
def test_other_keys_mean_nothing(key):
    assert key_meaning(key) is None


# Prefixes written by trainers and frameworks.
PREFIXES = (
    *(
        "_orig_mod.",
        "base_model.model._orig_mod.",
        "diffusion_model._orig_mod.",
        "module.",
        "model.",
        "unet.",
        "dit.",
    ),
    *(
        "high_noise_model.",
        "low_noise_model.",
        "net.",
        "wan.",
        "base_model.model.model.",
        "transformer_2.",
    ),
    *(
        "module._orig_mod.",
        "_fsdp_wrapped_module.",
        "model._orig_mod.dit.",
        "wan_model.",
        "pipe.transformer.",
    ),
    *("video_model.", "generator.", "model.net.", "ema_model.module.", "wan2_2.high_noise."),
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_wrappers(prefix):
    expected = KeyMeaning(parameter=f"{Q}.weight", role="down")
    assert key_meaning(f"{prefix}blocks.7.self_attn.q.lora_A.weight") == expected
    flat = f"{prefix}blocks.7.attn1.to_q".replace(".", "_")
    # In underscores, this is another model's block.
    expected_flat = None if "transformer_blocks" in flat else expected
    assert key_meaning(f"lora_unet_{flat}.lora_down.weight") == expected_flat
    assert key_meaning(f"{prefix}lora_unet_blocks_7_self_attn_q.lora_down.weight") == expected
    outer = KeyMeaning(parameter="proj_out.bias", role="diff")
    assert key_meaning(f"{prefix}head.head.diff_b") == outer


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_blocks_7_self_attn.q",
        "lora_unet_blocks_7.self_attn.q",
        "lora_unet_blocks.7.attn1.to_q",
        "lora_unet.blocks.7.attn1.to_q",
        "lora.transformer.blocks.7.self_attn.q",
        "lycoris_blocks_7_attn1.to_q",
        "blocks.7._orig_mod.self_attn.q",
        "diffusion_model.blocks.7._checkpoint_wrapped_module.self_attn._orig_mod.q",
        "lora_unet_blocks_7__orig_mod_self_attn_q",
    ],
)
def test_mixed_and_wrapped_names(name):
    assert key_meaning(f"{name}.lora_up.weight") == KeyMeaning(parameter=f"{Q}.weight", role="up")


@pytest.mark.parametrize(
    ("layer", "prefix"),
    [
        ("foo.blocks.7.self_attn.q", "foo."),
        ("model.vace.blocks.7.attn1.to_q", "model.vace."),
        ("lora_unet_foo_blocks_7_ffn_0", "lora_unet_foo_"),
        ("xblocks.7.self_attn.q", None),
        ("foo.blocks.7.attn.q", None),
        ("foo.blocks.7.self_attn.q.extra", None),
        ("diffusion_model.blocks.7.self_attn.q", None),
    ],
)
def test_unknown_prefixes_are_named(layer, prefix):
    assert unknown_prefix(f"{layer}.lora_up.weight") == prefix
    assert key_meaning(f"foo.{layer}.lora_up.weight") is None


@pytest.mark.parametrize(
    ("key", "model"),
    [
        ("diffusion_model.blocks.0.self_attn.q_loras.down.weight", "Stand-In"),
        ("diffusion_model.vace_blocks.0.self_attn.q.lora_A.weight", "Wan VACE"),
        ("lora_unet_single_transformer_blocks_0_attn_to_q.lora_down.weight", "Flux"),
        ("lora_unet_double_blocks_0_img_mlp_fc1.lora_down.weight", "HunyuanVideo"),
        ("diffusion_model.double_blocks.0.img_attn.qkv.lora_up.weight", "Flux or HunyuanVideo"),
        (
            "lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q.alpha",
            "Stable Diffusion or SDXL",
        ),
        ("transformer.transformer_blocks.0.attn1.to_q.lora_A.weight", "LTX-Video"),
        ("transformer_blocks.0.img_mod.1.lora_A.weight", "Qwen-Image"),
        ("diffusion_model.context_refiner.0.attention.to_q.lora_A.weight", "Lumina or Z-Image"),
    ],
)
def test_other_models_are_named(key, model):
    assert other_model([key]) == model
    assert key_meaning(key) is None


def test_every_weight_is_found_under_every_prefix_and_both_names():
    for name in WEIGHTS:
        module = name.removesuffix(".weight")
        native = native_transformer_name(name).removesuffix(".weight")
        for spelling in (module, native):
            for prefix in (
                "",
                "model.diffusion_model.",
                "pipe.dit.",
                "base_model.model.diffusion_model.",
            ):
                assert key_meaning(f"{prefix}{spelling}.diff") == KeyMeaning(
                    parameter=name, role="diff"
                ), spelling
            for prefix in (*FLAT_PREFIXES, "lora_unet__"):
                flat = spelling.replace(".", "_")
                assert key_meaning(f"{prefix}{flat}.diff") == KeyMeaning(
                    parameter=name, role="diff"
                ), flat


def test_every_parameter_can_be_named_in_full():
    for name in PARAMETERS:
        for spelling in (name, native_transformer_name(name)):
            assert key_meaning(f"diffusion_model.{spelling}.diff") == KeyMeaning(
                parameter=name, role="diff"
            ), spelling


def test_every_bias_has_its_difference():
    biases = [name for name in PARAMETERS if name.endswith(".bias")]
    found = {key_meaning(f"{name.removesuffix('.weight')}.diff_b") for name in WEIGHTS} - {None}
    assert {meaning.parameter for meaning in found} == set(biases)


def test_no_two_spellings_of_one_kind_mean_different_parameters():
    """Every spelling of a weight maps to that weight only."""
    flat = {}
    for name in WEIGHTS:
        for spelling in {name, native_transformer_name(name)}:
            key = re.sub(r"\.", "_", spelling.removesuffix(".weight"))
            assert flat.setdefault(key, name) == name


@pytest.mark.parametrize(
    "ending", [ending for ending, (_, leaf) in ENDINGS.items() if leaf != "modulation"]
)
def test_endings_are_told_apart(ending):
    role, leaf = ENDINGS[ending]
    expected = KeyMeaning(parameter=f"{Q}.{leaf}", role=role)
    assert key_meaning(f"diffusion_model.blocks.7.self_attn.q{ending}") == expected


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("lycoris_blocks_0_self_attn_q.oft_blocks", "OFT"),
        ("blocks.0.self_attn.q.a1.weight", "GLoRA"),
        ("blocks.0.self_attn.q.lora_mid.weight", "third factor"),
        ("patch_embedding.reshape_weight", "another shape"),
        ("blocks.0.norm3.set_weight", "replaces"),
        ("transformer.blocks.0.attn1.to_q.lora_A.weight_scale", "fp8 with scales"),
        ("lora_unet_blocks_0_self_attn_q.lora_down.scale_weight", "fp8 with scales"),
    ],
)
def test_other_algorithms_are_named(key, what):
    assert what in (other_algorithm(key) or "")


@pytest.mark.parametrize("key", KNOWN)
def test_known_keys_are_no_other_algorithm_and_no_other_model(key):
    assert other_algorithm(key) is None
    assert other_model([key]) is None
    assert unknown_prefix(key) is None
