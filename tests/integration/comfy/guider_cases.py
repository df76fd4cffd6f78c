"""Runs in ComfyUI's own Python: our guider against one over the same experts loaded by ComfyUI.

`answers(folder)` returns one JSON value per case. `test_guider.py` checks the values.
"""

from __future__ import annotations

import inspect
import logging
import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import comfy.cli_args
import comfy.k_diffusion.sampling
import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import folder_paths
import latent_preview
import numpy
import torch
from comfy_extras import nodes_advanced_samplers, nodes_custom_sampler, nodes_model_advanced
from installed_pack import load_pack
from safetensors.torch import save_file

load_pack()
from wanstream.host import current_host  # noqa: E402
from wanstream.host.auto_policy import AutoPlanner  # noqa: E402
from wanstream.host.comfy.experts.guider import ExpertsGuider  # noqa: E402
from wanstream.host.comfy.samplers import predicted_sigmas, preserve_random_state  # noqa: E402
from wanstream.nodes.guider import WanStreamGuider, WanStreamSigmas  # noqa: E402
from wanstream.plan import AutoOffload, Machine  # noqa: E402
from wanstream.sampling import denoise  # noqa: E402
from wanstream.sampling.inputs import DenoiseRequest  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402
from wanstream.schema.refs.experts import ExpertsRef  # noqa: E402

SHIFT, BOUNDARY, STEPS, SEED = 5.0, 0.875, 6, 7
SHAPE = (1, 16, 2, 8, 6)
GUIDANCE = (4.0, 3.0)
ADVANCED = comfy.samplers.KSampler
SEEDLESS = {"euler_ancestral", "dpmpp_sde", "heunpp2", "lcm", "sa_solver", "seeds_2"}
"""Samplers that draw from the global random state if they get no seed."""


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _results(node: type, **inputs: Any) -> tuple[Any, ...]:
    """Return a ComfyUI node's results.

    The set of V3 nodes depends on the ComfyUI version.
    """
    if hasattr(node, "execute"):
        return node.execute(**inputs).args
    return getattr(node(), node.FUNCTION)(**inputs)


class NativePair(comfy.samplers.CFGGuider):
    """Both experts as ComfyUI loads them. The sigma selects the expert for a call."""

    def __init__(
        self, experts: dict[str, Any], boundary: float, guidance: tuple[float, float]
    ) -> None:
        super().__init__(experts["high"])
        self.experts, self.boundary, self.guidance = experts, boundary, guidance
        self.calls: list[str] = []

    def inner_sample(self, *args: Any, **settings: Any) -> torch.Tensor:
        comfy.model_management.load_models_gpu(list(self.experts.values()))
        for expert in self.experts.values():
            expert.pre_run()
        return super().inner_sample(*args, **settings)

    def predict_noise(
        self, x: torch.Tensor, timestep: torch.Tensor, model_options: Any, seed: Any
    ) -> torch.Tensor:
        name = "high" if float(timestep[0]) * 1000 >= self.boundary * 1000 else "low"
        self.calls.append(name)
        conditions = self.conds["negative"], self.conds["positive"], self.guidance[name == "low"]
        model = self.experts[name].model
        return comfy.samplers.sampling_function(
            model, x, timestep, *conditions, model_options=model_options, seed=seed
        )


class Unpredicted(ExpertsGuider):
    """Our guider without a dry run."""

    def _predict_sigmas(self, *_: Any) -> list[float]:
        return []


