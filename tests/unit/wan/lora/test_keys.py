"""LoRA file keys: each spelling's meaning, and keys without a meaning."""

import pytest

from wanstream.tests.support.wan.opened_experts import wan_config
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

CONFIG = wan_config(heads=1, layers=12, ffn_dim=8, text_dim=8)
PARAMETERS = list(parameter_shapes(CONFIG))
WEIGHTS = [name for name in PARAMETERS if not name.endswith(".bias")]
BLOCK = "blocks.7"
NATIVE = "diffusion_model.blocks.7"
EMBEDDER = "condition_embedder"
PEFT = "base_model.model.blocks.7"
Q = f"{BLOCK}.attn1.to_q"

# Written out by hand, from trainers' files.
KNOWN = {
    f"{NATIVE}.self_attn.q.lora_down.weight": (f"{Q}.weight", "down"),
    f"{NATIVE}.self_attn.q.alpha": (f"{Q}.weight", "alpha"),
    f"{NATIVE}.self_attn.q.diff_b": (f"{Q}.bias", "diff"),
    f"{NATIVE}.norm3.w_norm": (f"{BLOCK}.norm2.weight", "diff"),
    f"{NATIVE}.diff_m": (f"{BLOCK}.scale_shift_table", "diff"),
    "diffusion_model.head.diff_m": ("scale_shift_table", "diff"),
    "blocks.7.cross_attn.o.lora_B.default.weight": (f"{BLOCK}.attn2.to_out.0.weight", "up"),
    "blocks.7.self_attn.q.bias.diff": (f"{Q}.bias", "diff"),
    "transformer.blocks.7.attn1.to_q.lora_B.bias": (f"{Q}.bias", "up bias"),
    "base_model.model.transformer.blocks.7.ffn.net.2.lora_A": (f"{BLOCK}.ffn.net.2.weight", "down"),
    "lora_unet__blocks_11_cross_attn_k.lora_up.weight": ("blocks.11.attn2.to_k.weight", "up"),
    "lora_transformer_blocks_7_attn2_to_out_0.alpha": (f"{BLOCK}.attn2.to_out.0.weight", "alpha"),
    f"{PEFT}.attn1.to_q.lora_A.my_style.weight": (f"{Q}.weight", "down"),
    f"{PEFT}.attn1.to_q.lora_B.my_style.bias": (f"{Q}.bias", "up bias"),
    f"{PEFT}.attn1.to_q.lora_magnitude_vector.default.weight": (f"{Q}.weight", "magnitude"),
    f"{PEFT}.attn1.to_q.lokr_w2_a.default": (f"{Q}.weight", "lokr_w2_a"),
    "blocks.7.attn1.to_q.lora.down.weight": (f"{Q}.weight", "down"),
    "blocks.7.attn1.to_q_lora.up.weight": (f"{Q}.weight", "up"),
    f"{NATIVE}.self_attn.q.lora_linear_layer.down.weight": (f"{Q}.weight", "down"),
    f"{NATIVE}.self_attn.q.lora_B": (f"{Q}.weight", "up"),
    "transformer_2.blocks.7.attn1.to_q.lora_A.weight": (f"{Q}.weight", "down"),
    "lycoris_blocks_7_attn1_to_q.lora_up.weight": (f"{Q}.weight", "up"),
    f"{NATIVE}.cross_attn.k_img.alpha": (f"{BLOCK}.attn2.add_k_proj.weight", "alpha"),
    "transformer.blocks.7.attn2.add_k_proj.alpha": (f"{BLOCK}.attn2.add_k_proj.weight", "alpha"),
    "diffusion_model.img_emb.proj.4.diff_b": (f"{EMBEDDER}.image_embedder.norm2.bias", "diff"),
}
WORDS = """
    blocks.7.self_attn.q blocks.7.self_attn.q.weight blocks.7.self_attn.q.diff_m
    diffusion_model.diff_m blocks.x.self_attn.q.diff blocks.7.self_attn.diff
    xblocks.7.self_attn.q.diff blocks.7.self_attn.q.extra.diff
    diffusion_model.blocks.7.cross_attn.norm_k_img.diff_b
    diffusion_model.blocks.7.self_attn.norm_q.diff_b diffusion_model.blocks.7.modulation.diff_b
    transformer_blocks.7.attn1.to_q.lora_down.weight lycoris_transformer_blocks_7_attn1_to_q.lokr_w1
    lora_unet_down_blocks_7_attn1_to_q.lora_down.weight
    lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight
"""
MEANINGLESS = [
    *WORDS.split(),
    "",
    "blocks.\N{ARABIC-INDIC DIGIT SEVEN}.self_attn.q.diff",
    f"blocks.{'7' * 5000}.self_attn.q.diff",
    f"lora_unet_{'model_' * 50_000}blocks_7_self_attn_q.diff",
    f"{'model.' * 50_000}blocks.7.self_attn.q.diff",
]


