"""Runs in ComfyUI's Python: two experts as one MODEL against ComfyUI's own models.

`answers(folder)` returns one JSON value per case. `test_native_joined.py` checks the values.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.conds
import comfy.model_base
import comfy.model_management
import comfy.patcher_extension
import comfy.samplers
import native_families
import torch
from comfy.k_diffusion import sampling
from comfy_extras import nodes_custom_sampler
from installed_pack import load_pack
from native_cases import traffic
from native_families import FAMILIES, Family, results_of, sample
from native_patches import (
    PATCHES,
    attention_1,
    context_windows,
    layer_guidance,
    node_results,
    shift,
)

import nodes

load_pack()
from native_loading import load_native  # noqa: E402

from wanstream.host import ShareVisits, current_host  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402

LIMITS = {"smallest_block": 20_000, "smallest_model": 1_000}
HIGH = FAMILIES["wan_t2v"]
LOW = replace(HIGH, name="wan_t2v_low", seed=2)
BOUNDARY = 0.875
POLICIES = {"layerwise": OffloadPolicy.layerwise(1), "block swap": OffloadPolicy.block_swap(2)}

Run = Callable[[Any], torch.Tensor]


class Models:
    """Both experts in files, as ComfyUI's MODELs and as streamed ones."""

    def __init__(self, folder: Path, pair: tuple[Family, Family] = (HIGH, LOW)) -> None:
        self.folder = folder
        self.pair = pair
        self.join = current_host().native.join_experts
        self.split = current_host().native.split_experts

    def path(self, family: Family, dtype: str = "fp32") -> Path:
        path = self.folder / f"{family.name}_{dtype}.safetensors"
        if not path.exists():
            family.write(path, dtype)
        return path

    def plain(self, *dtypes: str) -> list[Any]:
        found = zip(self.pair, dtypes or ("fp32", "fp32"), strict=True)
        return [native_families.native(self.path(each, dtype), each) for each, dtype in found]

    def streamed(
        self,
        *dtypes: str,
        policy: Any = POLICIES["layerwise"],
        share: ShareVisits = ShareVisits.AUTO,
    ) -> list[Any]:
        made = []
        for family, dtype in zip(self.pair, dtypes or ("fp32", "fp32"), strict=True):
            with native_families.given_configuration(family):
                path = self.path(family, dtype)
                made.append(
                    load_native(path, "default", policy, share_visits=ShareVisits(share), **LIMITS)
                )
        return made

    def joined(self, *dtypes: str, boundary: float = BOUNDARY, **settings: Any) -> Any:
        return self.join(*self.streamed(*dtypes, **settings), boundary)