class Side:
    """Both guiders for one kind of expert, and runs with no other difference."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.files = {name: folder / f"{kind}_{name}.safetensors" for name in ("high", "low")}
        self.ref = ExpertsRef(
            high_noise=self.files["high"], low_noise=self.files["low"], compute_dtype="float32"
        )
        self.natives = {}
        for name, file in self.files.items():
            loaded = comfy.sd.load_diffusion_model(str(file))
            (self.natives[name],) = nodes_model_advanced.ModelSamplingSD3().patch(loaded, SHIFT)
        self.positive = [[_normal(1, 12, 4096, seed=1), {"pooled_output": None}]]
        self.negative = [[_normal(1, 9, 4096, seed=2), {"pooled_output": None}]]

    def ours(self, scales: tuple[float, float] = GUIDANCE, **changes: Any) -> Any:
        given = {
            "positive": self.positive,
            "negative": self.negative,
            "boundary_ratio": BOUNDARY,
            "flow_shift": SHIFT,
        }
        high, low = scales
        node = WanStreamGuider.execute(
            self.ref, **{**given, **changes}, guidance_high=high, guidance_low=low
        )
        return node.args[0]

    def theirs(self, guidance: tuple[float, float] = GUIDANCE) -> NativePair:
        guider = NativePair(self.natives, BOUNDARY, guidance)
        guider.set_conds(self.positive, self.negative)
        return guider

    def difference(
        self,
        sampler: Any,
        sigmas: torch.Tensor,
        *,
        guidance: tuple[float, float] = GUIDANCE,
        **run: Any,
    ):
        ours, theirs = self.ours(guidance), self.theirs(guidance)
        return _difference(
            sampled(ours, sampler, sigmas, **run), sampled(theirs, sampler, sigmas, **run)
        )


def sampled(
    guider: Any,
    sampler: Any,
    sigmas: torch.Tensor,
    *,
    seed: int | None = SEED,
    latent: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    callback: Any = None,
) -> torch.Tensor:
    """A run as SamplerCustomAdvanced makes it, the random state set to the same start."""
    latent = torch.zeros(SHAPE) if latent is None else latent
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    noise = comfy.sample.prepare_noise(latent, SEED) if noise is None else noise
    # A copy: some samplers write into their sigmas.
    return guider.sample(
        noise,
        latent,
        sampler,
        sigmas.clone(),
        denoise_mask=mask,
        callback=callback,
        disable_pbar=True,
        seed=seed,
    )


def _simple(name: str = "euler") -> torch.Tensor:
    """Sigmas as KSampler makes them for a sampler."""
    discard = name in ADVANCED.DISCARD_PENULTIMATE_SIGMA_SAMPLERS
    sigmas = current_host().models.sigmas("simple", STEPS + discard, 1.0, SHIFT)
    return torch.cat([sigmas[:-2], sigmas[-1:]]) if discard else sigmas


def _state() -> list[object]:
    kind, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), kind, keys.tolist(), rest, random.getstate()]


def sampler_case(side: Side, name: str) -> dict[str, object]:
    sampler, sigmas = comfy.samplers.sampler_object(name), _simple(name)
    ours, theirs = side.ours(), side.theirs()
    result = sampled(ours, sampler, sigmas)
    after = _state()
    native = sampled(theirs, sampler, sigmas)
    steps = ours.timeline.steps
    plain = Unpredicted(ours.host, ours.model_patcher, ours.settings, ours.requested)
    plain.set_conds(side.positive, side.negative)
    unpredicted = sampled(plain, sampler, sigmas)
    found = {
        "difference": _difference(result, native),
        "finite": bool(native.isfinite().all()),
        "calls": [[step.expert for step in steps], theirs.calls],
        "recompiled": ours.recompiled,
        "bytes": [step.bytes_moved for step in steps],
        "unpredicted equal": torch.equal(result, unpredicted) and after == _state(),
        "unpredicted recompiled": plain.recompiled,
    }
    if name in SEEDLESS:
        seedless = [sampled(guider, sampler, sigmas, seed=None) for guider in (ours, plain)]
        found["unpredicted equal"] = found["unpredicted equal"] and torch.equal(*seedless)
    return found


def schedule_case(side: Side, name: str) -> dict[str, object]:
    (sigmas,) = WanStreamSigmas.execute(name, STEPS, SHIFT, 1.0).args
    (part,) = WanStreamSigmas.execute(name, 3, SHIFT, 0.5).args
    native = sigmas, part
    if name != "wan":
        model, basic = side.natives["high"], nodes_custom_sampler.BasicScheduler
        lengths = {"steps": STEPS, "denoise": 1.0}, {"steps": 3, "denoise": 0.5}
        native = [_results(basic, model=model, scheduler=name, **length)[0] for length in lengths]
    return {
        "difference": side.difference(comfy.samplers.sampler_object("dpmpp_2m"), sigmas),
        "equal": all(torch.equal(a, b) for a, b in zip((sigmas, part), native, strict=True)),
    }


def cfg_case(side: Side, guidance: tuple[float, float], name: str) -> dict[str, object]:
    guider = side.ours(guidance)
    lanes, models = (
        [],
        guider.model_patcher.model.pair.engine(guider.model_patcher.policy, "cpu").models,
    )
    for expert in ("high", "low"):
        models[expert].blocks[0].register_forward_hook(lambda *_: lanes.append(1))
    sampler = comfy.samplers.sampler_object(name)
    theirs = sampled(side.theirs(guidance), sampler, _simple())
    difference = _difference(sampled(guider, sampler, _simple()), theirs)
    guider.model_patcher.model.pair.close()
    return {"difference": difference, "lanes": len(lanes)}


def hooks_case(side: Side) -> dict[str, object]:
    """Guidance options from other packs: the real function uses them, with an effect."""

    def rescaled(call: dict[str, Any]) -> torch.Tensor:
        return call["uncond"] + (call["cond"] - call["uncond"]) * call["cond_scale"] * 0.5

    def swapped(call: dict[str, Any]) -> list[torch.Tensor]:
        return list(reversed(call["conds_out"]))

    def darker(call: dict[str, Any]) -> torch.Tensor:
        return call["denoised"] * 0.9 + call["uncond_denoised"] * 0.05

    hooks = {
        "sampler_cfg_function": rescaled,
        "sampler_pre_cfg_function": [swapped],
        "sampler_post_cfg_function": [darker],
    }
    sampler, found = comfy.samplers.sampler_object("euler"), {}
    plain = sampled(side.ours(), sampler, _simple())
    for name, hook in hooks.items():
        results = []
        for guider in (side.ours(), side.theirs()):
            guider.model_options = {**guider.model_options, name: hook}
            results.append(sampled(guider, sampler, _simple()))
        found[name] = {
            "difference": _difference(*results),
            "effect": _difference(results[0], plain),
        }
    return found


def mask_case(side: Side, name: str, seed_kind: str) -> dict[str, object]:
    latent, mask = _normal(*SHAPE, seed=3), torch.zeros(1, 1, *SHAPE[2:])
    mask[..., :4] = 1
    mask[:, :, 1:, :, 2:5] = 0.5
    sampler, sigmas = comfy.samplers.sampler_object(name), _simple()
    if seed_kind == "later start":
        sigmas = sigmas[2:]
    run = {"latent": latent, "mask": mask}
    kept = sampled(side.ours(), sampler, sigmas, **run)[..., 5:] - latent[..., 5:]
    return {
        "difference": side.difference(sampler, sigmas, **run),
        "kept": float(kept[:, :, :1].abs().max()),
    }


def batch_case(side: Side) -> dict[str, object]:
    run = {"latent": torch.zeros(2, *SHAPE[1:])}
    sampler, guider = comfy.samplers.sampler_object("dpmpp_2m"), side.ours()
    both = sampled(guider, sampler, _simple(), **run)
    moved = [step.bytes_moved for step in guider.timeline.steps]
    noise = comfy.sample.prepare_noise(run["latent"], SEED)
    single = sampled(side.ours(), sampler, _simple(), noise=noise[1:].clone())
    return {
        "difference": side.difference(sampler, _simple(), **run),
        "as alone": torch.equal(both[1:], single),
        "bytes": moved,
    }


def chunk_case(side: Side) -> dict[str, object]:
    """Activation memory reported to ComfyUI for three policies.

    They compute all tokens at once, small chunks, and all tokens at once again.
    """
    whole = OffloadPolicy.layerwise()
    sampler, results, needed = comfy.samplers.sampler_object("euler"), [], []
    for policy in (whole, replace(whole, chunk_tokens=16), whole):
        guider = side.ours(policy=policy)
        results.append(sampled(guider, sampler, _simple()))
        needed.append(guider.model_patcher.model.memory_required([1, 16, 21, 90, 160]))
    return {"equal": all(torch.equal(each, results[0]) for each in results), "needed": needed}


def _slow_machine() -> Machine:
    """One whose disk is slow."""
    return Machine(
        name="made up",
        origin="made up",
        vram_bytes=0,
        ram_bytes=10**12,
        bus=None,
        disk_bytes_per_s=1e3,
        flops_per_s=1e9,
        decode_bytes_per_s=1e9,
        copy_bytes_per_s=1e9,
        quantise_bytes_per_s=1e9,
    )


def predicted_case(side: Side) -> dict[str, object]:
    """Prediction before a run's first call, on machines with and without a stored profile."""
    sampler, reported = comfy.samplers.sampler_object("heun"), []
    current_host().open_experts.free()
    current_host().events.announce = lambda event, payload: (
        reported.append(payload["predicted"]) if event == "wanstream.begin" else None
    )
    current_host().memory.planner, before = (
        AutoPlanner(stored=lambda *_: None),
        current_host().memory.planner,
    )
    guider = side.ours()
    try:
        sampled(guider, sampler, _simple())
        current_host().memory.planner = AutoPlanner(stored=lambda *_: _slow_machine())
        current_host().open_experts.free()
        sampled(guider, sampler, _simple())
    finally:
        current_host().memory.planner = before
        del current_host().events.announce
    unknown, known = reported

    def of(steps: list[Any]) -> list[list[Any]]:
        return [
            [step[name] for name in ("index", "expert", "sigma", "bytes_moved", "read_bytes")]
            for step in steps
        ]

    return {
        "unknown": unknown,
        "kind": known["kind"],
        "equal": of(known["steps"]) == of([step.to_dict() for step in guider.timeline.steps]),
        "calls": len(known["steps"]),
    }


