"""Conditioning from every Wan node in a real ComfyUI, through our sampler.

It is read, refused by name, or harmless.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanstream.sampling.inputs.conditioning_keys import IGNORED, READ, REFUSED, TEXT_TENSORS
from wanstream.tools.comfyui import ComfyUI

CASES = """
import conditioning_cases
answer = conditioning_cases.answers(*arguments)
"""

pytestmark = pytest.mark.comfy

RUNS = "runs"
"""All keys are read, or ignored as native sampling ignores them for these weights."""

# By node and way to connect it, "*" for all others: `RUNS`, or the refused key.
EXPECTED: dict[str, dict[str, str]] = {
    "WanImageToVideo": {"*": RUNS},
    "WanFirstLastFrameToVideo": {"*": RUNS},
    "WanFunInpaintToVideo": {"*": RUNS},
    "WanTrackToVideo": {"*": RUNS},
    "WanMoveTrackToVideo": {"*": RUNS},
    # The audio is a patch on the MODEL, which our nodes cannot take. The conditioning is a start
    # image.
    "WanInfiniteTalkToVideo": {"*": RUNS},
    # Without a camera it is an ordinary start image.
    "WanCameraImageToVideo": {
        "*": RUNS,
        "camera_conditions": "camera_conditions",
        "all": "camera_conditions",
    },
    # Without a face or a pose it is an ordinary start image. Animate weights are refused on
    # opening.
    "WanAnimateToVideo": {
        "*": RUNS,
        "face_video": "face_video_pixels",
        "pose_video": "pose_video_latent",
        "all": "pose_video_latent",
    },
    # The reference image alone is reference_latents, ignored by plain weights in native sampling
    # too.
    "WanSCAILToVideo": {
        "*": RUNS,
        "pose_video": "pose_video_latent",
        "pose_video_mask": "driving_mask_28ch",
        "all": "pose_video_latent",
    },
    "WanFunControlToVideo": {"*": "concat_latent_image"},
    "Wan22FunControlToVideo": {"*": "concat_mask_index"},
    "WanVaceToVideo": {"*": "vace_frames"},
    "WanPhantomSubjectToVideo": {"*": "time_dim_concat"},
    "WanSoundImageToVideo": {
        "*": "control_video",
        "audio_encoder_output": "audio_embed",
        "ref_motion": "reference_motion",
        "all": "audio_embed",
    },
    "WanSoundImageToVideoExtend": {"*": "reference_motion"},
    "WanHuMoImageToVideo": {"*": "audio_embed"},
    "WanAnimate2ToVideo": {
        "*": "cross_attn_pose",
        "pose_video": "pose_video_latent",
        "clip_vision_output": "clip_vision_output_pose",
        "clip_vision_output_pose": "clip_vision_output_pose",
        "all": "pose_video_latent",
    },
    # Without music it is an ordinary start image.
    "WanDancerVideo": {
        "*": RUNS,
        "audio_encoder_output": "audio_embed",
        "all": "clip_vision_output_ref",
    },
}

# The node itself fails in ComfyUI when it is connected so.
NODE_FAILS = {
    "WanPhantomSubjectToVideo: nothing",
    "WanInfiniteTalkToVideo: nothing",
    "WanInfiniteTalkToVideo: clip_vision_output",
}

KEYS: dict[str, str] = {
    **dict.fromkeys(
        ("concat_latent_image", "concat_mask", "concat_mask_index", "clip_vision_output"), "read"
    ),
    **dict.fromkeys(("reference_latents",), "read"),
    **dict.fromkeys(
        ("start_percent", "end_percent"), "a range, refused unless it is the whole run"
    ),
    **dict.fromkeys(
        ("audio_inject_scale", "fps", "ref_mask_flag"), "a number, without effect alone"
    ),
    **dict.fromkeys(
        (
            "audio_embed",
            "camera_conditions",
            "clip_vision_output_pose",
            "clip_vision_output_ref",
            "control_video",
            "cross_attn_pose",
            "driving_mask_28ch",
            "face_video_pixels",
            "pose_video_latent",
            "ref_mask_28ch",
            "reference_motion",
            "time_dim_concat",
            "vace_frames",
            "vace_mask",
            "vace_strength",
        ),
        "refused",
    ),
}
"""Every key these nodes write."""

# Numbers and flags that ComfyUI's models read from a conditioning: nothing that could be a picture.
NUMBERS = {
    *(
        "aesthetic_score",
        "aspect_ratio",
        "augmentation_level",
        "azimuth",
        "crop_h",
        "crop_w",
        "elevation",
        "fps",
    ),
    *(
        "frame_rate",
        "guidance",
        "guiding_frame_index",
        "height",
        "lyrics_strength",
        "motion_bucket_id",
    ),
    *(
        "noise_augmentation",
        "prompt_type",
        "reference_latents_method",
        "seconds_start",
        "seconds_total",
        "seed",
    ),
    *(
        "stable_cascade_prior",
        "target_height",
        "target_width",
        "unclip_noise_augment_merge",
        "width",
    ),
    *(
        "unprocessed_ltxav_embeds",
        "latent_shapes",
        "audio_inject_scale",
        "degrade_sigma",
        "ofs",
        "pose_strength",
    ),
    *(
        "minimax_audio_cond_noise_aug",
        "minimax_visual_cond_noise_aug",
        "ref_mask_flag",
        "reference_strength",
    ),
}
OVERWRITTEN = {"noise", "device"}
"""Conditioning keys overwritten by the sampler."""
SAMPLERS_OWN = {"latent_image"}
"""The sampler's, unless a conditioning has one. No node writes one, and it is refused as an unknown
tensor."""


@pytest.fixture(scope="module")
def found(
    in_comfyui: Callable[..., Any],
    tiny_expert_file: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Results by node and way to connect it."""
    folder = tmp_path_factory.mktemp("conditioning")
    for kind, channels in (("t2v", 16), ("i2v", 36)):
        for seed, name in enumerate(("high", "low"), start=1):
            (folder / f"{kind}_{name}.safetensors").symlink_to(
                tiny_expert_file(seed=seed, in_channels=channels)
            )
    answer: dict[str, Any] = in_comfyui(CASES, str(folder), seconds=900)
    return answer


