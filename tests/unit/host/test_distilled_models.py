"""CFG with a distilled model or LoRA, found by file names in front of a ComfyUI sampler."""

from __future__ import annotations

import pytest

from wanstream.host.distilled_models import cfg_notices
from wanstream.tests.support.host.shipped import node

LIGHT = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors"
PLAIN = "wan2.2_t2v_high_noise_14B.safetensors"
TURBO = "z_image_turbo_bf16.safetensors"


def graph(*, lora: str = LIGHT, strength: float = 1.0, model: str = PLAIN):
    return {
        "1": node("WanStreamLoadDiffusionModel", unet_name=model),
        "2": node("LoraLoaderModelOnly", model=["1", 0], lora_name=lora, strength_model=strength),
        "3": node("ModelSamplingSD3", model=["2", 0], shift=5.0),
        "4": node("KSampler", model=["3", 0], cfg=3.5),
        "5": node("CFGGuider", model=["3", 0], cfg=3.5),
        "6": node("SamplerCustomAdvanced", guider=["5", 0], sigmas=["9", 0]),
        "7": node("KSampler", model=["1", 0]),
    }


def switched(value: object):
    """Return the graph with a switch between model and LoRA, as in ComfyUI's templates."""
    switch = node("ComfySwitchNode", switch=value, on_false=["1", 0], on_true=["2", 0])
    return {**graph(), "3": switch, "8": node("PrimitiveBoolean", value=True)}


CYCLE = {**graph(lora="a.safetensors"), "1": node("X", model=["3", 0])}


@pytest.mark.parametrize(
    ("prompt", "node_id", "cfg", "file"),
    [
        (graph(), "4", 3.5, LIGHT),
        (graph(), "6", 3.5, LIGHT),
        (graph(lora=f"wan\\{LIGHT}"), "4", 4, LIGHT),
        (graph(lora="a.safetensors", model=TURBO), "7", 2.0, TURBO),
        (switched(["8", 0]), "4", 3.5, LIGHT),
        (switched(True), "4", 3.5, LIGHT),
        (switched(False), "4", 3.5, None),
        (graph(), "4", 1.0, None),
        (graph(), "4", None, None),
        (graph(), "7", 3.5, None),
        (graph(strength=0.0), "4", 3.5, None),
        (graph(lora="style.safetensors"), "4", 3.5, None),
        (CYCLE, "4", 3.5, None),
        ({}, None, 3.5, None),
        ({"4": "no node"}, "4", 3.5, None),
    ],
)
def test_cfg_with_a_distilled_file_is_noticed(prompt, node_id, cfg, file):
    found = cfg_notices(prompt, node_id, cfg, is_wan=True)
    if file is None:
        assert found == []
        return
    (notice,) = found
    assert notice.text.startswith(f"{file} needs no CFG, and cfg is {cfg:g}: set it to 1")
    assert (notice.level, notice.values) == ("wrong", {"cfg": cfg})
    assert [each.level for each in cfg_notices(prompt, node_id, cfg, is_wan=False)] == ["note"]