def chosen_case(side: Side) -> dict[str, object]:
    """Policies left to the planner, twice, on a machine with a profiled slow disk.

    The first step shows a fast disk.
    """
    machine = _slow_machine()
    sampler = comfy.samplers.sampler_object("heun")
    whole = sampled(side.ours(), sampler, _simple())
    current_host().open_experts.free()
    current_host().memory.planner, before = (
        AutoPlanner(lambda *_: machine),
        current_host().memory.planner,
    )
    try:
        guider = side.ours(policy=AutoOffload())
        results = [sampled(guider, sampler, _simple()) for _ in range(2)]
    finally:
        current_host().memory.planner = before
    reported, moved = (
        guider.timeline.changes,
        sum(step.bytes_moved for step in guider.timeline.steps),
    )
    current_host().open_experts.free()
    return {
        "equal": [torch.equal(each, whole) for each in results],
        "reported": reported,
        "moved": moved,
    }


def split_case(side: Side) -> dict[str, object]:
    """SplitSigmas: the second half continues without added noise, as with DisableNoise."""
    results = {}
    for name, guider in (("ours", side.ours()), ("theirs", side.theirs())):
        sampler, sigmas, at = comfy.samplers.sampler_object("euler"), _simple(), 3
        whole = sampled(guider, sampler, sigmas)
        half = sampled(guider, sampler, sigmas[: at + 1])
        rest = sampled(guider, sampler, sigmas[at:], latent=half, noise=torch.zeros(SHAPE))
        results[name] = whole, half, rest
    pairs = zip(results["ours"], results["theirs"], strict=True)
    whole, _, rest = results["ours"]
    return {
        "differences": [_difference(*pair) for pair in pairs],
        "as one": _difference(rest, whole),
    }