@pytest.mark.parametrize(("key", "meaning"), KNOWN.items(), ids=KNOWN)
def test_known_keys(key, meaning):
    assert key_meaning(key) == KeyMeaning(parameter=meaning[0], role=meaning[1])
    assert (other_algorithm(key), other_model([key]), unknown_prefix(key)) == (None, None, None)


@pytest.mark.parametrize("key", MEANINGLESS)
def test_other_keys_mean_nothing(key):
    assert key_meaning(key) is None


# Prefixes written by trainers and frameworks.
PREFIXES = (
    *("base_model.model._orig_mod.", "module.", "unet.", "dit.", "transformer_2.", "net.", "wan."),
    *("high_noise_model.", "low_noise_model.", "pipe.transformer.", "video_model.", "generator."),
    *("_fsdp_wrapped_module.", "model._orig_mod.dit.", "ema_model.module.", "wan2_2.high_noise."),
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
        "lora_unet_blocks.7.attn1.to_q",
        "lora.transformer.blocks.7.self_attn.q",
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
        ("lora_unet_foo_blocks_7_ffn_0", "lora_unet_foo_"),
        ("xblocks.7.self_attn.q", None),
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
        ("lora_unet_up_blocks_1_transformer_blocks_0_attn1_to_q.alpha", "Stable Diffusion or SDXL"),
        ("transformer.transformer_blocks.0.attn1.to_q.lora_A.weight", "LTX-Video"),
        ("transformer_blocks.0.img_mod.1.lora_A.weight", "Qwen-Image"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight", "a text encoder"),
        ("diffusion_model.context_refiner.0.attention.to_q.lora_A.weight", "Lumina or Z-Image"),
    ],
)
def test_other_models_are_named(key, model):
    assert other_model([key]) == model
    assert key_meaning(key) is None


def test_every_parameter_under_both_names_and_every_prefix():
    for name in PARAMETERS:
        expected = KeyMeaning(parameter=name, role="diff")
        for full in (name, native_transformer_name(name)):
            assert key_meaning(f"diffusion_model.{full}.diff") == expected, full
            if name not in WEIGHTS:
                continue
            module = full.removesuffix(".weight")
            for prefix in ("", "model.diffusion_model.", "pipe.dit.", "base_model.model."):
                assert key_meaning(f"{prefix}{module}.diff") == expected, full
            for prefix in (*FLAT_PREFIXES, "lora_unet__"):
                assert key_meaning(f"{prefix}{module.replace('.', '_')}.diff") == expected, full


def test_every_bias_has_a_difference():
    biases = {name for name in PARAMETERS if name.endswith(".bias")}
    found = {key_meaning(f"{name.removesuffix('.weight')}.diff_b") for name in WEIGHTS} - {None}
    assert {meaning.parameter for meaning in found} == biases


@pytest.mark.parametrize("ending", [each for each in ENDINGS if ENDINGS[each][1] != "modulation"])
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
        ("lora_unet_blocks_0_self_attn_q.lora_down.scale_weight", "fp8 with scales"),
        ("transformer.blocks.0.attn1.to_q.lora_A.weight_scale", "fp8 with scales"),
    ],
)
def test_other_algorithms_are_named(key, what):
    assert what in (other_algorithm(key) or "")
