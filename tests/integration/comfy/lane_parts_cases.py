"""Runs in ComfyUI's own Python: Fun models and Bernini's contexts in our sampler and guider.

They are compared with ComfyUI's. `answers(folder)` returns one value per case. `test_lane_parts.py`
checks the values.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.sample
import comfy.samplers
import torch
from comfy_extras import nodes_custom_sampler, nodes_wan
from fun_cases import (
    BOUNDARY,
    FUN_CASES,
    GUIDANCE,
    LATENT_HEIGHT,
    LATENT_WIDTH,
    SEED,
    SHIFT,
    SIGMAS,
    STEPS,
    SWITCH,
    FunCase,
    FunFiles,
    FunInputs,
    Vae,
    _family,
    _pictures,
    forward_by,
    inputs_of,
    native_forward,
    native_run,
)
from guider_cases import Namespace, _difference, _refusal
from native_families import _normal, results_of

from wanstream.host import current_host
from wanstream.nodes.guider import WanStreamGuider
from wanstream.nodes.latents import vae_of
from wanstream.nodes.runs.file_checks import check_encoder
from wanstream.nodes.sampler import WanStreamSampler
from wanstream.nodes.variants.bernini import WanStreamBernini
from wanstream.nodes.variants.fun_control import WanStreamFunControl
from wanstream.sampling.steps import Guidance
from wanstream.schema.refs.experts import ExpertsRef
from wanstream.wan.latents import WAN21, WAN22

TWO_VIDEOS = ("fun_control_22", "fun_control_21_reference", "fun_control_5b")
"""Together they have every per-video value: image, mask, reference and CLIP, in a pair and with 48
channels.
"""

CONTEXTS = {
    "a source": [(3, 4, 6)],
    "a source and images": [(3, 4, 6), (1, 8, 4), (1, 2, 10)],
    "images": [(1, 6, 6), (1, 4, 4)],
}
"""Context latent sizes."""


class Sampler(WanStreamSampler):
    hidden = Namespace(unique_id=None)


def ref_of(files: FunFiles, case: FunCase) -> ExpertsRef:
    paths = files.paths(case)
    return ExpertsRef(
        high_noise=paths["high"],
        low_noise=paths.get("low"),
        single=not case.pair,
        compute_dtype="float32",
    )


def by_our_sampler(
    files: FunFiles, case: FunCase, inputs: FunInputs, **changes: Any
) -> torch.Tensor:
    """Return our sampler's raw latent, with the settings from `native_run`."""
    given: dict[str, Any] = {"seed": SEED, "steps": STEPS, "solver": "euler", "schedule": "simple"}
    given |= {
        "flow_shift": SHIFT,
        "boundary_ratio": BOUNDARY,
        "switch_step": SWITCH if case.pair else -1,
    }
    given |= {"start_step": 0, "guidance_high": GUIDANCE[0], "guidance_low": GUIDANCE[1], **changes}
    latent = Sampler.execute(
        ref_of(files, case), inputs.positive, inputs.negative, inputs.latent, **given
    ).args[0]
    return latent["samples"]


def guider_of(files: FunFiles, case: FunCase, inputs: FunInputs, **changes: Any) -> Any:
    given = {
        "flow_shift": SHIFT,
        "boundary_ratio": BOUNDARY,
        "guidance_high": GUIDANCE[0],
        "guidance_low": GUIDANCE[1],
    }
    made = WanStreamGuider.execute(
        ref_of(files, case), inputs.positive, inputs.negative, **{**given, **changes}
    )
    return made.args[0]


def by_guider(files: FunFiles, case: FunCase, inputs: FunInputs) -> torch.Tensor:
    """Return the raw latent from ComfyUI's Euler over our guider, at `native_run`'s sigmas."""
    sampling, samples = (
        files.model(case).get_model_object("model_sampling"),
        inputs.latent["samples"],
    )
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", STEPS)
    noise, sampler = (
        comfy.sample.prepare_noise(samples, SEED),
        comfy.samplers.sampler_object("euler"),
    )
    # The native run switches at a step, and the guider at a noise level.
    boundary = float(sigmas[SWITCH - 1 : SWITCH + 1].mean())
    guider = guider_of(files, case, inputs, boundary_ratio=boundary)
    return guider.sample(noise, samples, sampler, sigmas, disable_pbar=True, seed=SEED).cpu()