def image_case(side: Side, frames: int, channels: int) -> dict[str, object]:
    """Conditioning from WanImageToVideo or WanFirstLastFrameToVideo, in both guiders.

    The first has one mask channel, the second has four.
    """
    mask = torch.ones(1, channels, *SHAPE[2:])
    mask[:, :, :frames] = 0
    image = {"concat_latent_image": _normal(*SHAPE, seed=4), "concat_mask": mask}
    side.positive = [[text, {**belongings, **image}] for text, belongings in side.positive]
    side.negative = [[text, {**belongings, **image}] for text, belongings in side.negative]
    sampler = comfy.samplers.sampler_object("dpmpp_2m")
    return {"difference": side.difference(sampler, _simple())}


def odd_sizes_case(side: Side) -> dict[str, object]:
    """Latents whose sides do not divide into patches: ComfyUI pads them.

    They run in the guider and in our sampler.
    """
    sampler, found = comfy.samplers.sampler_object("euler"), {}
    for size in ((2, 9, 8), (1, 7, 9), (2, 8, 5), (1, 45, 80)):
        latent, mask = _normal(2, 16, *size, seed=3), _normal(1, 1, *size, seed=5).sigmoid()
        for name, run in {
            "": {"latent": torch.zeros(1, 16, *size)},
            " masked": {"latent": latent, "mask": mask},
        }.items():
            found[f"{size}{name}"] = side.difference(sampler, _simple(), **run)
        noise = comfy.sample.prepare_noise(torch.zeros(1, 16, *size), SEED)
        texts = {"negative": side.negative[0][0], "guidance": GUIDANCE, "boundary_ratio": BOUNDARY}
        request = DenoiseRequest(
            noise, side.positive[0][0], sigmas=_simple(), solver="euler", **texts
        )
        run = denoise(
            current_host().models.experts(side.ref),
            request,
            policy=OffloadPolicy.layerwise(),
            device="cpu",
        )
        raw = side.ours().model_patcher.model.process_latent_out(run.latents)
        native = sampled(side.theirs(), sampler, _simple(), latent=torch.zeros(1, 16, *size))
        found[f"{size} in our sampler"] = _difference(raw, native)
    return found


