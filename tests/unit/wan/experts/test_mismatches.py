"""Warnings about swapped or mismatched files: real file names, headers and a few tensors."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from gguf import GGUFWriter
from safetensors.torch import save_file

from wanstream.schema import StepRange
from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.tests.support.offload.edited_files import close_gguf, zeros
from wanstream.tools.arrange import MODEL_FILES
from wanstream.wan.checkpoint.open import Expert, open_expert
from wanstream.wan.experts.mismatches import (
    GuidedStep,
    expert_mismatches,
    guidance_mismatches,
    is_image_to_video_name,
    lora_mismatches,
    place_from_name,
)

# Published names of experts and LoRAs, with {} for the place.
NAMES = [
    ("wan2.2_t2v_{}_noise_14B_fp8_scaled", "high", "low"),
    ("Wan2.2-I2V-A14B-{}-Q4_K_M", "HighNoise", "LowNoise"),
    ("Wan2_2-T2V-A14B{}_fp8_e4m3fn_scaled_KJ", "_HIGH", "-LOW"),
    ("wan22I2V{}Noise", "High", "Low"),
    ("DasiwaWAN22I2V14B_{}_v8", "HIGH", "LOW"),
    ("wan2.2_t2v_A14B_{}", "HN", "LN"),
    ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise", "high", "low"),
    ("Wan22_A14B_T2V_{}_Lightning_4steps_lora_250928_rank128_fp16", "HIGH", "LOW"),
    ("Wan2.2-Lightning_I2V-A14B-4steps-lora_{}_fp16", "HIGH", "LOW"),
    ("Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/{}_noise_model", "high", "low"),
    ("wan22-style-{}-000020", "high", "low"),
]
FOR_BOTH = """
    lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16
    Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32 Wan2.1_T2V_14B_FusionX_LoRA
    Wan21_AccVid_T2V_14B_lora_rank32_fp16 Wan2.2-Fun-A14B-InP-MPS high_quality_details
    wan_high_and_low_noise_style slow_motion Highland_cow