@torch.inference_mode()
def parity_case(files: FunFiles, case: FunCase, inputs: FunInputs) -> dict[str, Any]:
    """Return differences from ComfyUI for each expert's forward passes and for whole runs.

    Forward passes are with and without guidance.
    """
    forwards = {}
    for sigma in SIGMAS:
        for scale in (1.0, GUIDANCE[0]):
            guider = guider_of(files, case, inputs, guidance_high=scale, guidance_low=scale)
            expected = native_forward(files, case, inputs, sigma=sigma, cfg=scale)
            forwards[f"{sigma}, {scale}"] = _difference(forward_by(guider, inputs, sigma), expected)
    expected = native_run(files, case, inputs)
    return {
        "forwards": forwards,
        "sampler": _difference(by_our_sampler(files, case, inputs), expected),
        "guider": _difference(by_guider(files, case, inputs), expected),
    }


def bernini(*, pair: bool) -> FunCase:
    """Experts with text-to-video tensors, as Bernini has."""
    family = _family("bernini_pair" if pair else "bernini", 16, model_type="t2v")
    return FunCase(family=family, node=object, optional=(), pair=pair)


def context_inputs(sizes: list[tuple[int, int, int]], *, batch: int = 1) -> FunInputs:
    """Return BerniniConditioning's outputs for contexts in these sizes."""
    context = [_normal(1, 16, *size, seed=90 + number) for number, size in enumerate(sizes)]
    values = {"pooled_output": None, **({"context_latents": context} if context else {})}
    sides = [[[_normal(1, tokens, 4096, seed=tokens), dict(values)]] for tokens in (12, 9)]
    latent = {"samples": torch.zeros(batch, 16, 3, LATENT_HEIGHT, LATENT_WIDTH)}
    return FunInputs(positive=sides[0], negative=sides[1], latent=latent)


@torch.inference_mode()
def context_case(
    files: FunFiles, case: FunCase, sizes: list[tuple[int, int, int]], batch: int = 1
) -> dict[str, Any]:
    if importlib.util.find_spec("comfy_extras.nodes_bernini") is None:
        return {"skip_reason": "this ComfyUI does not read context latents"}
    inputs = context_inputs(sizes, batch=batch)
    plain = native_forward(files, case, context_inputs([]))
    return {
        **parity_case(files, case, inputs),
        "effect": _difference(native_forward(files, case, inputs)[:1], plain),
    }


@torch.inference_mode()
def masked_case(files: FunFiles, case: FunCase) -> float:
    """Return the difference in a run with a kept first latent frame and no reference image."""
    inputs = inputs_of(case, without=("ref_image",))
    samples, mask = (
        _normal(*inputs.latent["samples"].shape, seed=95),
        torch.ones(1, 1, 3, LATENT_HEIGHT, LATENT_WIDTH),
    )
    mask[:, :, 0] = 0
    inputs = replace(inputs, latent={"samples": samples, "noise_mask": mask})
    return _difference(by_our_sampler(files, case, inputs), native_run(files, case, inputs))


CONTEXT_SCALE = 1.75


def _without_context(side: list[Any]) -> list[Any]:
    return [
        [text, {key: value for key, value in values.items() if key != "context_latents"}]
        for text, values in side
    ]


def native_dual_run(files: FunFiles, case: FunCase, inputs: FunInputs) -> torch.Tensor:
    """Return the Dual CFG Guider's raw latent, with steps, noise and guidance from `native_run`."""
    samples = latent = inputs.latent["samples"]
    sampling = files.model(case).get_model_object("model_sampling")
    sigmas, sampler = (
        comfy.samplers.calculate_sigmas(sampling, "simple", STEPS),
        comfy.samplers.sampler_object("euler"),
    )
    noise = comfy.sample.prepare_noise(samples, SEED)
    stages = (("high", 0, SWITCH), ("low", SWITCH, STEPS)) if case.pair else (("high", 0, STEPS),)
    for (expert, start, end), scale in zip(stages, GUIDANCE, strict=False):
        guider = nodes_custom_sampler.Guider_DualCFG(files.model(case, expert))
        guider.set_conds(inputs.positive, inputs.negative, _without_context(inputs.negative))
        guider.set_cfg(scale, CONTEXT_SCALE)
        given = noise if start == 0 else torch.zeros_like(noise)
        latent = guider.sample(
            given, latent, sampler, sigmas[start : end + 1], disable_pbar=True, seed=SEED
        ).cpu()
    return latent