def odd_image_case(side: Side) -> dict[str, object]:
    """A start image with odd sides, and a mask."""
    size = (2, 9, 7)
    mask = torch.ones(1, 4, *size)
    mask[:, :, :1] = 0
    image = {"concat_latent_image": _normal(1, 16, *size, seed=4), "concat_mask": mask}
    texts = side.positive, side.negative
    side.positive, side.negative = (
        [[text, {**belongings, **image}] for text, belongings in each] for each in texts
    )
    found = side.difference(
        comfy.samplers.sampler_object("euler"), _simple(), latent=torch.zeros(1, 16, *size)
    )
    side.positive, side.negative = texts
    return {"difference": found}


def image_by_mask_case(side: Side) -> dict[str, object]:
    """Without an image mask, the noise mask marks the given latent frames for the expert."""
    image = {"concat_latent_image": _normal(*SHAPE, seed=4)}
    side.positive = [[side.positive[0][0], image]]
    side.negative = [[side.negative[0][0], image]]
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, :1] = 0
    run = {"latent": image["concat_latent_image"], "mask": mask}
    return {"difference": side.difference(comfy.samplers.sampler_object("euler"), _simple(), **run)}


def endless_case(side: Side) -> int:
    """Number of predicted calls for a sampler that never accepts a step."""
    sampler = comfy.samplers.ksampler("dpm_adaptive", {"accept_safety": 1e9})
    patcher = side.ours().model_patcher
    guider = Namespace(inner_model=patcher.model, model_patcher=patcher)
    return len(predicted_sigmas(guider, sampler, _simple(), SEED))


def same_as_our_sampler_case(side: Side) -> dict[str, object]:
    guider = side.ours()
    result = sampled(guider, comfy.samplers.sampler_object("euler"), _simple())
    noise = comfy.sample.prepare_noise(torch.zeros(SHAPE), SEED)
    texts = {"negative": side.negative[0][0], "guidance": GUIDANCE, "boundary_ratio": BOUNDARY}
    request = DenoiseRequest(noise, side.positive[0][0], sigmas=_simple(), solver="euler", **texts)
    run = denoise(
        current_host().models.experts(side.ref),
        request,
        policy=OffloadPolicy.layerwise(),
        device="cpu",
    )
    raw = guider.model_patcher.model.process_latent_out(run.latents)
    theirs, ours = run.timeline.steps, guider.timeline.steps
    return {
        "difference": _difference(result, raw),
        "bytes": [[step.bytes_moved for step in ours], [step.bytes_moved for step in theirs]],
        "experts": [[step.expert for step in ours], [step.expert for step in theirs]],
        "sigmas": [[step.sigma for step in ours], [step.sigma for step in theirs]],
    }


