"""Runs in ComfyUI's own Python, as `guider_cases` does.

The guider has a cache, more guidance and context windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import comfy.samplers
import torch
from guider_cases import (
    BOUNDARY,
    GUIDANCE,
    SEED,
    Side,
    Unpredicted,
    _difference,
    _refusal,
    _simple,
    _slow_machine,
    sampled,
)

from wanstream.host import current_host
from wanstream.host.auto_policy import AutoPlanner
from wanstream.plan import AutoOffload
from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import denoise
from wanstream.sampling.cache.settings import FirstBlockCache, MagCache
from wanstream.sampling.calibrate import calibrate
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps.guidance import Guidance
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.wan import Nag

LONG = (1, 16, 7, 8, 6)
LAYERWISE = OffloadPolicy.layerwise()
WINDOWS = ContextWindows(frames=3, overlap=1)
SOME = FirstBlockCache(threshold=0.55)
LISTED = Guidance(steps=(4.0, 3.5, 1.0, 2.0, 1.0))
HELD = Guidance(steps=(4.0, 1.0), nag=Nag(scale=5.0))


def run_long(guider: Any, name: str = "euler", **run: Any) -> torch.Tensor:
    return sampled(
        guider, comfy.samplers.sampler_object(name), _simple(name), latent=torch.zeros(LONG), **run
    )


def request_of(side: Side, **more: Any) -> DenoiseRequest:
    noise = comfy.sample.prepare_noise(torch.zeros(LONG), SEED)
    texts = {"negative": side.negative[0][0], "guidance": GUIDANCE, "boundary_ratio": BOUNDARY}
    return DenoiseRequest(
        noise, side.positive[0][0], sigmas=_simple(), solver="euler", **texts, **more
    )


def magnitudes(side: Side) -> MagCache:
    pair = current_host().models.experts(side.ref)
    table = calibrate(
        request_of(side), partial(denoise, pair, policy=LAYERWISE, device="cpu"), source="a test"
    )
    return MagCache(
        table=table, rule=SkipRule(threshold=1e9, max_consecutive_skips=1, retention=0.0)
    )


def same_case(side: Side, set_to: Callable[[], dict[str, Any]]) -> dict[str, object]:
    """Euler through the guider, compared with our own sampler with the same settings."""
    settings = set_to()
    guider = side.ours(**settings)
    result = run_long(guider)
    guidance = settings.pop("guidance", Guidance())
    run = denoise(
        current_host().models.experts(side.ref),
        request_of(side, guidance_steps=guidance.steps, nag=guidance.nag, **settings),
        policy=LAYERWISE,
        device="cpu",
    )
    raw = guider.model_patcher.model.process_latent_out(run.latents)
    plain = run_long(side.ours())
    # Not the bytes: a fetch under way when blocks are left out counts for either call, by chance.
    names = ("expert", "sigma", "skipped_lanes", "skipped_visits")
    steps = [
        [[asdict(step)[name] for name in names] for step in each.timeline.steps]
        for each in (guider, run)
    ]
    return {
        "difference": _difference(result, raw),
        "effect": _difference(result, plain),
        "alike": steps[0] == steps[1],
        "cached": [step.skipped_lanes for step in guider.timeline.steps],
        "skipped": [step.skipped_visits for step in guider.timeline.steps],
        "recompiled": guider.recompiled,
    }


def nothing_changes_case(side: Side) -> dict[str, object]:
    """Neutral settings, each in a sampler with two calls per step."""
    plain = run_long(side.ours(), "heun")
    silent = {
        "cache": {"cache": FirstBlockCache(threshold=0.0)},
        "guidance": {"guidance": Guidance(steps=(4.0,) * 3 + (3.0,))},
        "windows": {"windows": ContextWindows(frames=7, overlap=0)},
    }
    # The list is the pair's where the experts change after three steps.
    return {
        name: torch.equal(run_long(side.ours(**settings), "heun"), plain)
        for name, settings in silent.items()
    }


def many_calls_case(side: Side) -> dict[str, object]:
    """All settings together in a sampler with two calls per step, predicted and not.

    A second run is possible.
    """
    settings = {"cache": SOME, "windows": WINDOWS, "guidance": HELD}
    guider = side.ours(**settings)
    first, again = run_long(guider, "heun"), run_long(guider, "heun")
    plain = Unpredicted(guider.host, guider.model_patcher, guider.settings, guider.requested)
    plain.set_conds(side.positive, side.negative)
    return {
        "finite": bool(first.isfinite().all()),
        "again": torch.equal(first, again),
        "unpredicted": torch.equal(first, run_long(plain, "heun")),
        "recompiled": [guider.recompiled, plain.recompiled],
        "cached": sum(step.skipped_lanes for step in guider.timeline.steps),
        "nag": _nag_left(side),
    }


def no_steps_case(side: Side) -> bool:
    """Without steps nothing is denoised, and nothing is refused."""
    guider, latent = side.ours(cache=SOME, windows=WINDOWS, guidance=HELD), torch.ones(LONG)
    euler = comfy.samplers.sampler_object("euler")
    return torch.equal(sampled(guider, euler, torch.zeros(0), latent=latent), latent)


def _nag_left(side: Side) -> bool:
    """Return True if the blocks still guide two texts."""
    models = current_host().models.experts(side.ref).engine(LAYERWISE, torch.device("cpu")).models
    return models.settings.nag is not None


def held_beside_negative_case(side: Side) -> dict[str, object]:
    """NAG in a sampler that reads the negative where guidance is 1: that lane holds nothing."""
    ones = (1.0, 1.0)
    off, on = (
        run_long(side.ours(ones, guidance=Guidance(nag=nag)), "euler_cfg_pp")
        for nag in (None, Nag(scale=5.0))
    )
    return {"effect": _difference(on, off), "finite": bool(on.isfinite().all())}


def room_case(side: Side) -> dict[str, object]:
    """Activation memory reported to ComfyUI, for each kind of setting."""
    needed = {}
    kinds = {
        "plain": {},
        "cache": {"cache": SOME},
        "windows": {"windows": WINDOWS},
        "again": {},
    }
    for name, settings in kinds.items():
        guider = side.ours(**settings)
        run_long(guider)
        needed[name] = guider.model_patcher.model.memory_required([1, 16, 7, 90, 160])
    return needed


def first_stays_case(side: Side) -> dict[str, object]:
    """A first-block cache keeps the first block, also under a policy from the planner."""
    whole = run_long(side.ours(cache=SOME))
    machine, before = _slow_machine(), current_host().memory.planner
    current_host().open_experts.free()
    current_host().memory.planner = AutoPlanner(lambda *_: machine)
    try:
        guider = side.ours(cache=SOME, policy=AutoOffload())
        chosen = run_long(guider)
    finally:
        current_host().memory.planner = before
        current_host().open_experts.free()
    return {
        "equal": torch.equal(whole, chosen),
        "keeps": guider.model_patcher.policy.pin_first_block,
    }


def predicted_skips_case(side: Side) -> dict[str, object]:
    """Prediction announced for a run with the magnitude cache."""
    reported, before = [], current_host().memory.planner
    cache = magnitudes(side)
    current_host().open_experts.free()
    current_host().memory.planner = AutoPlanner(stored=lambda *_: _slow_machine())
    current_host().events.announce = lambda event, payload: (
        reported.append(payload["predicted"]) if event == "wanstream.begin" else None
    )
    guider = side.ours(cache=cache)
    try:
        run_long(guider)
    finally:
        current_host().memory.planner = before
        del current_host().events.announce
    predicted = [step["skipped_visits"] for step in reported[0]["steps"]]
    return {
        "predicted": predicted,
        "found": [step.skipped_visits for step in guider.timeline.steps],
    }


def _refused(side: Side) -> dict[str, Callable[[], object]]:
    def foreign(
        model: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        extra_args: Any,
        callback: Any,
        disable: bool,
    ):
        return model(x, sigmas[:1], **extra_args)

    def run(name: str = "euler", **settings: Any) -> Callable[[], object]:
        return lambda: run_long(side.ours(**settings), name)

    def by_magnitudes(name: str) -> Callable[[], object]:
        return lambda: run_long(side.ours(cache=magnitudes(side)), name)

    def part() -> object:
        guider = side.ours(cache=magnitudes(side))
        euler = comfy.samplers.sampler_object("euler")
        return sampled(guider, euler, _simple()[2:], latent=torch.zeros(LONG))

    def of_another_pack() -> object:
        sampler = comfy.samplers.KSAMPLER(foreign)
        return sampled(
            side.ours(cache=magnitudes(side)), sampler, _simple(), latent=torch.zeros(LONG)
        )

    return {
        "guidance list too long": run(guidance=Guidance(steps=(4.0,) * 7)),
        "NAG without a step": run(guidance=Guidance(nag=Nag())),
        "windows too long": run(windows=ContextWindows(frames=8, overlap=0)),
        "magnitudes, two calls": by_magnitudes("heun"),
        "magnitudes, other levels": part,
        "magnitudes, sampler of another pack": of_another_pack,
        "magnitudes, moving windows": lambda: run_long(
            side.ours(cache=magnitudes(side), windows=WINDOWS)
        ),
    }


def settings_cases(side: Side) -> dict[str, Callable[[], object]]:
    """By name; `guider_cases.answers` runs them with its own."""
    same: dict[str, Callable[[], dict[str, Any]]] = {
        "cache": lambda: {"cache": SOME},
        "magnitudes": lambda: {"cache": magnitudes(side)},
        "guidance list": lambda: {"guidance": LISTED},
        "NAG": lambda: {"guidance": HELD},
        "windows": lambda: {"windows": WINDOWS},
        "cache in windows": lambda: {"cache": SOME, "windows": WINDOWS},
        "magnitudes in still windows": lambda: {
            "cache": magnitudes(side),
            "windows": replace(WINDOWS, shift_windows=False),
        },
        "all": lambda: {"cache": SOME, "windows": WINDOWS, "guidance": HELD},
    }
    return {
        **{f"same {name}": partial(same_case, side, set_to) for name, set_to in same.items()},
        "nothing changes": partial(nothing_changes_case, side),
        "many calls": partial(many_calls_case, side),
        "no steps": partial(no_steps_case, side),
        "held beside the negative": partial(held_beside_negative_case, side),
        "room": partial(room_case, side),
        "first stays": partial(first_stays_case, side),
        "predicted skips": partial(predicted_skips_case, side),
        **{f"refused {name}": partial(_refusal, call) for name, call in _refused(side).items()},
    }
