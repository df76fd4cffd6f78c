"""Runs of our sampler and guider with a single model (Wan2.1), compared with ComfyUI's KSampler.

They run in ComfyUI's own Python. `answers(folder)` returns one JSON value per case.
`test_native_one_expert.py` checks the values.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import comfy.clip_vision
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import torch
from comfy_extras import nodes_model_advanced
from comfy_extras.nodes_wan import WanImageToVideo
from guider_cases import _difference, _normal, _refusal, _told

import nodes
from wanstream.host import current_host
from wanstream.nodes.guider import WanStreamGuider
from wanstream.nodes.sampler import WanStreamSampler
from wanstream.schema.refs.experts import ExpertsRef

SHIFT, STEPS, SEED, GUIDANCE = 3.0, 5, 7, 5.0
WIDTH, HEIGHT, FRAMES = 48, 32, 9
EMPTY = {"samples": torch.zeros(1, 16, 3, HEIGHT // 8, WIDTH // 8)}
SAMPLERS = ["euler", "dpmpp_2m", "heun", "uni_pc", "euler_cfg_pp"]
OF_A_PAIR = {"boundary_ratio": 0.875, "guidance_low": 1.0}
"""Settings a single model ignores."""

Sides = tuple[list[Any], list[Any]]


class Sampler(WanStreamSampler):
    hidden = Namespace(unique_id=None)


class One:
    """One expert as ComfyUI loads it, and as we do."""

    def __init__(self, file: Path) -> None:
        self.ref = ExpertsRef(high_noise=file, single=True, compute_dtype="float32")
        (self.native,) = nodes_model_advanced.ModelSamplingSD3().patch(
            comfy.sd.load_diffusion_model(str(file)), SHIFT
        )

    def natively(self, sides: Sides, latent: dict[str, Any], name: str = "euler") -> torch.Tensor:
        run = nodes.KSampler().sample(
            self.native, SEED, STEPS, GUIDANCE, name, "simple", *sides, latent
        )
        return run[0]["samples"]

    def by_our_sampler(self, sides: Sides, latent: dict[str, Any], **changes: Any) -> torch.Tensor:
        given = {
            "seed": SEED,
            "steps": STEPS,
            "solver": "euler",
            "schedule": "simple",
            "flow_shift": SHIFT,
        }
        given |= {
            "switch_step": -1,
            "start_step": 0,
            "guidance_high": GUIDANCE,
            **OF_A_PAIR,
            **changes,
        }
        return Sampler.execute(self.ref, *sides, latent, **given).result[0]["samples"]

    def guider(self, sides: Sides, **changes: Any) -> Any:
        given = {"flow_shift": SHIFT, "guidance_high": GUIDANCE, **OF_A_PAIR, **changes}
        return WanStreamGuider.execute(self.ref, *sides, **given).args[0]

    def by_guider(self, guider: Any, latent: dict[str, Any], name: str = "euler") -> torch.Tensor:
        sampling = self.native.get_model_object("model_sampling")
        discards = name in comfy.samplers.KSampler.DISCARD_PENULTIMATE_SIGMA_SAMPLERS
        sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", STEPS + discards)
        if discards:
            sigmas = torch.cat([sigmas[:-2], sigmas[-1:]])
        samples, sampler = latent["samples"], comfy.samplers.sampler_object(name)
        noise = comfy.sample.prepare_noise(samples, SEED)
        mask = latent.get("noise_mask")
        return guider.sample(
            noise, samples, sampler, sigmas, denoise_mask=mask, disable_pbar=True, seed=SEED
        )


def sampled_case(one: One, sides: Sides, latent: dict[str, Any]) -> dict[str, object]:
    expected = one.natively(sides, latent)
    ours = one.by_our_sampler(sides, latent)
    return {
        "difference": _difference(ours, expected),
        "boundary": torch.equal(
            ours, one.by_our_sampler(sides, latent, boundary_ratio=0.1, guidance_low=9.0)
        ),
    }


def guided_case(one: One, sides: Sides, latent: dict[str, Any], name: str) -> dict[str, object]:
    guider = one.guider(sides)
    ours = one.by_guider(guider, latent, name)
    other = one.by_guider(one.guider(sides, boundary_ratio=0.1, guidance_low=9.0), latent, name)
    steps = guider.timeline.steps
    return {
        "difference": _difference(ours, one.natively(sides, latent, name)),
        "boundary": torch.equal(ours, other),
        "experts": sorted({step.expert for step in steps}),
        "recompiled": guider.recompiled,
        "bytes": len({step.bytes_moved for step in steps}),
    }


def seen(seed: int) -> Any:
    """Output of CLIP Vision Encode."""
    output = comfy.clip_vision.Output()
    output["penultimate_hidden_states"] = _normal(1, 257, 1280, seed=seed)
    return output


def texts() -> Sides:
    positive, negative = (
        [[_normal(1, 512, 4096, seed=seed), {"pooled_output": None}]] for seed in (1, 2)
    )
    return positive, negative


def with_image(vae: Any, clip_vision_output: Any) -> tuple[Sides, dict[str, Any]]:
    """As WanImageToVideo writes it."""
    start = torch.rand(1, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(5))
    made = WanImageToVideo.execute(
        *texts(), vae, WIDTH, HEIGHT, FRAMES, 1, start, clip_vision_output
    ).result
    return (made[0], made[1]), made[2]


def image_case(one: One, vae: Any) -> dict[str, object]:
    """An image with its own CLIP vision embedding, and with a different embedding."""
    sides, latent = with_image(vae, seen(3))
    others, _ = with_image(vae, seen(4))
    expected, other = one.natively(sides, latent), one.natively(others, latent)
    return {
        "sampler": _difference(one.by_our_sampler(sides, latent), expected),
        "guider": _difference(one.by_guider(one.guider(sides), latent), expected),
        "guider, dpmpp_2m": _difference(
            one.by_guider(one.guider(sides), latent, "dpmpp_2m"),
            one.natively(sides, latent, "dpmpp_2m"),
        ),
        "other": _difference(one.by_our_sampler(others, latent), other),
        "effect": _difference(other, expected),
    }


def frames_case(one: One) -> dict[str, object]:
    """TI2V-5B from text, and from a kept first latent frame.

    Wan22ImageToVideoLatent provides such a frame.
    """
    found: dict[str, object] = {}
    latent, mask = _normal(1, 48, 3, 4, 6, seed=6), torch.ones(1, 1, 3, 4, 6)
    mask[:, :, :1] = 0
    kinds = {
        "text": {"samples": torch.zeros(1, 48, 3, 4, 6)},
        "image": {"samples": latent, "noise_mask": mask},
    }
    for kind, given in kinds.items():
        for name in ("euler", "dpmpp_2m", "heun"):
            ours = one.by_guider(one.guider(texts()), given, name)
            found[f"{kind} {name}"] = _difference(ours, one.natively(texts(), given, name))
    found["kept"] = float((ours - latent)[:, :, :1].abs().max())
    plain = one.by_guider(one.guider(texts()), {"samples": latent}, "heun")
    found["effect"] = _difference(ours[:, :, 1:], plain[:, :, 1:])
    return found


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    torch.set_num_threads(1)
    text, image = (One(Path(folder, f"{name}.safetensors")) for name in ("t2v", "i2v"))
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(f"{folder}/vae.safetensors"))
    blind, latent = with_image(vae, None)
    found = {
        "sampled": _told(lambda: sampled_case(text, texts(), EMPTY)),
        **{
            f"guided {name}": _told(lambda name=name: guided_case(text, texts(), EMPTY, name))
            for name in SAMPLERS
        },
        "image": _told(lambda: image_case(image, vae)),
        "frames": _told(lambda: frames_case(One(Path(folder, "ti2v.safetensors")))),
        "blind sampler": _refusal(lambda: image.by_our_sampler(blind, latent)),
        "blind guider": _refusal(lambda: image.by_guider(image.guider(blind), latent)),
    }
    current_host().open_experts.free()
    return found