@pytest.fixture(scope="module")
def has_all_nodes(comfyui: ComfyUI) -> bool:
    """False for a ComfyUI without some nodes in the table."""
    return (comfyui.path / "comfy_extras" / "nodes_wandancer.py").exists()


def test_every_wan_node_is_in_the_table(found: dict[str, Any], has_all_nodes: bool) -> None:
    nodes = {name.split(":")[0] for name in found}
    assert nodes == set(EXPECTED) if has_all_nodes else nodes < set(EXPECTED)


def test_every_node_runs_or_is_refused_by_the_name_of_its_key(found: dict[str, Any]) -> None:
    for name, outcome in found.items():
        node, way = name.split(": ")
        if name in NODE_FAILS:
            assert "node failed" in outcome, name
            continue
        expected = EXPECTED[node].get(way, EXPECTED[node]["*"])
        if expected == RUNS:
            assert outcome.get("finite"), (name, outcome)
        else:
            assert expected in outcome.get("refused", ""), (name, outcome)
            assert "remove" in outcome["refused"], name


def test_every_key_of_a_wan_node_is_known(found: dict[str, Any], has_all_nodes: bool) -> None:
    keys = {key for outcome in found.values() for key in outcome.get("keys", ())}
    assert keys == set(KEYS) if has_all_nodes else keys < set(KEYS)
    lists = {"read": READ, "ignored": IGNORED, "refused": REFUSED}
    for key, kind in KEYS.items():
        assert kind not in lists or key in lists[kind], key


def test_whatever_a_model_of_comfyui_reads_is_known_or_a_number(comfyui: ComfyUI) -> None:
    source = (comfyui.path / "comfy" / "model_base.py").read_text(encoding="utf-8")
    reads = set(re.findall(r"kwargs\.get\(\"(\w+)\"", source))
    assert {"reference_latents", "concat_latent_image"} <= reads
    known = {*READ, *REFUSED, *TEXT_TENSORS, *IGNORED, *NUMBERS, *OVERWRITTEN, *SAMPLERS_OWN}
    assert not reads - known, "a newer ComfyUI reads more: see whether a Wan model does"
