"""Warnings about swapped or mismatched files: real file names, headers and a few tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from wanstream.schema import StepRange
from wanstream.schema.refs import ExpertsRef, LoraRef
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

Write = Callable[..., Path]

# Published file names: one model's experts and LoRAs, with {} for the place.
EXPERTS = [
    ("wan2.2_t2v_{}_noise_14B_fp8_scaled", "high", "low"),
    ("wan2.2_i2v_{}_noise_14B_fp16", "high", "low"),
    ("wan2.2_fun_inpaint_{}_noise_14B_fp8_scaled", "high", "low"),
    ("Wan2.2-T2V-A14B-{}-Q8_0", "HighNoise", "LowNoise"),
    ("Wan2.2-I2V-A14B-{}-Q4_K_M", "HighNoise", "LowNoise"),
    ("wan2.2_t2v_{}_14B_Q5_0", "high_noise", "low_noise"),
    ("Wan2_2-T2V-A14B{}_fp8_e4m3fn_scaled_KJ", "_HIGH", "-LOW"),
    ("Wan2_2-I2V-A14B-{}_fp8_e5m2_scaled_KJ", "HIGH", "LOW"),
    ("wan22I2V{}Noise", "High", "Low"),
    ("DasiwaWAN22I2V14B_{}_v8", "HIGH", "LOW"),
    ("wan2.2_t2v_A14B_{}", "HN", "LN"),
    ("wan22Enhanced_{}V2", "high", "low"),
]
LORAS = [
    ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise", "high", "low"),
    ("wan2.2_i2v_lightx2v_4steps_lora_v1_{}_noise", "high", "low"),
    ("Wan22_A14B_T2V_{}_Lightning_4steps_lora_250928_rank128_fp16", "HIGH", "LOW"),
    ("Wan2.2-Lightning_I2V-A14B-4steps-lora_{}_fp16", "HIGH", "LOW"),
    ("SVI_v2_PRO_Wan2.2-I2V-A14B_{}_lora_rank_128_fp16", "HIGH", "LOW"),
    ("Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/{}_noise_model", "high", "low"),
    ("wan22-style-{}-000020", "high", "low"),
]
FOR_BOTH = [
    "lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16",
    "Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32",
    "Wan2.1_T2V_14B_FusionX_LoRA",
    "Wan21_AccVid_T2V_14B_lora_rank32_fp16",
    "Wan2.2-Fun-A14B-InP-MPS",
    "high_quality_details",
    "low_light_cinema",
    "highres_fix_wan",
    "wan_high_and_low_noise_style",
    "slow_motion",
    "Highland_cow",
    "allow_list",
]
"""LoRAs for both experts, or with a name that only seems to state one."""


def _names(names: tuple[str, str, str]) -> list[str]:
    pattern, *places = names
    return [f"{pattern.format(place)}.safetensors" for place in places]


@pytest.fixture
def experts(tiny_expert_file: Write, tmp_path: Path) -> Callable[..., list[Expert]]:
    """`experts(high, low, seeds=(1, 2))`: two tiny experts under these names."""

    def opened(*names: str, seeds: tuple[int, int] = (1, 2)) -> list[Expert]:
        files = zip(names, (tiny_expert_file(seed=seed) for seed in seeds), strict=True)
        return [open_expert(Path(shutil.copy(source, tmp_path / name))) for name, source in files]

    return opened


def _lora(path: Path, metadata: dict[str, str] | None = None, **tensors: torch.Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    factors = {
        f"diffusion_model.blocks.0.self_attn.q.lora_{way}.weight": torch.zeros(2, 2)
        for way in ("down", "up")
    }
    save_file(factors | tensors, path, metadata)
    return path


@pytest.fixture
def t2v(tiny_expert_file: Write) -> Expert:
    return open_expert(tiny_expert_file())


@pytest.mark.parametrize("names", EXPERTS, ids=lambda names: names[0])
def test_experts_are_known_by_their_names(
    experts: Callable[..., list[Expert]], names: tuple[str, str, str]
) -> None:
    high, low = experts(*_names(names))
    assert expert_mismatches(high, low) == []
    (found,) = expert_mismatches(low, high)
    assert found.exchange == ("high_noise", "low_noise")
    assert found.text == (
        f"the experts look swapped: {low.path.name} is chosen as high_noise, {high.path.name} as "
        "low_noise: exchange them"
    )


def test_the_official_files_are_known_by_their_names() -> None:
    for name in MODEL_FILES:
        named, lower = place_from_name(name), name.lower()
        assert (named.place if named else None) == (
            "high" if "high" in lower else "low" if "low" in lower else None
        )
        assert is_image_to_video_name(name) == ("i2v" in lower and "ti2v" not in lower)


def test_two_experts_of_one_place_are_noticed_where_the_name_is_clear(
    experts: Callable[..., list[Expert]],
) -> None:
    (found,) = expert_mismatches(
        *experts("a_high_noise_fp8.safetensors", "b_high_noise_bf16.safetensors")
    )
    assert (found.level, found.exchange) == ("wrong", None)
    assert found.text == (
        "b_high_noise_bf16.safetensors is chosen as low_noise, and its name says high noise: "
        "choose the other expert"
    )
    assert expert_mismatches(*experts("a_high.safetensors", "high_quality.safetensors")) == []


def test_one_file_as_both_experts_is_noticed(
    experts: Callable[..., list[Expert]], tmp_path: Path
) -> None:
    high, low = experts("wan_high.safetensors", "wan_low.safetensors")
    assert [found.text for found in expert_mismatches(high, high)] == [
        "wan_high.safetensors is both experts: choose the low-noise file of the model as low_noise"
    ]
    (tmp_path / "link_low.safetensors").symlink_to(high.path)
    assert (
        "is both experts"
        in expert_mismatches(high, open_expert(tmp_path / "link_low.safetensors"))[0].text
    )
    assert expert_mismatches(high, low) == []


def test_copies_of_one_expert_are_noticed_by_their_weights(
    experts: Callable[..., list[Expert]],
) -> None:
    (found,) = expert_mismatches(
        *experts("wan_high.safetensors", "wan_low.safetensors", seeds=(1, 1))
    )
    assert found.text.startswith(
        "wan_high.safetensors and wan_low.safetensors hold the same weights"
    )


def test_folders_of_a_pipeline_have_their_places(tiny_expert_folder: Write, tmp_path: Path) -> None:
    for name, seed in (("transformer", 1), ("transformer_2", 2)):
        shutil.copytree(tiny_expert_folder(seed=seed), tmp_path / "pipeline" / name)
    high, low = (
        open_expert(tmp_path / "pipeline" / name) for name in ("transformer", "transformer_2")
    )
    assert expert_mismatches(high, low) == []
    assert expert_mismatches(low, high)[0].text.startswith(
        "the experts look swapped: transformer_2 "
    )


@pytest.mark.parametrize("names", LORAS, ids=lambda names: names[0])
def test_loras_are_known_by_their_names(
    tmp_path: Path, tiny_expert_file: Write, names: tuple[str, str, str]
) -> None:
    high, low = (_lora(tmp_path / name) for name in _names(names))
    i2v = open_expert(tiny_expert_file(in_channels=36))
    assert lora_mismatches(high, low, i2v, single=False) == []
    (found,) = lora_mismatches(low, high, i2v, single=False)
    assert found.text.startswith(f"the LoRAs look swapped: {low.name} is chosen as high_noise")
    assert lora_mismatches(low, None, i2v, single=True) == []


@pytest.mark.parametrize("name", FOR_BOTH)
def test_a_lora_for_both_experts_raises_no_warning(tmp_path: Path, t2v: Expert, name: str) -> None:
    file = _lora(tmp_path / f"{name}.safetensors")
    for pair in ((file, file), (file, None), (None, file)):
        assert lora_mismatches(*pair, t2v, single=False) == []


def test_a_single_lora_in_the_wrong_place_is_noticed_where_its_name_is_clear(
    tmp_path: Path, t2v: Expert
) -> None:
    file = _lora(tmp_path / "wan2.2_t2v_lora_low_noise.safetensors")
    for pair in ((file, None), (file, file)):
        (found,) = lora_mismatches(*pair, t2v, single=False)
        assert (
            "is chosen as high_noise, and its name says low noise: choose the other LoRA"
            in found.text
        )


def test_the_name_that_a_lora_was_trained_under_counts(tmp_path: Path, t2v: Expert) -> None:
    high, low = (
        _lora(tmp_path / f"{number}.safetensors", {"ss_output_name": f"style-{place}-v2"})
        for number, place in enumerate(("high", "low"))
    )
    assert lora_mismatches(high, low, t2v, single=False) == []
    assert "look swapped" in lora_mismatches(low, high, t2v, single=False)[0].text
    both = _lora(
        tmp_path / "both.safetensors",
        {"ss_sd_model_name": "wan2.2_t2v_low_noise_14B_fp16.safetensors"},
    )
    assert lora_mismatches(both, both, t2v, single=False) == [], (
        "a LoRA of both experts names one of them"
    )


def test_the_name_in_the_header_of_a_gguf_file_counts(tmp_path: Path, t2v: Expert) -> None:
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path, place in zip(paths, ("HighNoise", "LowNoise"), strict=True):
        writer = GGUFWriter(path, "wan")
        writer.add_string("general.name", f"Wan2.2-T2V-A14B-{place}")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert lora_mismatches(paths[0], paths[1], _i2v_like(t2v), single=False) == []
    assert (
        "look swapped" in lora_mismatches(paths[1], paths[0], _i2v_like(t2v), single=False)[0].text
    )


def _i2v_like(expert: Expert) -> Expert:
    """Return a copy in another family, so LoRA tensors are not checked."""
    from dataclasses import replace

    return replace(expert, config=replace(expert.config, in_channels=36))


BRANCH = "diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight"
PATCHES = "diffusion_model.patch_embedding.lora_down.weight"
IMAGE_LORAS = {
    "its name": ("wan_i2v_style", None, {}, "its name says so"),
    "its name in full": ("Wan image-to-video style", None, {}, "its name says so"),
    "its header": (
        "style",
        {"ss_sd_model_name": "wan2.2_i2v_high_noise_14B_fp16"},
        {},
        "its header says so",
    ),
    "an image branch": ("style", None, {BRANCH: torch.zeros(2, 2)}, "changes an image branch"),
    "its channels": ("style", None, {PATCHES: torch.zeros(2, 36, 1, 2, 2)}, "takes 36 channels"),
    "its channels in a matrix": (
        "style",
        None,
        {PATCHES: torch.zeros(2, 144)},
        "takes 36 channels",
    ),
}


@pytest.mark.parametrize(
    ("name", "metadata", "tensors", "reason"), IMAGE_LORAS.values(), ids=IMAGE_LORAS
)
def test_a_lora_for_image_to_video_is_noticed_on_text_to_video(
    tmp_path: Path,
    t2v: Expert,
    name: str,
    metadata: dict[str, str] | None,
    tensors: dict[str, torch.Tensor],
    reason: str,
) -> None:
    file = _lora(tmp_path / f"{name}.safetensors", metadata, **tensors)
    (found,) = lora_mismatches(file, file, t2v, single=False)
    assert found.text.startswith(f"{file.name} is a LoRA for image to video (")
    assert reason in found.text
    assert lora_mismatches(file, file, _i2v_like(t2v), single=False) == []


@pytest.mark.parametrize(
    "name", ["wan_t2v_i2v_style", "ti2v_5B_style", "wan_t2v_style", "anti2vibe"]
)
def test_a_lora_that_may_be_for_text_raises_no_warning(
    tmp_path: Path, t2v: Expert, name: str
) -> None:
    patches = {PATCHES: torch.zeros(2, 16, 1, 2, 2)}
    assert (
        lora_mismatches(
            _lora(tmp_path / f"{name}.safetensors", None, **patches), None, t2v, single=False
        )
        == []
    )


FEW_STEPS = [
    *(names[0].format(names[1]) for names in LORAS[:4]),
    LORAS[5][0].format("high"),
    *FOR_BOTH[:4],
    "Wan2.2-Distill/high_noise",
    "wan2.2_i2v_A14b_high_noise_lightx2v_4step",
    "Wan2_2_5B_FastWanFullAttn_lora_rank_128_bf16",
    "wan22_rCM_8_steps",
    "wan_lightx2v_cfg_step_distill_lora_rank64",
    "wan_StepDistill-CfgDistill",
    "wan_lightning_cfg1",
]
ORDINARY = [
    "wan22-style-high-000020",
    "style_1000steps",
    "hyperreal_high",
    "turbocharged_cars",
    "step_4000",
    "dawn",
    "Hyper-SD3-8steps-CFG-lora",
]


@pytest.mark.parametrize("name", [*FEW_STEPS, *ORDINARY])
def test_cfg_with_a_model_for_few_steps_is_noticed(tmp_path: Path, name: str) -> None:
    ref = ExpertsRef(
        high_noise=tmp_path / "high.safetensors",
        loras=(LoraRef(high_noise=_lora(tmp_path / f"{name}.safetensors")),),
    )
    found = guidance_mismatches(ref, [GuidedStep(0, "high", 4.0), GuidedStep(1, "low", 3.0)])
    assert len(found) == (name in FEW_STEPS)
    assert all(
        "needs no CFG, and guidance_high is 4: set it to 1" in each.text[:120]
        for each in found
        if len(name) < 50
    )
    own = ExpertsRef(high_noise=ref.loras[0].high_noise)
    assert len(guidance_mismatches(own, [GuidedStep(0, "high", 4.0)])) == (name in FEW_STEPS)


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
def test_a_lora_counts_in_steps_with_a_strength(
    tmp_path: Path,
    strength: float,
    steps: tuple[StepRange, ...],
    scales: tuple[float, ...],
    count: int,
) -> None:
    lora = LoraRef(
        high_noise=tmp_path / "lightning.safetensors", strength_high=strength, steps=steps
    )
    ref = ExpertsRef(high_noise=tmp_path / "high.safetensors", loras=(lora,))
    guided = [GuidedStep(step, "high", scale) for step, scale in enumerate(scales)]
    assert len(guidance_mismatches(ref, guided)) == count
