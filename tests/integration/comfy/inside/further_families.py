"""Tiny models from further ComfyUI families, most newer than 0.18.1, with inputs.

Some have block lists that run before a pass, or in another order than built.
"""

import comfy.model_base
import torch

from . import families as nf
from .families import HEIGHT, TIME, WIDTH, Family

LUMINA = {
    "in_channels": 16, "dim": 256, "n_layers": 4, "n_refiner_layers": 2, "n_heads": 2,
    "n_kv_heads": 2, "cap_feat_dim": 64, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "qk_norm": True, "z_image_modulation": True,
    "time_scale": 1000.0, "pad_tokens_multiple": 32, "patch_size": 2,
}  # fmt: skip
LUMINA_2 = {
    **LUMINA, "z_image_modulation": False, "pad_tokens_multiple": None, "time_scale": 1.0,
    "axes_dims": [32, 32, 64],
}  # fmt: skip
MINIMAX_H3 = {
    "hidden_size": 128, "num_layers": 5, "token_refiner_num_layers": 2, "num_attention_heads": 1,
    "attention_head_dim": 128, "ffn_hidden_size": 256, "latents_dim": 24, "audio_latents_dim": 32,
    "text_dim": 192, "timestep_input_dim": 64, "time_embed_hidden_size": 128, "time_embed_dim": 64,
    "rope_inv_freq_len": 16,
}  # fmt: skip
FLUX_2 = {
    "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 192,
    "hidden_size": 128, "mlp_ratio": 3.0, "num_heads": 1, "depth": 2, "depth_single_blocks": 4,
    "axes_dim": [32] * 4, "theta": 2000, "patch_size": 1, "qkv_bias": False,
    "guidance_embed": True, "txt_ids_dims": [3], "global_modulation": True, "mlp_silu_act": True,
    "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0,
}  # fmt: skip
KREA_2 = {
    "features": 256, "tdim": 256, "txtdim": 128, "heads": 2, "kvheads": 1, "multiplier": 4,
    "layers": 5, "patch": 2, "channels": 16, "txtlayers": 3, "txtheads": 1, "txtkvheads": 1,
}  # fmt: skip
CHROMA = {
    "in_channels": 64, "out_channels": 64, "context_in_dim": 192, "hidden_size": 128,
    "mlp_ratio": 4.0, "num_heads": 1, "depth": 2, "depth_single_blocks": 4,
    "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "in_dim": 64,
    "out_dim": 128, "hidden_dim": 128, "n_layers": 3, "txt_ids_dims": [], "vec_in_dim": None,
}  # fmt: skip
LTXV = {
    "num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 64,
    "cross_attention_dim": 128, "caption_channels": 128,
}  # fmt: skip
LTX_2_3 = {
    **nf.LTX, "apply_gated_attention": True, "caption_proj_before_connector": True,
    "cross_attention_adaln": True, "connector_apply_gated_attention": True,
    "audio_connector_num_attention_heads": 1, "audio_connector_attention_head_dim": 64,
    "caption_projection_first_linear": False, "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
}  # fmt: skip
SD3 = {
    "patch_size": 2, "in_channels": 16, "depth": 4, "adm_in_channels": 64, "input_size": None,
    "context_embedder_config": {"target": "torch.nn.Linear",
        "params": {"in_features": 128, "out_features": 256}},
    "num_patches": 192 * 192, "pos_embed_max_size": 192, "qk_norm": "rms",
    "pos_embed_scaling_factor": None, "x_block_self_attn_layers": [0, 1],
}  # fmt: skip
KANDINSKY_5 = {
    "in_text_dim": 192, "in_text_dim2": 64, "time_dim": 64, "model_dim": 128, "ff_dim": 256,
    "visual_embed_dim": 132, "num_text_blocks": 2, "num_visual_blocks": 4,
    "axes_dims": (16, 24, 24),
}  # fmt: skip
ERNIE = {
    "hidden_size": 128, "num_attention_heads": 1, "num_layers": 4, "ffn_hidden_size": 256,
    "text_in_dim": 96,
}  # fmt: skip
OMNIGEN_2 = {
    "hidden_size": 192, "num_layers": 4, "num_refiner_layers": 2, "num_attention_heads": 2,
    "num_kv_heads": 1, "multiple_of": 64, "text_feat_dim": 96, "timestep_scale": 1000.0,
    "axes_dim_rope": (32, 32, 32), "axes_lens": (1024, 1664, 1664),
}  # fmt: skip
IDEOGRAM_4 = {
    "in_channels": 128, "num_layers": 4, "num_attention_heads": 1, "attention_head_dim": 128,
    "intermediate_size": 256, "adaln_dim": 64, "llm_features_dim": 96,
    "mrope_section": (24, 20, 20),
}  # fmt: skip
HIDREAM = {
    "attention_head_dim": 128, "axes_dims_rope": [64, 32, 32], "caption_channels": [64, 64],
    "max_resolution": [128, 128], "in_channels": 16, "llama_layers": [0, 1, 2, 3, 3, 3],
    "num_attention_heads": 1, "num_routed_experts": 4, "num_activated_experts": 2,
    "num_layers": 2, "num_single_layers": 3, "out_channels": 16, "patch_size": 2,
    "text_emb_dim": 96,
}  # fmt: skip
COSMOS_2 = {
    "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16,
    "patch_spatial": 2, "patch_temporal": 1, "concat_padding_mask": True, "model_channels": 128,
    "num_blocks": 4, "num_heads": 1, "crossattn_emb_channels": 96, "pos_emb_cls": "rope3d",
    "pos_emb_learnable": True, "pos_emb_interpolation": "crop", "use_adaln_lora": True,
    "adaln_lora_dim": 32, "extra_per_block_abs_pos_emb": False,
}  # fmt: skip

