"""Runs in ComfyUI's own Python: the guider with a cache, more guidance and context windows.

It is compared with our own sampler.
"""

from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch
from comfy import sample

from wanstream.host import current_host
from wanstream.host.auto_policy import AutoPlanner
from wanstream.plan import OffloadPolicy, SkipRule
from wanstream.sampling import FirstBlockCache, MagCache, calibrate, denoise
from wanstream.sampling.steps import Guidance, RequestError
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.rounding import ROUNDING
from wanstream.wan import Nag

from ..checks import for_each, refused
from .guider import SEED, Side, _difference, planned_by, sampled, simple_sigmas, slow_machine

LONG = (1, 16, 7, 8, 6)
LAYERWISE = OffloadPolicy.layerwise()
WINDOWS = ContextWindows(frames=3, overlap=1)
STILL = replace(WINDOWS, shift_windows=False)
SOME = FirstBlockCache(threshold=0.55)
LISTED = Guidance(steps=(4.0, 3.5, 1.0, 2.0, 1.0))
HELD = Guidance(steps=(4.0, 1.0), nag=Nag(scale=5.0))


def run_long(guider, name="euler", **run):
    return sampled(guider, name, simple_sigmas(name), latent=torch.zeros(LONG), **run)


def magnitudes(side):
    pair = current_host().models.experts(side.ref)
    noise = torch.zeros(LONG)
    request = side.request(sample.prepare_noise(noise, SEED))
    run = partial(denoise, pair, policy=LAYERWISE, device="cpu")
    rule = SkipRule(threshold=1e9, max_consecutive_skips=1, retention=0.0)
    return MagCache(table=calibrate(request, run, source="a test"), rule=rule)


# By the most lanes that a cache leaves out in a step.
@for_each(
    ("guidance list", 0),
    ("NAG", 0),
    ("windows", 0),
    ("cache", 2),
    ("magnitudes", 2),
    ("cache in windows", 8),
    ("magnitudes in still windows", 6),
    ("all", 8),
)
def check_settings(side, name, lanes):
    chosen = {}
    if "magnitudes" in name:
        chosen["cache"] = magnitudes(side)
    elif "cache" in name or name == "all":
        chosen["cache"] = SOME
    if "windows" in name or name == "all":
        chosen["windows"] = STILL if "still" in name else WINDOWS
    if name in {"guidance list", "NAG", "all"}:
        chosen["guidance"] = LISTED if name == "guidance list" else HELD
    guider = side.ours(**chosen)
    result = run_long(guider)
    guidance = chosen.pop("guidance", Guidance())
    noise = sample.prepare_noise(torch.zeros(LONG), SEED)
    more = {"guidance_steps": guidance.steps, "nag": guidance.nag, **chosen}
    ours, timeline = side.by_our_sampler(noise, **more)
    assert _difference(result, ours) <= ROUNDING
    assert _difference(result, run_long(side.ours())) > 0.01, "and not as without"
    assert guider.recompiled == 0
    steps = guider.timeline.steps
    # Not the bytes: a fetch under way when blocks are left out counts for either call, by chance.
    facts = attrgetter("expert", "sigma", "skipped_lanes", "skipped_visits")
    assert [*map(facts, steps)] == [*map(facts, timeline.steps)]
    cached = [step.skipped_lanes for step in steps]
    assert (sum(cached) > 0) == (lanes > 0)
    assert max(cached) <= lanes
    skipping = {"cache", "magnitudes", "magnitudes in still windows"}
    assert (sum(step.skipped_visits for step in steps) > 0) == (name in skipping)


def check_neutral_settings(side):
    """They change no bit, in a sampler with two calls per step."""
    plain = run_long(side.ours(), "heun")
    for neutral in (
        {"cache": FirstBlockCache(threshold=0.0)},
        # The list is the pair's where the experts change after three steps.
        {"guidance": Guidance(steps=(4.0,) * 3 + (3.0,))},
        {"windows": ContextWindows(frames=7, overlap=0)},
    ):
        assert torch.equal(run_long(side.ours(**neutral), "heun"), plain)


def check_two_calls_per_step(side):
    """All settings together, predicted and not, and again."""
    guider = side.ours(cache=SOME, windows=WINDOWS, guidance=HELD)
    first = run_long(guider, "heun")
    assert first.isfinite().all()
    assert torch.equal(run_long(guider, "heun"), first)
    assert guider.recompiled == 0
    assert sum(step.skipped_lanes for step in guider.timeline.steps) > 0
    plain = side.unpredicted(guider)
    assert torch.equal(run_long(plain, "heun"), first)
    assert plain.recompiled > 0
    pair = current_host().models.experts(side.ref)
    models = pair.engine(LAYERWISE, torch.device("cpu")).models
    assert models.settings.nag is None, "NAG is out of the experts again"


def check_no_steps(side):
    """Without steps nothing is denoised, and nothing is refused."""
    guider = side.ours(cache=SOME, windows=WINDOWS, guidance=HELD)
    latent = torch.ones(LONG)
    assert torch.equal(sampled(guider, "euler", torch.zeros(0), latent=latent), latent)


def check_nag_beside_negative(side):
    """NAG in a sampler that reads the negative where guidance is 1: that lane holds nothing."""
    off, on = (
        run_long(side.ours((1.0, 1.0), guidance=Guidance(nag=nag)), "euler_cfg_pp")
        for nag in (None, Nag(scale=5.0))
    )
    assert on.isfinite().all()
    assert _difference(on, off) > 0.01


def check_activation_memory(side):
    """Memory reported to ComfyUI depends on tokens computed at once, windows, and a cache."""
    results = []
    needed = []
    chunks = {"policy": replace(LAYERWISE, chunk_tokens=16)}
    for chosen in ({}, {"cache": SOME}, {"windows": WINDOWS}, chunks, {}):
        guider = side.ours(**chosen)
        results.append(run_long(guider))
        needed.append(guider.model_patcher.model.memory_required([1, 16, 21, 90, 160]))
    plain, cache, windows, chunked, again = needed
    assert plain == again
    assert cache > plain != windows
    assert chunked < 0.8 * plain
    assert torch.equal(results[0], results[3])


def check_predicted_skips(side):
    """Steps that magnitudes leave out are predicted."""
    cache = magnitudes(side)
    with planned_by(AutoPlanner(stored=slow_machine)) as announced:
        guider = side.ours(cache=cache)
        run_long(guider)
    found = [step.skipped_visits for step in guider.timeline.steps]
    assert [step["skipped_visits"] for step in announced[0]["steps"]] == found
    assert sum(found) > 0


def check_magnitudes_need_one_call_for_each_step(side):
    def foreign(model, x, sigmas, extra_args, **_):
        return model(x, sigmas[:1], **extra_args)

    cache = magnitudes(side)
    for sampler, words in (
        ("heun", "the sampler heun makes 11 model calls"),
        (foreign, "the sampler foreign has unknown model calls"),
    ):
        run = partial(run_long, side.ours(cache=cache), sampler)
        refused(run, words, kind=RequestError)


def setup(folder):
    return Side(folder, "t2v")