def interrupt_case(side: Side) -> dict[str, object]:
    """Cancel while a block computes: the run ends before the next block.

    The next run is not affected.
    """
    guider, sampler = side.ours(), comfy.samplers.sampler_object("heun")
    whole = sampled(guider, sampler, _simple())
    visited = []

    def cancel(*_: Any) -> None:
        visited.append(1)
        if len(visited) == 3:
            comfy.model_management.interrupt_current_processing(True)

    engine = guider.model_patcher.model.pair.engine(
        guider.model_patcher.policy, torch.device("cpu")
    )
    hooks = [block.register_forward_hook(cancel) for block in engine.models["high"].blocks]
    try:
        sampled(guider, sampler, _simple())
        raised = "nothing"
    except comfy.model_management.InterruptProcessingException:
        raised = "interrupt"
    for hook in hooks:
        hook.remove()
    return {
        "raised": raised,
        "blocks": len(visited),
        "flag": comfy.model_management.processing_interrupted(),
        "again": torch.equal(sampled(guider, sampler, _simple()), whole),
    }


def error_case(side: Side) -> dict[str, object]:
    """A failure in the middle of sampling leaves everything usable."""
    guider, sampler = side.ours(), comfy.samplers.sampler_object("euler")
    whole = sampled(guider, sampler, _simple())

    def fail(step: int, *_: Any) -> None:
        if step == 2:
            raise ZeroDivisionError

    try:
        sampled(guider, sampler, _simple(), callback=fail)
        raised = "nothing"
    except ZeroDivisionError:
        raised = "its own"
    return {"raised": raised, "again": torch.equal(sampled(guider, sampler, _simple()), whole)}


def evicted_case(side: Side) -> dict[str, object]:
    """A preview loads a VAE in the middle of a run, with too little free memory."""
    guider, sampler = side.ours(), comfy.samplers.sampler_object("euler")
    whole = sampled(guider, sampler, _simple())
    patcher, cpu = guider.model_patcher, torch.device("cpu")
    listed = []

    def evict(step: int, *_: Any) -> None:
        if step == 1:
            freed = patcher.partially_unload(cpu, 10)
            held = [loaded.model for loaded in comfy.model_management.current_loaded_models]
            listed.append([freed, patcher in held])
        if step == 3:
            comfy.model_management.unload_all_models()
            listed.append(patcher.loaded_size() > 0)

    result = sampled(guider, sampler, _simple(), callback=evict)
    comfy.model_management.load_models_gpu([patcher])
    patcher.detach()
    return {"equal": torch.equal(result, whole), "during": listed, "left": patcher.loaded_size()}


def random_state_case(side: Side) -> dict[str, object]:
    """Random state is restored after a trial in which a sampler draws and seeds, or fails."""
    before = _state()

    def draw() -> None:
        torch.manual_seed(9)
        torch.rand(3), numpy.random.rand(3), random.random()

    with preserve_random_state():
        draw()
        inside = _state()
    after = _state()
    try:
        with preserve_random_state():
            draw()
            raise ZeroDivisionError
    except ZeroDivisionError:
        return {"changed inside": inside != before, "kept": after == before == _state()}


def foreign_case(side: Side) -> dict[str, object]:
    """A sampler from another pack: never dry-run, and right all the same."""
    runs = []

    def midpoint(
        model: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        extra_args: Any,
        callback: Any,
        disable: bool,
    ):
        runs.append(1)
        ones = x.new_ones([len(x)])
        for now, then in pairwise(sigmas):
            slope = (x - model(x, now * ones, **extra_args)) / now
            middle = (now + then) / 2
            x = (
                x
                + (then - now)
                * (x - model(x + (middle - now) * slope, middle * ones, **extra_args))
                / middle
            )
        return x

    sampler, guider, theirs = comfy.samplers.KSAMPLER(midpoint), side.ours(), side.theirs()
    reported = []
    log = logging.getLogger("wanstream.host")
    log.setLevel(logging.INFO)
    log.addFilter(listen := lambda record: reported.append(record.getMessage()) or True)
    result = sampled(guider, sampler, _simple())
    log.removeFilter(listen)
    ours = len(runs)
    return {
        "runs": ours,
        "reported": reported,
        "difference": _difference(result, sampled(theirs, sampler, _simple())),
        "calls": [[step.expert for step in guider.timeline.steps], theirs.calls],
        "recompiled": guider.recompiled,
    }