IS_OLD = not hasattr(comfy.model_base, "LTXAV")
"""True in 0.3.64, where Lumina 2 and Chroma have fewer settings, and Z-Image is missing."""
if IS_OLD:
    for newer in ("rope_theta", "z_image_modulation", "time_scale", "pad_tokens_multiple"):
        del LUMINA_2[newer]
    for newer in ("txt_ids_dims", "vec_in_dim"):
        del CHROMA[newer]


def _family(
    name, base, network, settings, lists, sizes, text, conditions=nf._nothing, extra=None, **more,
):  # fmt: skip
    return Family(
        name=name, base=base, network=f"comfy.ldm.{network}", settings=settings, lists=lists,
        sizes=sizes, text=text, conditions=conditions, unet_config={**settings, **(extra or {})},
        **more,
    )  # fmt: skip


def _pooled(width):
    return lambda positive: {"pooled_output": nf._normal(1, width, seed=47 + positive)}


def _keyframes(_positive):
    frame = {"latent": nf._normal(1, 24, 1, 4, 6, seed=60), "resolved_frame_index": 0}
    return {"minimax_keyframes": [frame]}


def _scail2(positive):
    masks = {
        "ref_mask_28ch": nf._normal(1, TIME + 1, 28, HEIGHT, WIDTH, seed=70).sigmoid(),
        "driving_mask_28ch": nf._normal(1, TIME, 28, HEIGHT // 2, WIDTH, seed=71).sigmoid(),
    }
    return {**nf._scail(positive), **masks}


def _pose(positive):
    latent = nf._normal(*nf._wan(time=TIME - 1), seed=37)
    return {**nf._image_to_video(positive), "pose_video_latent": latent}


def _contexts(_positive):
    latents = [nf._normal(*nf._wan(), seed=72), nf._normal(*nf._wan(time=1), seed=73)]
    return {"context_latents": latents}


def _masked(positive):
    return {"attention_mask": torch.ones(1, 12 if positive else 9, dtype=torch.long)}


def _hidream(positive):
    return {
        "pooled_output": nf._normal(1, 96, seed=47 + positive),
        "conditioning_llama3": nf._normal(1, 4, 12, 64, seed=80 + positive),
    }


MASK = {"attention_mask": torch.ones(1, 12, dtype=torch.long)}
IMAGE = ((1, 16, HEIGHT, WIDTH),)
IMAGE_FLUX_2 = ((1, 128, HEIGHT, WIDTH),)
IMAGE_OF_A_VIDEO = ((1, 16, 1, HEIGHT, WIDTH),)
OF_FLUX = ("double_blocks", "single_blocks")
OF_LUMINA = ("layers", "noise_refiner", "context_refiner")


def _minimax(name, conditions=nf._nothing, **changed):
    return _family(
        name, "MiniMaxH3", "minimax.model.MiniMaxH3Model", {**MINIMAX_H3, **changed},
        ("blocks", "token_refiner.blocks"), ((1, 24, 2, 4, 6), (1, 32, 2, 8)), (192, 12, 9),
        conditions,
    )  # fmt: skip


def _lumina(name, settings, conditions=nf._nothing):
    given = ("Lumina2", "lumina.model.NextDiT", settings, OF_LUMINA, IMAGE, (64, 12, 9))
    return _family(name, *given, conditions)


def _krea(name, conditions=nf._nothing, **more):
    return _family(
        name, "Krea2", "krea2.model.SingleStreamDiT", {**KREA_2, **more},
        ("blocks", "txtfusion.layerwise_blocks", "txtfusion.refiner_blocks"), IMAGE_OF_A_VIDEO,
        (384, 12, 9), conditions,
    )  # fmt: skip


EVERY_FURTHER = (
    _minimax("minimax_h3"),
    _minimax("minimax_h3_i2v", _keyframes),
    _minimax("minimax_h3_curve", adaln_curve_grid=16, time_embed_dim=8),
    _lumina("z_image", LUMINA),
    _lumina("z_image_ref", LUMINA, nf._references(1, 16, HEIGHT, WIDTH)),
    _lumina("lumina2", LUMINA_2, _masked),
    _krea("krea2"),
    _krea("krea2_ref", nf._references(1, 16, 1, HEIGHT, WIDTH),
        default_ref_method="index_timestep_zero"),
    _family("qwen_image_t2i", "QwenImage", "qwen_image.model.QwenImageTransformer2DModel",
        {"num_layers": 4, **nf.QWEN}, ("transformer_blocks",), IMAGE_OF_A_VIDEO, (256, 12, 9)),
    _family("flux2", "Flux2", "flux.model.Flux", FLUX_2, OF_FLUX, IMAGE_FLUX_2, (192, 12, 9),
        lambda _: {"guidance": 3.5}),
    _family("flux2_klein", "Flux2", "flux.model.Flux", {**FLUX_2, "guidance_embed": False}, OF_FLUX,
        IMAGE_FLUX_2, (192, 12, 9), nf._references(1, 128, HEIGHT, WIDTH)),
    _family("chroma", "Chroma", "chroma.model.Chroma", CHROMA, OF_FLUX, IMAGE, (192, 12, 9),
        renames=(("_norm.weight", "_norm.scale"),)),
    nf._wan_family("wan_scail2", "WAN21_SCAIL2", "model.SCAIL2WanModel", channels=20,
        model_type="scail2", conditions=_scail2, unet_config={"model_type": "scail2"}),
    nf._wan_family("wan_animate2", "WAN_Animate2", "model_animate2.WanAnimate2Model", channels=36,
        model_type="animate2", conditions=_pose, unet_config={"model_type": "animate2"}),
    nf._wan_family("wan_bernini", "WAN21", "model.WanModel", model_type="t2v",
        conditions=_contexts),
    nf._wan_family("wan_dancer", "WAN22_WanDancer", "model_wandancer.WanDancerModel", channels=36,
        model_type="wandancer", layers=4, conditions=nf._image_to_video,
        unet_config={"model_type": "wandancer", "audio_inject_layers": [0, 2]}),
    _family("ltxv", "LTXV", "lightricks.model.LTXVModel", LTXV, ("transformer_blocks",),
        ((1, 128, 2, 4, 3),), (128, 12, 12), lambda _: {"frame_rate": 25.0, **MASK}),
    _family("ltx_2.3", "LTXAV", "lightricks.av_model.LTXAVModel", {"num_layers": 4}, nf.LTX_LISTS,
        ((1, 128, 2, 4, 3), (1, 8, 6, 16)), (128 + 64, 12, 9), nf._ltx, transformer=LTX_2_3,
        prefix="model.diffusion_model."),
    _family("sd3", "SD3", "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper", SD3,
        ("joint_blocks",), IMAGE, (128, 12, 9), _pooled(64)),
    _family("kandinsky5", "Kandinsky5", "kandinsky5.model.Kandinsky5", KANDINSKY_5,
        ("text_transformer_blocks", "visual_transformer_blocks"), (nf._wan(),), (192, 12, 12),
        _pooled(64)),
    _family("ernie", "ErnieImage", "ernie.model.ErnieImageModel", ERNIE, ("layers",), IMAGE_FLUX_2,
        (96, 12, 9), extra={"image_model": "ernie"}),
    _family("omnigen2", "Omnigen2", "omnigen.omnigen2.OmniGen2Transformer2DModel", OMNIGEN_2,
        (*OF_LUMINA, "ref_image_refiner"), IMAGE, (96, 12, 12),
        lambda _: {"reference_latents": [nf._normal(1, 16, HEIGHT, WIDTH, seed=48)], **MASK}),
    _family("ideogram4", "Ideogram4", "ideogram4.model.Ideogram4Transformer2DModel", IDEOGRAM_4,
        ("layers",), IMAGE_FLUX_2, (96, 12, 9),
        patches={"comfy.supported_models.Ideogram4.unet_extra_config": lambda: IDEOGRAM_4}),
    _family("hidream", "HiDream", "hidream.model.HiDreamImageTransformer2DModel", HIDREAM,
        ("double_stream_blocks", "single_stream_blocks"), IMAGE, (64, 12, 12), _hidream),
    _family("cosmos_predict2", "CosmosPredict2", "cosmos.predict2.MiniTrainDIT", COSMOS_2,
        ("blocks",), (nf._wan(),), (96, 12, 12)),
)  # fmt: skip
FURTHER = {
    family.name: family
    for family in EVERY_FURTHER
    if family.have and not (IS_OLD and family.name.startswith("z_image"))
}
