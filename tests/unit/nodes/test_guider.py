"""Sigmas and guider in the embedded host."""

from pathlib import Path

import pytest

from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.models import NeedsComfyUIError
from wanstream.nodes.guider import WanStreamGuider, WanStreamSigmas
from wanstream.nodes.loaders import WanStreamOneExpert
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.steps import Guidance, RequestError
from wanstream.sampling.steps.schedules import make_schedule
from wanstream.schema import StepRange
from wanstream.schema.refs.experts import ExpertsRef, LoraRef
from wanstream.shapes.context_windows import ContextWindows
from wanstream.testing.model import I2V_FILE, T2V_FILE
from wanstream.tests.support.host.shipped import node, shipped, timeline

PAIR = {"boundary_ratio": 0.875, "guidance_high": 4.0, "guidance_low": 3.0}
EXPERTS = ExpertsRef(high_noise=Path("high.safetensors"), low_noise=Path("low.safetensors"))


def steps_of(run, schedule, denoise=1.0):
    """Return the noise levels of a sampler with connected sigmas, which win over its settings."""
    inputs = {"schedule": schedule, "steps": 4, "flow_shift": 5.0, "denoise": denoise}
    linked = {"steps": 9, "flow_shift": 1.0, "sigmas": ["sigmas", 0]}
    nodes = shipped(sampler=linked, sigmas=node("WanStreamSigmas", **inputs))
    return [step.sigma for step in timeline(run(nodes, only=["sampler"])).steps]


def test_sigmas_feed_our_sampler(run):
    for schedule in ("simple", "wan"):
        assert steps_of(run, schedule) == list(make_schedule(schedule, 4, 5.0).sigmas[:-1])
    last = list(make_schedule("simple", 8, 5.0).sigmas[4:-1])
    assert steps_of(run, "simple", denoise=0.5) == last
    with pytest.raises(NodeFailedError, match="0 sigmas make no step"):
        steps_of(run, "simple", denoise=0.0)
    with pytest.raises(RequestError, match="flow shift -1: give a positive number"):
        WanStreamSigmas.execute("simple", 4, -1.0, 1.0)


@pytest.mark.usefixtures("opened_test_model")
@pytest.mark.parametrize("file", [T2V_FILE, I2V_FILE, None], ids=["text", "image", "pair"])
def test_guider_needs_comfyui(file, text):
    experts = WanStreamOneExpert.execute(file.name, "fp32").args[0] if file else EXPERTS
    guidance = Guidance(steps=(4.0, 1.0))
    settings = {**PAIR, "guidance": guidance, "windows": ContextWindows()} if file else PAIR
    cache = FirstBlockCache() if file else None
    with pytest.raises(NeedsComfyUIError, match=r"a GUIDER needs ComfyUI.* use Wan Sampler"):
        WanStreamGuider.execute(experts, text, text, 3.0, cache=cache, **settings)


def test_guider_refuses_settings_that_it_does_not_apply(text):
    with pytest.raises(RequestError, match=r"boundary ratio 1\.5: give 0 to 1"):
        WanStreamGuider.execute(EXPERTS, text, text, 12.0, **{**PAIR, "boundary_ratio": 1.5})
    lora = LoraRef(high_noise=Path("fast.safetensors"), steps=(StepRange(0, 1, 0.0),))
    files = {"high_noise": EXPERTS.high_noise, "low_noise": EXPERTS.low_noise}
    message = r"strength_steps.*which Wan Guider does not apply.*Use Wan Sampler"
    with pytest.raises(RequestError, match=message):
        WanStreamGuider.execute(ExpertsRef(**files, loras=(lora,)), text, text, 5.0, **PAIR)