@torch.inference_mode()
def dual_case(files: FunFiles, case: FunCase, batch: int = 1) -> dict[str, Any]:
    """Return differences between `context_guidance` runs and ComfyUI's, and ours without it."""
    if importlib.util.find_spec("comfy_extras.nodes_bernini") is None:
        return {"skip_reason": "this ComfyUI does not read context latents"}
    inputs = context_inputs(CONTEXTS["a source and images"], batch=batch)
    ours = by_our_sampler(files, case, inputs, guidance=Guidance(context=CONTEXT_SCALE))
    plain = by_our_sampler(files, case, inputs)
    guider = partial(guider_of, files, case, inputs, guidance=Guidance(context=CONTEXT_SCALE))
    return {
        "run": _difference(ours, native_dual_run(files, case, inputs)),
        "effect": _difference(ours, plain),
        "refused": _refusal(guider),
    }


SIZE = {"width": 48, "height": 32}
"""Pixel size for 4 x 6 latent pixels."""


def _ours(node: Any, vae: Vae, **inputs: Any) -> list[Any]:
    """Return our node's outputs, with the test VAE in place of a file."""
    space = WAN22 if vae.latent_channels == WAN22.channels else WAN21
    with (
        patch(f"{vae_of.__module__}.open_vae", lambda path: Namespace(space=space)),
        patch(f"{check_encoder.__module__}._vae", lambda *_, **__: ()),
        patch(f"{node.__module__}.encode_here", lambda _, path, video: vae.encode(video)),
        patch.object(type(current_host().files), "model_path", lambda *_: Path("vae")),
    ):
        texts = [[[_normal(1, 3, 4096, seed=seed), {}]] for seed in (1, 2)]
        return list(
            node.execute(
                positive=texts[0], negative=texts[1], vae="vae", batch_size=1, **inputs
            ).args
        )


def _worst(ours: Any, theirs: Any) -> float:
    """Return the largest difference between two entries, or infinity if keys or shapes differ."""
    if isinstance(theirs, torch.Tensor):
        return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else torch.inf
    if isinstance(theirs, list):
        return (
            max(map(_worst, ours, theirs), default=0.0) if len(ours) == len(theirs) else torch.inf
        )
    return 0.0 if ours == theirs else torch.inf


def _options(results: list[Any], side: int) -> dict[str, Any]:
    return {
        key: value for key, value in results[side][0][1].items() if key not in {"pooled_output"}
    }