"""
"""LoRAs for both experts, or with a name that only seems to state one."""


def texts(found: list) -> list[str]:
    return [notice.text for notice in found]


@pytest.fixture
def experts(tiny_expert_file, tmp_path):
    """`experts(high, low, seeds=(1, 2))`: two tiny experts under these names."""

    def opened(*names: str, seeds: tuple[int, int] = (1, 2)) -> list[Expert]:
        found = []
        for name, seed in zip(names, seeds, strict=True):
            path = tmp_path / f"{name}.safetensors"
            shutil.copy(tiny_expert_file(seed=seed), path)
            found.append(open_expert(path))
        return found

    return opened


@pytest.fixture
def lora(tmp_path):
    """`lora(name, metadata=None, tensors=None)`: a LoRA file."""

    def write(name, metadata=None, tensors=None):
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        layer = "diffusion_model.blocks.0.self_attn.q"
        factors = {f"{layer}.lora_{way}.weight": zeros(2, 2) for way in ("down", "up")}
        save_file(factors | (tensors or {}), path, metadata)
        return path

    return write


@pytest.fixture
def t2v(tiny_expert_file):
    return open_expert(tiny_expert_file())


@pytest.fixture
def i2v(t2v):
    """A copy in another family, so LoRA tensors are not checked."""
    return replace(t2v, config=replace(t2v.config, in_channels=36))


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_published_names(lora, i2v, names):
    high, low = (lora(names[0].format(place)) for place in names[1:])
    assert lora_mismatches(high, low, i2v, single=False) == []
    (found,) = lora_mismatches(low, high, i2v, single=False)
    assert found.text.startswith(f"the LoRAs look swapped: {low.name} is chosen as high_noise")
    assert lora_mismatches(low, None, i2v, single=True) == []


def test_official_names():
    for name in MODEL_FILES:
        named = place_from_name(name)
        lower = name.lower()
        stated = "high" if "high" in lower else "low" if "low" in lower else None
        assert (named.place if named else None) == stated
        assert is_image_to_video_name(name) == ("i2v" in lower and "ti2v" not in lower)


@pytest.mark.parametrize("name", FOR_BOTH.split())
def test_lora_for_both_experts_raises_no_warning(lora, t2v, name):
    file = lora(name)
    for pair in ((file, file), (file, None), (None, file)):
        assert lora_mismatches(*pair, t2v, single=False) == []


def test_clear_name_of_the_other_expert(lora, t2v):
    file = lora("wan2.2_t2v_lora_low_noise")
    said = "is chosen as high_noise, and its name says low noise: choose the other LoRA"
    for pair in ((file, None), (file, file)):
        (found,) = lora_mismatches(*pair, t2v, single=False)
        assert said in found.text


def test_names_in_the_header(lora, t2v):
    high = lora("a", {"ss_output_name": "style-high-v2"})
    low = lora("b", {"ss_output_name": "style-low-v2"})
    assert lora_mismatches(high, low, t2v, single=False) == []
    assert "look swapped" in lora_mismatches(low, high, t2v, single=False)[0].text
    # A LoRA of both experts names one of them.
    both = lora("both", {"ss_sd_model_name": "wan2.2_t2v_low_noise_14B_fp16.safetensors"})
    assert lora_mismatches(both, both, t2v, single=False) == []


def test_name_in_the_header_of_a_gguf_file(tmp_path, i2v):
    high = tmp_path / "a.gguf"
    low = tmp_path / "b.gguf"
    for path, place in ((high, "HighNoise"), (low, "LowNoise")):
        writer = GGUFWriter(path, "wan")
        writer.add_string("general.name", f"Wan2.2-T2V-A14B-{place}")
        close_gguf(writer)
    assert lora_mismatches(high, low, i2v, single=False) == []
    assert "look swapped" in lora_mismatches(low, high, i2v, single=False)[0].text


def test_swapped_experts_are_named(experts):
    high, low = experts("wan_high", "wan_low")
    assert expert_mismatches(high, low) == []
    (found,) = expert_mismatches(low, high)
    assert found.exchange == ("high_noise", "low_noise")
    assert found.text == (
        "the experts look swapped: wan_low.safetensors is chosen as high_noise, "
        "wan_high.safetensors as low_noise: exchange them"
    )


def test_two_experts_of_one_place(experts):
    (found,) = expert_mismatches(*experts("a_high_noise_fp8", "b_high_noise_bf16"))
    assert (found.level, found.exchange) == ("wrong", None)
    assert found.text == (
        "b_high_noise_bf16.safetensors is chosen as low_noise, and its name says high noise: "
        "choose the other expert"
    )
    assert expert_mismatches(*experts("a_high", "high_quality")) == []


def test_one_file_or_copies_for_both_experts(experts, tmp_path):
    high, _ = experts("wan_high", "wan_low")
    said = "wan_high.safetensors is both experts: choose the low-noise file of the model as "
    assert texts(expert_mismatches(high, high)) == [f"{said}low_noise"]
    link = tmp_path / "link_low.safetensors"
    link.symlink_to(high.path)
    assert "is both experts" in expert_mismatches(high, open_expert(link))[0].text
    (found,) = expert_mismatches(*experts("one_high", "one_low", seeds=(1, 1)))
    assert "one_high.safetensors and one_low.safetensors hold the same weights" in found.text


def test_folders_of_a_pipeline(tiny_expert_folder, tmp_path):
    names = ("transformer", "transformer_2")
    for seed, name in enumerate(names, 1):
        shutil.copytree(tiny_expert_folder(seed=seed), tmp_path / "pipeline" / name)
    high, low = (open_expert(tmp_path / "pipeline" / name) for name in names)
    assert expert_mismatches(high, low) == []
    assert "look swapped: transformer_2 " in expert_mismatches(low, high)[0].text


BRANCH = "diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight"
PATCHES = "diffusion_model.patch_embedding.lora_down.weight"
BASE = {"ss_sd_model_name": "wan2.2_i2v_high_noise_14B_fp16"}


@pytest.mark.parametrize(
    ("name", "metadata", "tensors", "reason"),
    [
        ("wan_i2v_style", None, {}, "its name says so"),
        ("Wan image-to-video style", None, {}, "its name says so"),
        ("style", BASE, {}, "its header says so"),
        ("style", None, {BRANCH: zeros(2, 2)}, "changes an image branch"),
        ("style", None, {PATCHES: zeros(2, 36, 1, 2, 2)}, "takes 36 channels"),
        ("style", None, {PATCHES: zeros(2, 144)}, "takes 36 channels"),
        ("wan_t2v_i2v_style", None, {PATCHES: zeros(2, 16, 1, 2, 2)}, None),
        ("ti2v_5B_style", None, {}, None),
        ("anti2vibe", None, {}, None),
    ],
)
def test_lora_for_image_to_video_on_text_to_video(lora, t2v, i2v, name, metadata, tensors, reason):
    file = lora(name, metadata, tensors)
    assert lora_mismatches(file, file, i2v, single=False) == []
    found = texts(lora_mismatches(file, file, t2v, single=False))
    if reason is None:
        assert found == []
        return
    assert len(found) == 1
    assert found[0].startswith(f"{file.name} is a LoRA for image to video (")
    assert reason in found[0]


FEW_STEPS = [
    *(names[0].format(names[1]) for names in (*NAMES[6:9], NAMES[9])),
    *FOR_BOTH.split()[:4],
    *("Wan2.2-Distill/high_noise", "wan2.2_i2v_A14b_high_noise_lightx2v_4step"),
    *("Wan2_2_5B_FastWanFullAttn_lora_rank_128_bf16", "wan22_rCM_8_steps"),
    *("wan_StepDistill-CfgDistill", "wan_lightning_cfg1"),
]
ORDINARY = """
    wan22-style-high-000020 style_1000steps hyperreal_high turbocharged_cars step_4000 dawn
    Hyper-SD3-8steps-CFG-lora
