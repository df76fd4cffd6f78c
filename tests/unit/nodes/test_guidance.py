"""Guidance and context windows nodes in the embedded host."""

import pytest
import torch

from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.nodes.context_windows import WanStreamContextWindows, windows_of
from wanstream.nodes.guidance import WanStreamGuidance
from wanstream.sampling.steps import Guidance, RequestError
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.host.shipped import latent, node, shipped
from wanstream.wan import Nag

GUIDANCE = {"guidance_steps": "", "nag_scale": 1.0, "nag_tau": 2.5, "nag_alpha": 0.25}
WINDOWS = {"frames": 9, "overlap": 4, "stride": 1, "blend": "linear", "repeat_image": True}


def guided(**settings):
    return {"guidance": node("WanStreamGuidance", **GUIDANCE | settings)}


def windowed(**settings):
    return {"windows": node("WanStreamContextWindows", **WINDOWS | settings)}


def sampler(run, nodes, *, frames=5, **settings):
    """Run text to video in 2 steps, with these nodes at the sampler, and return the history."""
    inputs = {"steps": 2, "switch_step": 1, **{name: [name, 0] for name in nodes}, **settings}
    return run(shipped(sampler=inputs, latent={"frames": frames}, **nodes), only=["sampler"])


def test_steps_have_the_guidance_of_the_list(run):
    plain = sampler(run, {}, guidance_high=4.0, guidance_low=2.5)
    listed = sampler(run, guided(guidance_steps="4, 2.5"), guidance_high=1.0, guidance_low=1.0)
    assert torch.equal(latent(listed), latent(plain))


UNSUITABLE = [
    (windowed(), r"windows of 9 frames \(3 latent\) are longer than the video of 5"),
    (guided(context_guidance=1.5), "is 1.5, and the negative has no context .* Bernini"),
]
MEANINGLESS = [
    (guided(guidance_steps="4, much"), "guidance_steps has 'much': give numbers with commas"),
    (windowed(frames=10), "frames is 10, it must be a multiple of 4 plus 1: use 9"),
    (windowed(overlap=6), "overlap is 6, it must be a multiple of 4: use 8"),
]


def test_settings_are_refused_in_the_run_or_before_it(run):
    for nodes, message in UNSUITABLE:
        with pytest.raises(NodeFailedError, match=message):
            sampler(run, nodes)
    for nodes, message in MEANINGLESS:
        with pytest.raises(InvalidWorkflowError, match=message):
            sampler(run, nodes, frames=17)


def test_list_of_scales_is_read():
    for text, scales in (
        (" , ", None),
        ("4", (4.0,)),
        ("6, 5 4.5;1\n1", (6.0, 5.0, 4.5, 1.0, 1.0)),
        ("1e1", (10.0,)),
    ):
        assert Guidance.parse_steps(text) == scales
    for text in ("4,x", "nan", "inf, 1", "4:3"):
        with pytest.raises(RequestError, match="guidance_steps has"):
            Guidance.parse_steps(text)


def test_nodes_make_values():
    """Equal settings make equal values, as ComfyUI's cache needs."""
    given = {**GUIDANCE, "guidance_steps": "4, 1", "nag_scale": 9.0}
    expected = Guidance(steps=(4.0, 1.0), nag=Nag(scale=9.0, tau=2.5, alpha=0.25))
    assert WanStreamGuidance.execute(**given).args == (expected,)
    windows = {"frames": 3, "overlap": 1, "stride": 1, "blend": "linear", "repeat_image": True}
    assert WanStreamContextWindows.execute(**WINDOWS).args == (ContextWindows(**windows),)
    assert windows_of(frames=81, overlap=16, stride=1) == ContextWindows()
    assert WanStreamContextWindows.validate_inputs(frames=None, overlap=96) is True, "linked"
    assert WanStreamGuidance.validate_inputs(None) is True, "linked"