@torch.inference_mode()
def node_cases() -> dict[str, float]:
    """Return the largest difference between our nodes' outputs and ComfyUI's.

    The inputs have other sizes and lengths.
    """
    found = {}
    control, start, reference = (
        _pictures(13, 96, 100, seed=1),
        _pictures(1, 64, 80, seed=2),
        _pictures(2, 50, 60, seed=3),
    )
    for name, channels, frames in (
        ("2.2", 16, 9),
        ("2.2, longer than the control", 16, 17),
        ("5B", 48, 9),
    ):
        vae, pixels = Vae(channels, 16 if channels == 48 else 8), 2 if channels == 48 else 1
        size = {side: pixels * length for side, length in SIZE.items()}
        common = {"control_video": control, "start_image": start}
        ours = _ours(
            WanStreamFunControl, vae, **size, frames=frames, reference_image=reference, **common
        )
        sides = [[[_normal(1, 3, 4096, seed=seed), {}]] for seed in (1, 2)]
        given = {
            "positive": sides[0],
            "negative": sides[1],
            "vae": vae,
            "batch_size": 1,
            "length": frames,
            **size,
        }
        theirs = list(
            nodes_wan.Wan22FunControlToVideo.execute(**given, ref_image=reference, **common).args
        )
        found[f"Fun Control {name}"] = max(
            _worst(
                list(_options(ours, side).values()),
                [_options(theirs, side)[key] for key in _options(ours, side)],
            )
            if _options(ours, side).keys() == _options(theirs, side).keys()
            else torch.inf
            for side in (0, 1)
        )
    if importlib.util.find_spec("comfy_extras.nodes_bernini") is not None:
        from comfy_extras.nodes_bernini import BerniniConditioning

        vae = Vae(16, 8)
        inputs = {"source_video": control, "reference_video": _pictures(5, 70, 40, seed=4)}
        ours = _ours(
            WanStreamBernini,
            vae,
            **SIZE,
            frames=9,
            longest_side=64,
            reference_image=reference,
            **inputs,
        )
        given = {"vae": vae, "batch_size": 1, "length": 9, "ref_max_size": 64, **SIZE, **inputs}
        pictures = {"reference_images": {"reference_image_0": reference}}
        theirs = list(
            BerniniConditioning.execute(
                positive=[["", {}]], negative=[["", {}]], **given, **pictures
            ).args
        )
        found["Bernini"] = _worst(
            *(_options(results, 0)["context_latents"] for results in (ours, theirs))
        )
    return found


@torch.inference_mode()
def refusal_cases(files: FunFiles) -> dict[str, list[str]]:
    """Return our sampler's and guider's messages about conditioning for another model."""
    control, inp = FUN_CASES["fun_control_22"], FUN_CASES["fun_inp_22"]
    older, nothing = inputs_of(FUN_CASES["fun_control_21"]), context_inputs([])
    context = inputs_of(control).changed(context_latents=[_normal(1, 16, 1, 4, 4, seed=1)])
    reference = inputs_of(control).changed(reference_latents=[_normal(1, 16, 1, 8, 8, seed=1)])
    runs: dict[str, Callable[[], object]] = {
        "control on plain experts": lambda: by_our_sampler(files, inp, inputs_of(control)),
        "older control on newer experts": lambda: by_our_sampler(files, control, older),
        "start image on control experts": lambda: by_our_sampler(files, control, inputs_of(inp)),
        "context on control experts": lambda: by_our_sampler(files, control, context),
        "nothing on control experts": lambda: by_our_sampler(files, control, nothing),
        "reference of another size": lambda: by_our_sampler(files, control, reference),
        "guider, control on plain experts": lambda: by_guider(files, inp, inputs_of(control)),
        "wrong loader": lambda: by_our_sampler(files, _as_single(control), inputs_of(control)),
    }
    return {name: _refusal(run) for name, run in runs.items()}


def _as_single(case: FunCase) -> FunCase:
    return FunCase(
        family=case.family, node=case.node, optional=case.optional, mask_index=case.mask_index
    )


def answers(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    files = FunFiles(folder)
    cases: dict[str, Callable[[], object]] = {
        "refusals": partial(refusal_cases, files),
        "nodes": node_cases,
    }
    for name, case in FUN_CASES.items():
        cases[name] = lambda case=case: parity_case(files, case, inputs_of(case))
    for name in TWO_VIDEOS:
        case = FUN_CASES[name]
        cases[f"{name}, two videos"] = lambda case=case: parity_case(
            files, case, inputs_of(case, batch=2)
        )
    for pair in (False, True):
        for name, sizes in CONTEXTS.items():
            kind = "pair" if pair else "single"
            cases[f"Bernini {kind}, {name}"] = partial(
                context_case, files, bernini(pair=pair), sizes
            )
    for name in ("fun_control_5b", "fun_inp_5b"):
        cases[f"{name}, first frame kept"] = partial(masked_case, files, FUN_CASES[name])
    for pair, batch in ((False, 1), (True, 1), (True, 2)):
        name = f"context guidance, {'pair' if pair else 'single'}, {batch}"
        cases[name] = partial(dual_case, files, bernini(pair=pair), batch)
    cases["Bernini pair, two videos"] = partial(
        context_case, files, bernini(pair=True), CONTEXTS["images"], 2
    )
    found = results_of(cases)
    current_host().open_experts.free()
    return found