"""


@pytest.mark.parametrize("name", [*FEW_STEPS, *ORDINARY.split()])
def test_cfg_with_a_model_for_few_steps(lora, tmp_path, name):
    high = tmp_path / "high.safetensors"
    file = lora(name)
    steps = [GuidedStep(0, "high", 4.0), GuidedStep(1, "low", 3.0)]
    expected = [f"{file.name} needs no CFG, and guidance_high is 4: set it to 1"]
    of_lora = ExpertsRef(high_noise=high, loras=(LoraRef(high_noise=file),))
    for ref in (of_lora, ExpertsRef(high_noise=file)):
        found = [text.split(", or")[0] for text in texts(guidance_mismatches(ref, steps))]
        assert found == (expected if name in FEW_STEPS else [])


@pytest.mark.parametrize(
    ("strength", "steps", "scales", "count"),
    [
        (1.0, (), (1.0, 1.0), 0),
        (0.5, (), (1.0, 2.0), 1),
        (0.0, (), (4.0, 1.0), 0),
        (1.0, (StepRange(0, 0, 0.0),), (4.0, 1.0), 0),
        (1.0, (StepRange(0, 0, 0.0),), (4.0, 1.5), 1),
    ],
)
def test_lora_counts_in_steps_with_a_strength(tmp_path, strength, steps, scales, count):
    path = tmp_path / "lightning.safetensors"
    lora = LoraRef(high_noise=path, strength_high=strength, steps=steps)
    ref = ExpertsRef(high_noise=tmp_path / "high.safetensors", loras=(lora,))
    guided = [GuidedStep(step, "high", scale) for step, scale in enumerate(scales)]
    assert len(guidance_mismatches(ref, guided)) == count
