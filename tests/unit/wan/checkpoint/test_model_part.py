"""Prefixes, whole checkpoints, unused tensors: the bare file's values, refusals with a key."""

from __future__ import annotations

import json
from itertools import cycle

import pytest
import torch
from safetensors import safe_open

from wanstream.tests.support.offload.edited_files import Change, renamed, rewrite, zeros
from wanstream.tests.support.wan.opened_experts import assert_holds
from wanstream.wan.checkpoint.files import WEIGHTS, CheckpointError
from wanstream.wan.checkpoint.open import open_expert

SMALL = {"layers": 1, "heads": 1, "ffn_dim": 128, "text_dim": 64}
LAYER = "blocks.0.self_attn.q"
WHOLE = "model.diffusion_model."
HEADER = "_quantization_metadata"
FP8 = (None, "scaled_fp8", "comfy_quant")
PREFIXES = [
    *("diffusion_model.", "net.", "model.model.", "transformer.", "high_noise_model."),
    *(WHOLE, "module.model.diffusion_model.", "module.model_ema.module."),
]
OTHERS = [
    *("model.model_sampling.sigmas", "v_pred", "model_ema.diffusion_model.blocks.0.ffn.0.weight"),
    *("vae.encoder.conv1.weight", "first_stage_model.decoder.middle.0.residual.0.gamma"),
    *("text_encoders.umt5xxl.shared.weight", "text_encoders.umt5xxl.blocks.0.ffn.0.weight"),
    *("cond_stage_model.shared.weight", "conditioner.embedders.0.model.patch_embedding.weight"),
]


@pytest.fixture
def changed(tiny_expert_file, tmp_path):
    """`changed(rename, more=None, layers="", **file)`: a tiny file under other keys, opened.

    The values must equal the original's.
    """

    def opened(rename, more=None, layers="", **file):
        source = tiny_expert_file(**SMALL, **file)
        with safe_open(source, framework="pt") as original:
            header = json.loads((original.metadata() or {}).get(HEADER, '{"layers": {}}'))
        named = {layers + name: settings for name, settings in header["layers"].items()}
        metadata = {HEADER: json.dumps({"layers": named})} if named else {}
        path = rewrite(
            source,
            tmp_path / "changed.safetensors",
            lambda tensors: {**renamed(rename)(tensors), **(more or {})},
            metadata,
        )
        expert = open_expert(path)
        expected = open_expert(source)
        assert_holds(expert, expected)
        assert expert.config == expected.config
        return expert

    return opened


@pytest.mark.parametrize(("prefix", "fp8"), [*zip(PREFIXES, cycle(FP8))])
def test_any_prefix(changed, prefix, fp8):
    changed(lambda key: prefix + key, fp8=fp8)


@pytest.mark.parametrize(
    ("prefix", "layers"),
    [("", ""), ("", WHOLE), (WHOLE, ""), (WHOLE, "diffusion_model."), ("net.", "other.")],
)
def test_layers_in_the_header_under_another_prefix(changed, prefix, layers):
    changed(lambda key: prefix + key, layers=layers, fp8="metadata")


@pytest.mark.parametrize(
    ("start", "wrapped"),
    [("", "_orig_mod."), ("", "module._orig_mod."), ("blocks.0.", "blocks.0._orig_mod.")],
)
def test_wrapped_modules(changed, start, wrapped):
    def wrap(key: str) -> str:
        return wrapped + key.removeprefix(start) if key.startswith(start) else key

    changed(wrap, fp8="scaled_fp8")


@pytest.mark.parametrize(("outer", "marker"), [("", ""), ("", WHOLE), ("module.", WHOLE)])
def test_whole_checkpoint(changed, outer, marker):
    expert = changed(
        lambda key: outer + (marker if key == "scaled_fp8" else WHOLE) + key,
        {outer + key: zeros(3, dtype=torch.int8) for key in OTHERS},
        fp8="scaled_fp8",
    )
    assert expert.notes == (
        "changed.safetensors: 9 tensors that this model does not use are ignored: "
        f"{', '.join(sorted(outer + key for key in OTHERS)[:3])} and 6 more",
    )


UNUSED = [
    *("blocks.0.cross_attn.norm_q_img.weight", "blocks.0.attn2.norm_added_q.weight"),
    *("blocks.0.cross_attn.norm_k_img.weight", "model_type.Wan2_2-T2V-A14B-HIGH", "__x0__"),
    *("freqs", "freqs_cis", "rope.freqs_cos", "rotary_emb.inv_freq", "v_pred", "ztsnr"),
    *("edm_vpred.sigma_max", "model_sampling.sigmas", "denoiser.sigmas", "alphas_cumprod"),
    *("model_ema.decay", "model_ema.blocks.0.ffn.0.weight", "model_ema.patch_embedding.weight"),
]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_unused_tensors_are_ignored_with_one_note(changed, caplog, prefix):
    caplog.set_level("INFO", "wanstream.checkpoint")
    unused = {prefix + name: zeros(1) for name in UNUSED}
    [note] = changed(lambda key: prefix + key, unused, fp8="scaled_fp8").notes
    assert [record.getMessage() for record in caplog.records] == [note]
    assert f": {len(UNUSED)} tensors that this model does not use are ignored: " in note
    assert sum(prefix + name in note for name in UNUSED) == 3


def test_norms_of_an_image_branch(tiny_expert_folder, tmp_path):
    """The key norm is used, and the query norm is not."""
    source = tiny_expert_folder(**SMALL, in_channels=36, image_dim=64)
    norm = "blocks.0.attn2.norm_added_q.weight"
    expert = open_expert(rewrite(source / WEIGHTS, tmp_path / "a.safetensors", {norm: zeros(1)}))
    assert_holds(expert, open_expert(source))
    assert "1 tensors" in expert.notes[0]
    assert norm in expert.notes[0]


def _under(*prefixes, but="-"):
    """Return a change to a copy under each prefix, without keys that contain `but`."""
    return lambda all: {
        **dict.fromkeys(all),
        **{p + key: each.clone() for key, each in all.items() if but not in key for p in prefixes},
    }


def _only(*keys):
    return lambda all: {**dict.fromkeys(all), **{key: zeros(4, 4) for key in keys}}


REFUSED: list[tuple[Change, str]] = [
    (lambda all: {key: None for key in all if "blocks." not in key}, "a part of a Wan transf"),
    (_under("net.", but="patch_embedding.weight"), "patch_embedding.we"),
    (_under("high.", "low."), "holds 2 diffusion models, under the prefixes 'high.' and 'low.'"),
    ({"_orig_mod.head.head.bias": zeros(64)}, "holds head.head.bias twice, as .*_orig_mod"),
    ({"logit_scale": zeros(1)}, r"logit_scale \[1\] does not belong"),
    (
        lambda all: {**_under("model.")(all), "stranger.weight": zeros(1)},
        r"stranger.weight \[1\] does not belong",
    ),
    (
        _only(*(f"diffusion_model.{LAYER}.lora_{each}.weight" for each in ("down", "up"))),
        "is a LoRA: it holds blocks.0.self_attn.q.lora_down.weight; choose it in Wan LoRA",
    ),
    (_only("lora_unet_blocks_0_self_attn_q.lokr_w1"), "is a LoRA: it holds lora_unet_"),
    (
        {f"{LAYER}.{each}": zeros(4, 4) for each in ("lora_down", "qweight", "wscales")},
        r"is quantised as SVDQuant \(nunchaku\)",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_other_files_are_refused(changed_expert, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_expert(changed_expert(change, **SMALL))