def core_nodes_case(side: Side) -> dict[str, object]:
    """Samplers from ComfyUI's own nodes, with functions as options or from other modules."""
    basic = nodes_custom_sampler
    samplers = {
        "er_sde": _results(
            basic.SamplerER_SDE, solver_type="ER-SDE", max_stage=3, eta=1.0, s_noise=1.0
        ),
        "sa_solver": _results(
            basic.SamplerSASolver,
            model=side.natives["high"],
            eta=1.0,
            sde_start_percent=0.2,
            sde_end_percent=0.8,
            s_noise=1.0,
            predictor_order=3,
            corrector_order=4,
            use_pece=False,
            simple_order_2=False,
        ),
        "euler_cfg_pp alternative": _results(
            nodes_advanced_samplers.SamplerEulerCFGpp, version="alternative"
        ),
    }
    found = {}
    for name, (sampler,) in samplers.items():
        guider = side.ours()
        result = sampled(guider, sampler, _simple())
        found[name] = {
            "difference": _difference(result, sampled(side.theirs(), sampler, _simple())),
            "recompiled": guider.recompiled,
        }
    return found


def _write_small_vae() -> bool:
    """Write the small preview VAE with random weights.

    False if this ComfyUI has none for Wan yet.
    """
    if find_spec("comfy.taesd.taehv") is None:
        return False
    from comfy.taesd.taehv import TAEHV

    file = Path(folder_paths.get_folder_paths("vae_approx")[0]) / "lighttaew2_1.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # the test model's file is narrower than ComfyUI expects
    save_file(TAEHV(latent_channels=16).state_dict(), file)
    return True


def preview_case(side: Side) -> dict[str, object]:
    """Previews sent to the browser by ComfyUI's sampling node and our progress bar, by method."""
    shown: dict[str, list[object]] = {}
    methods = latent_preview.LatentPreviewMethod
    there = _write_small_vae()
    for method in (methods.Latent2RGB, *([methods.TAESD] if there else []), methods.NoPreviews):
        comfy.cli_args.args.preview_method = method
        sizes = shown[method.value] = []

        def saw(
            done: int, total: int, preview: Any, *_: Any, sizes: list[object] = sizes, **__: Any
        ) -> None:
            sizes.append([done, total, preview and [preview[0], *preview[1].size]])

        comfy.utils.set_progress_bar_global_hook(saw)
        noise, latent = (
            nodes_custom_sampler.Noise_RandomNoise(SEED),
            {"samples": torch.zeros(SHAPE)},
        )
        euler = comfy.samplers.sampler_object("euler")
        inputs = {"noise": noise, "guider": side.ours(), "sampler": euler, "sigmas": _simple()[:4]}
        out, denoised = _results(
            nodes_custom_sampler.SamplerCustomAdvanced, **inputs, latent_image=latent
        )
        bar = current_host().events.progress(4, None)
        bar.update(1, _normal(*SHAPE, seed=6))
        bar.update(4)
    comfy.cli_args.args.preview_method = methods.Latent2RGB
    wan22 = shown["48 channels"] = []
    comfy.utils.set_progress_bar_global_hook(
        lambda done, total, preview, *_, **__: wan22.append(preview[1].size)
    )
    current_host().events.progress(4, None).update(1, _normal(1, 48, 2, 4, 3, seed=6))
    comfy.utils.set_progress_bar_global_hook(None)
    kept = out["samples"], denoised["samples"]
    return {
        **shown,
        "shapes": [list(each.shape) for each in kept],
        "finite": [bool(e.isfinite().all()) for e in kept],
    }