def switching(high: Any, low: Any, boundary: float = BOUNDARY) -> Any:
    """Return ComfyUI's high-noise expert as a MODEL that calls the other expert at low noise."""
    inner = high.model_options.get("model_function_wrapper")

    def call(apply_model: Callable[..., torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
        def expert(x: torch.Tensor, t: torch.Tensor, **conditions: Any) -> torch.Tensor:
            is_high = float(t.flatten()[0]) * 1000 >= boundary * 1000
            return (apply_model if is_high else low.model.apply_model)(x, t, **conditions)

        if inner is not None:
            return inner(expert, given)
        return expert(given["input"], given["timestep"], **given["c"])

    both = high.clone()
    both.set_additional_models("low", [low])
    both.set_model_unet_function_wrapper(call)
    return both


def sigmas_of(model: Any, steps: int) -> torch.Tensor:
    sampling = model.get_model_object("model_sampling")
    return comfy.samplers.calculate_sigmas(sampling, "simple", steps)


@torch.inference_mode()
def run_custom(
    model: Any, sampler: Any, *, steps: int = 4, cfg: float = 1.0, sigmas: Any = None
) -> torch.Tensor:
    """Return SamplerCustomAdvanced's latent with a SAMPLER."""
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(*HIGH.conditioning())
    guider.set_cfg(cfg)
    noise = nodes_custom_sampler.Noise_RandomNoise(3)
    return node_results(
        nodes_custom_sampler.SamplerCustomAdvanced,
        noise=noise,
        guider=guider,
        sampler=sampler,
        sigmas=sigmas_of(model, steps) if sigmas is None else sigmas,
        latent_image={"samples": HIGH.latent()},
    )[0]["samples"]


@torch.inference_mode()
def run_advanced(high: Any, low: Any, *, steps: int, switch: int) -> torch.Tensor:
    """Return the latent from ComfyUI's graph with two KSamplerAdvanced."""
    positive, negative = HIGH.conditioning()
    latent = {"samples": HIGH.latent()}
    sampler = nodes.KSamplerAdvanced()
    given = (7, steps, 1.0, "euler", "simple", positive, negative)
    (half,) = sampler.sample(high, "enable", *given, latent, 0, switch, "enable")
    (made,) = sampler.sample(low, "disable", *given, half, switch, steps, "disable")
    return made["samples"]


def switch_step(model: Any, steps: int) -> int:
    return sum(sigma * 1000 >= BOUNDARY * 1000 for sigma in sigmas_of(model, steps)[:-1].tolist())


class Midpoints(comfy.samplers.Sampler):
    """SAMPLER with its own loop: two calls per step, the second halfway through."""

    def sample(
        self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None,
        denoise_mask=None, disable_pbar=False,
    ) -> torch.Tensor:  # fmt: skip
        options, seed = extra_args["model_options"], extra_args["seed"]
        scaling = model_wrap.inner_model.model_sampling
        x = scaling.noise_scaling(sigmas[0], noise, latent_image, True)
        for step, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
            middle = (sigma + following) / 2
            at = x
            for level in (sigma, middle):
                denoised = model_wrap(at, level.repeat(len(x)), options, seed)
                slope = (at - denoised) / level
                at = x + slope * (middle - sigma)
            x = x + slope * (following - sigma)
            if callback is not None:
                callback(step, denoised, x, len(sigmas) - 1)
        return scaling.inverse_noise_scaling(sigmas[-1], x)


def back_and_forth(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Sampler function that returns to a higher noise level after each step, as restarts do."""
    for step, (sigma, following) in enumerate(itertools.pairwise(sigmas)):
        for at in (sigma, (sigma + following) / 2, sigma):
            denoised = model(x, at.repeat(len(x)), **extra_args)
        x = denoised + (x - denoised) * following / sigma
        if callback is not None:
            callback({"i": step, "denoised": denoised, "x": x})
    return x


def shifted(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Sampler function around Euler's: calls and steps have different noise levels."""

    class Shifted:
        def __init__(self) -> None:
            self.inner_model = model.inner_model

        def __call__(self, x: torch.Tensor, sigma: torch.Tensor, **more: Any) -> torch.Tensor:
            return model(x, sigma * 0.97, **more)

    return sampling.sample_euler(Shifted(), x, sigmas, extra_args, callback, disable)


FOREIGN = {
    "midpoints": Midpoints,
    "back and forth": lambda: comfy.samplers.KSAMPLER(back_and_forth),
    "shifted": lambda: comfy.samplers.KSAMPLER(shifted),
}
NATIVE = ("euler", "heun", "dpm_2", "dpmpp_2m", "uni_pc", "res_multistep")


def room_for_one(self: Any, input_shape: list[int], **_: Any) -> float:
    """Activation bytes, so many for a batch that ComfyUI computes conditions one by one."""
    return 1e30 if input_shape[0] > 1 else 1e6


def figures(model: Any) -> dict[str, Any]:
    run = model.model.runs.last
    return {
        "experts": [step.expert for step in run.shown.timeline.steps],
        "bytes": [step.bytes_moved for step in run.shown.timeline.steps],
        "recompiled": run.session.recompiled,
        "notes": run.policy.notes,
    }


def compared(run: Run, expected: torch.Tensor, model: Any, *, runs: int = 2) -> dict[str, Any]:
    """Return whether runs equal ComfyUI's model bit by bit, and figures for each."""
    found = [(torch.equal(run(model), expected), figures(model)) for _ in range(runs)]
    return {"equal": [equal for equal, _ in found], "runs": [each for _, each in found]}


def samplers(models: Models) -> dict[str, Any]:
    """KSampler and SamplerCustomAdvanced, with ComfyUI's samplers and others."""
    plain, found = switching(*models.plain()), {}
    joined = {name: models.joined(policy=policy) for name, policy in POLICIES.items()}
    for steps in (4, 20):
        for name in NATIVE if steps == 4 else ("euler", "dpmpp_2m"):
            run = partial(sample, family=HIGH, steps=steps, cfg=1.0, sampler=name)
            expected = run(plain)
            for policy, model in joined.items():
                found[f"{name}, {steps} steps, {policy}"] = compared(run, expected, model)
        for name, make in FOREIGN.items():
            run = partial(run_custom, sampler=make(), steps=steps)
            expected = run(plain)
            found[f"{name}, {steps} steps"] = compared(run, expected, joined["layerwise"])
        run = partial(run_custom, sampler=comfy.samplers.sampler_object("euler"), steps=steps)
        found[f"custom, {steps} steps"] = compared(run, run(plain), joined["block swap"])
    return found


def template(models: Models) -> dict[str, Any]:
    """The graph with two KSamplerAdvanced, by ComfyUI's models and by the joined one."""
    found = {}
    for steps in (4, 20):
        high, low = models.plain()
        switch = switch_step(high, steps)
        expected = run_advanced(high, low, steps=steps, switch=switch)
        joined = models.joined()
        made = run_advanced(joined, joined, steps=steps, switch=switch)
        with traffic() as of_one:
            one = sample(joined, HIGH, steps=steps, cfg=1.0)
        streamed = models.streamed()
        with traffic() as of_two:
            run_advanced(*streamed, steps=steps, switch=switch)
        found[str(steps)] = {
            "switch": switch,
            "equal": torch.equal(made, expected),
            "difference": float((one - expected).abs().max() / expected.abs().max()),
            "bytes": [of_one.nbytes, of_two.nbytes],
            "buffers": [
                joined.weights.loaded_engine.loaded_bytes,
                sum(each.weights.loaded_engine.loaded_bytes for each in streamed),
            ],
        }
    return found


def lora(models: Models, kind: str = "lora") -> Path:
    path = models.folder / f"{kind}.safetensors"
    if not path.exists():
        network = native_families.native(models.path(HIGH), HIGH).model.diffusion_model
        shapes = {name: each.shape for name, each in network.named_parameters()}
        native_families.write_lora(kind, path, shapes)
    return path


def with_lora(model: Any, models: Models) -> Any:
    return native_families.load_lora(model, lora(models))


def patches(models: Models) -> dict[str, Any]:
    """Patches on one expert before the join, on both behind it, and on one behind a split."""
    run = partial(sample, family=HIGH, steps=4, cfg=3.0)
    added = partial(with_lora, models=models)
    changes = {
        **{name: patch for name, (patch, families) in PATCHES.items() if "wan_t2v" in families},
        "LoRA": added,
        "context windows": context_windows,
    }
    # A pass-counting cache counts separately in two models.
    for name in ("first-block cache", "TeaCache", "cache in a function wrapper"):
        del changes[name]
    found = {}
    for name, change in changes.items():
        high, low = models.plain()
        both = run(switching(change(high), change(low)))
        of_high = run(switching(change(high), low)) if name in IN_ONE else both
        joined = models.joined()
        found[name] = {
            "changed": not torch.equal(both, run(switching(high, low))),
            "both": compared(run, both, change(joined), runs=2)["equal"],
            "clean": torch.equal(run(joined), run(switching(high, low))),
        }
        try:
            again = models.join(*models.split(change(joined)), BOUNDARY)
            found[name]["split"] = torch.equal(run(again), both)
        except ValueError as err:
            found[name]["split"] = str(err)
        if name in IN_ONE:
            high, low = models.split(joined)
            again = models.join(change(high), low, BOUNDARY)
            found[name]["one"] = torch.equal(run(again), of_high)
            found[name]["differ"] = not torch.equal(of_high, both)
    return found


IN_ONE = ("LoRA", "replaced forward")
"""Patches kept apart by ComfyUI's two models: they are not in the call's options."""


def one_expert_options(models: Models) -> dict[str, Any]:
    """Options on one expert. ComfyUI has them in the sampler's options, hence two samplers."""
    found = {}
    for name, change in {"attention": attention_1, "guidance": layer_guidance}.items():
        for place in (0, 1):
            plain = models.plain()
            streamed = models.streamed()
            plain[place], streamed[place] = change(plain[place]), change(streamed[place])
            joined = models.join(*streamed, BOUNDARY)
            expected = run_advanced(*plain, steps=4, switch=3)
            made = run_advanced(joined, joined, steps=4, switch=3)
            found[f"{name} {place}"] = torch.equal(made, expected)
    return found


def shifts(models: Models) -> dict[str, Any]:
    """Shift on one expert before the join, and on both behind it."""
    high, low = models.plain()
    run = partial(sample, family=HIGH, steps=4, cfg=1.0)
    streamed = models.streamed()
    behind = shift(models.join(*streamed, BOUNDARY))
    before = models.join(shift(streamed[0]), streamed[1], BOUNDARY)
    split = models.split(behind)
    return {
        "both": torch.equal(run(behind), run(switching(shift(high), shift(low)))),
        "high": torch.equal(run(before), run(switching(shift(high), low))),
        "split": [float(each.get_model_object("model_sampling").shift) for each in split],
        "differ": not torch.equal(run(behind), run(models.join(*streamed, BOUNDARY))),
    }


def formats(models: Models) -> dict[str, Any]:
    """Experts with different number formats, and with the same quantised one."""
    run = partial(sample, family=HIGH, steps=4, cfg=3.0)
    found = {}
    for dtypes in (("fp32", "bf16"), ("fp8", "bf16"), ("fp16", "fp8"), ("bf16", "bf16")):
        expected = run(switching(*models.plain(*dtypes)))
        found[" and ".join(dtypes)] = compared(run, expected, models.joined(*dtypes))["equal"]
    return found


def shared_visits(models: Models) -> dict[str, Any]:
    """Positive and negative one after the other, and in one visit per block."""
    run = partial(sample, family=HIGH, steps=6, cfg=3.0)
    found = {}
    with patch.object(comfy.model_base.BaseModel, "memory_required", room_for_one):
        expected = run(switching(*models.plain()))
        for share in ("off", "on"):
            found[share] = compared(run, expected, models.joined(share=share))
    return found


def chunks(models: Models) -> dict[str, Any]:
    """Feed-forwards of both experts in token chunks."""
    run = partial(sample, family=HIGH, steps=4, cfg=1.0)
    joined = models.joined(policy=replace(POLICIES["layerwise"], chunk_tokens=8))
    return compared(run, run(switching(*models.plain())), joined)


def lives(models: Models) -> dict[str, Any]:
    """Joined twice, run next to their own MODELs, evicted, and dropped."""
    run = partial(sample, family=HIGH, steps=4, cfg=1.0)
    high, low = models.plain()
    expected = [run(switching(high, low)), run(high), run(low), run(switching(high, low, 0.5))]
    streamed = models.streamed()
    one = models.join(*streamed, BOUNDARY)
    other = models.join(*streamed, 0.5)
    made = [run(one), *map(run, streamed), run(other), run(one)]
    equal = [torch.equal(*each) for each in zip(made, [*expected, expected[0]], strict=True)]
    found: dict[str, Any] = {"equal": equal, "shared": one.weights is other.weights}
    during = one.weights.loaded_bytes
    comfy.model_management.unload_all_models()
    found["unloaded"] = [during > 0, one.weights.loaded_bytes, other.weights.loaded_bytes]
    found["again"] = torch.equal(run(one), expected[0])
    dead = [weakref.ref(each) for each in (one.model, one.model.low, one.weights)]
    comfy.model_management.unload_all_models()
    del one, other
    gc.collect()
    found["dropped"] = [each() is None for each in dead]
    found["originals"] = torch.equal(run(streamed[0]), expected[1])
    return found


def conditioned(models: Models) -> dict[str, Any]:
    """Image experts, whose conditioning has latents and features of the picture."""
    found = {}
    for name in ("wan22_i2v", "wan_vace"):
        family = FAMILIES[name]
        pair = Models(models.folder, (family, replace(family, name=f"{name}_low", seed=2)))
        run = partial(sample, family=family, steps=4, cfg=3.0)
        expected = run(switching(*pair.plain(), 0.9))
        found[name] = compared(run, expected, pair.joined(boundary=0.9))["equal"]
    return found


def own_conditioning(models: Models) -> bool:
    """Experts with different ways to compute their conditioning."""
    original = comfy.model_base.WAN21.extra_conds

    def scaled(self: Any, **values: Any) -> dict[str, Any]:
        found = original(self, **values)
        bias = self.diffusion_model.head.head.bias.mean()
        text = found["c_crossattn"].cond
        return {**found, "c_crossattn": comfy.conds.CONDRegular(text * (1 + bias.to(text)))}

    high, low = models.plain()
    joined = models.joined()
    with patch.object(comfy.model_base.WAN21, "extra_conds", scaled):
        made = run_advanced(joined, joined, steps=4, switch=3)
        return torch.equal(made, run_advanced(high, low, steps=4, switch=3))


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as err:
        return str(err)
    return "not refused"


def refusals(models: Models) -> dict[str, str]:
    """Errors for pairs that cannot be joined."""
    high, low = models.streamed()
    joined = models.join(high, low, BOUNDARY)

    def of(base: str, **changes: Any) -> Any:
        family = replace(FAMILIES[base], **changes)
        path = models.folder / f"{family.name}.safetensors"
        family.write(path, "fp32")
        with native_families.given_configuration(family):
            return load_native(path, "default", POLICIES["layerwise"], **LIMITS)

    def wrapped(model: Any, kind: str) -> Any:
        clone = model.clone()
        clone.add_wrapper_with_key(kind, "cache", lambda executor, *given: executor(*given))
        return clone

    def bound(model: Any) -> Any:
        clone = model.clone()
        block = clone.get_model_object("diffusion_model.blocks.0")
        clone.add_object_patch("diffusion_model.blocks.0", torch.nn.Sequential(block))
        return clone

    for_images = {"name": "images", "settings": {**HIGH.settings, "in_dim": 36}}
    wider = {"name": "wider", "settings": {**HIGH.settings, "dim": 384}}
    kinds = comfy.patcher_extension.WrappersMP
    run = partial(sample, family=HIGH, steps=2, cfg=1.0)
    refuse = {
        "boundary": lambda: models.join(high, low, 1.5),
        "no number": lambda: models.join(high, low, float("nan")),
        "family": lambda: models.join(high, of("flux"), BOUNDARY),
        "variant": lambda: models.join(high, of("wan_t2v", **for_images), BOUNDARY),
        "width": lambda: models.join(high, of("wan_t2v", **wider), 1),
        "plain": lambda: models.join(high, models.plain()[1], BOUNDARY),
        "joined": lambda: models.join(joined, low, BOUNDARY),
        "no model": lambda: models.join("high", low, BOUNDARY),
        "policies": lambda: models.join(high, models.streamed(policy=POLICIES["block swap"])[1], 1),
        "sampler wrapper": lambda: models.join(wrapped(high, kinds.OUTER_SAMPLE), low, BOUNDARY),
        "bound in front": lambda: models.join(bound(high), low, BOUNDARY),
        "bound behind": lambda: run(bound(joined)),
        "split": lambda: models.split(high),
        "saved": lambda: joined.state_dict_for_saving(),
        "merged": lambda: joined.get_key_patches("diffusion_model."),
        "two levels": lambda: joined.model.expert(torch.tensor([0.9, 0.1])),
    }
    joined.model.boundary = BOUNDARY
    return {name: refused(call) for name, call in refuse.items()}


def at_the_boundary(models: Models) -> list[str]:
    """Experts at fp32 noise levels on the boundary, which fp32 mostly rounds."""
    model = models.joined().model
    found = []
    for boundary in (0.7, 0.875, 0.9, 0.95):
        model.boundary = boundary
        found.append(model.expert(torch.tensor([boundary])))
    return found


def foreign_lora(models: Models) -> list[bool]:
    """A LoRA for another family: ComfyUI skips all keys in it."""
    path = models.folder / "flux_lora.safetensors"
    down, up = torch.ones(4, 64), torch.ones(64, 4)
    keys = "transformer.single_transformer_blocks.0.attn.to_q"
    native_families.save_file({f"{keys}.lora_A.weight": down, f"{keys}.lora_B.weight": up}, path)
    run = partial(sample, family=HIGH, steps=2, cfg=1.0)
    joined = models.joined()
    changed = native_families.load_lora(joined, path)
    return [not changed.patches, torch.equal(run(changed), run(joined))]


def answers(folder: str) -> dict[str, object]:
    torch.set_num_threads(1)
    models = Models(Path(folder))
    cases = (
        samplers, template, patches, one_expert_options, shifts, formats, shared_visits, chunks,
        lives, conditioned, own_conditioning, refusals, at_the_boundary, foreign_lora,
    )  # fmt: skip
    chosen = {case.__name__: partial(case, models) for case in cases}
    return results_of(chosen, unload=True)