def refused_cases(side: Side, image_side: Side) -> dict[str, Callable[[], object]]:
    """Refused inputs, each as a call that must raise."""
    euler, upscale = (
        comfy.samplers.sampler_object("euler"),
        nodes_advanced_samplers.SamplerLCMUpscale,
    )
    (resizing,) = _results(upscale, scale_ratio=2.0, scale_steps=-1, upscale_method="bilinear")
    karras = comfy.k_diffusion.sampling.get_sigmas_karras(STEPS, 0.03, 14.6)
    control = [[side.positive[0][0], {"control": object()}]]
    parts = torch.nested.nested_tensor([torch.zeros(SHAPE[1:]), torch.zeros(8, 10, 1, 1)])

    def per_sample(
        model: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        extra_args: Any,
        callback: Any,
        disable: bool,
    ):
        return model(x, torch.linspace(0.9, 0.8, len(x)), **extra_args)

    def broken(
        model: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        extra_args: Any,
        callback: Any,
        disable: bool,
    ):
        return model(x * float("nan"), sigmas[:1], **extra_args)

    def curious(
        model: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        extra_args: Any,
        callback: Any,
        disable: bool,
    ):
        return model.inner_model.inner_model.diffusion_model(x)

    def of(function: Any) -> Any:
        return comfy.samplers.KSAMPLER(function)

    def replaced() -> object:
        guider = side.ours()
        guider.model_options = {**guider.model_options, "sampler_calc_cond_batch_function": print}
        return sampled(guider, euler, _simple())

    two = {"latent": torch.zeros(2, *SHAPE[1:])}
    return {
        "resizing sampler": lambda: sampled(side.ours(), resizing, _simple()),
        "sigmas of another model": lambda: sampled(side.ours(), euler, karras),
        "levels per sample": lambda: sampled(side.ours(), of(per_sample), _simple(), **two),
        "not a number": lambda: sampled(side.ours(), of(broken), _simple()),
        "reads diffusion_model": lambda: sampled(side.ours(), of(curious), _simple()),
        "replaced conditions": replaced,
        "control": lambda: sampled(side.ours(positive=control), euler, _simple()),
        "several parts": lambda: sampled(side.ours(), euler, _simple(), latent=parts, noise=parts),
        "no image": lambda: sampled(image_side.ours(), euler, _simple()),
        "boundary": lambda: side.ours(boundary_ratio=1.5),
        "flow shift": lambda: side.ours(flow_shift=0.0),
    }


def _refusal(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except ValueError as err:
        return [type(err).__name__, str(err)]
    return ["", "nothing was raised"]


def _told(case: Callable[[], object]) -> object:
    """Return the case's value, or a traceback if it failed, and the others go on."""
    try:
        return case()
    except Exception:  # noqa: BLE001 - the test of this case fails with the traceback
        return {"error": traceback.format_exc()}


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """One value per case. ComfyUI runs nodes in inference mode as well."""
    from guider_settings_cases import settings_cases

    torch.set_num_threads(1)
    text, image = Side(Path(folder), "t2v"), Side(Path(folder), "i2v")
    cases: dict[str, Callable[[], object]] = {
        **{f"sampler {n}": partial(sampler_case, text, n) for n in comfy.samplers.SAMPLER_NAMES},
        **{
            f"schedule {n}": partial(schedule_case, text, n)
            for n in current_host().models.schedule_names()
        },
        **{
            f"cfg {guidance} {n}": partial(cfg_case, text, guidance, n)
            for guidance in ((1.0, 1.0), (1.0, 3.0), (4.0, 1.0))
            for n in ("euler", "euler_cfg_pp")
        },
        **{
            f"mask {n} {start}": partial(mask_case, text, n, start)
            for n in ("euler", "dpmpp_2m", "ddim")
            for start in ("noise", "later start")
        },
        **{
            name.removesuffix("_case"): partial(case, text)
            for name, case in globals().items()
            if name.endswith("_case")
            and list(inspect.signature(case).parameters) == ["side"]
            and "image" not in name
        },
        **{
            f"refused {n}": partial(_refusal, call)
            for n, call in refused_cases(text, image).items()
        },
        **{f"settings {n}": case for n, case in settings_cases(text).items()},
        "odd image": partial(odd_image_case, image),
        "image": partial(image_case, image, 1, 1),
        "first and last image": partial(image_case, image, 1, 4),
        "image known by the noise mask": partial(image_by_mask_case, image),
    }
    return {name: _told(case) for name, case in cases.items()}
