"""Runs in ComfyUI's own Python: Wan Fun models, ComfyUI's conditioning for them, and native runs.

`FUN_CASES` has tiny models shaped like Fun-Control and Fun-InP. `inputs_of` runs ComfyUI's own
nodes for their conditioning. `native_forward` and `native_run` return ComfyUI's results for the
files in a `FunFiles`, so another sampler can compute the same from the same files and inputs.
`answers(folder)` returns figures for the native side alone, one value per case.
`test_fun_native.py` checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.sample
import comfy.samplers
import torch
from comfy_extras import nodes_edit_model, nodes_model_advanced, nodes_wan
from native_families import (
    Family,
    _clip,
    _difference,
    _normal,
    _wan_family,
    _warnings,
    native,
    results_of,
)
from native_patches import node_results

import nodes

SHIFT, STEPS, SWITCH, SEED = 5.0, 5, 2, 7
GUIDANCE = (4.0, 3.0)
"""Guidance scales for the high-noise and the low-noise expert."""
BOUNDARY = 0.875
"""Sigma from which the high-noise expert computes. `SWITCH` is the first step below it."""
SIGMAS = (0.95, 0.5)
"""Sigmas for single forward passes, one per expert."""
FRAMES, LATENT_HEIGHT, LATENT_WIDTH = 9, 4, 6
TOKENS = (12, 9)
"""Positive and negative text tokens for a model without a CLIP branch."""
TOKENS_BESIDE_CLIP = (512, 512)
"""Likewise for a model with one: diffusers takes the last 512 rows for text, and the rows before
for the image."""


@dataclass(frozen=True, kw_only=True)
class FunCase:
    """A Fun model and the ComfyUI node that makes the conditioning for it."""

    family: Family
    node: type
    """Class in `comfy_extras.nodes_wan`."""
    optional: tuple[str, ...]
    """Connected optional inputs. "reference" is the input to a separate ReferenceLatent."""
    pair: bool = False
    """True for a high-noise and a low-noise expert."""
    latent_format: type = comfy.latent_formats.Wan21
    mask_index: int = 0
    """Number of image channels before the mask."""

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def latent_channels(self) -> int:
        return int(self.latent_format().latent_channels)

    @property
    def pixels(self) -> int:
        """Pixels per latent pixel."""
        return 16 if self.latent_channels == 48 else 8

    @property
    def tokens(self) -> tuple[int, int]:
        """Positive and negative text tokens."""
        return TOKENS_BESIDE_CLIP if "clip_vision_output" in self.optional else TOKENS

    @property
    def experts(self) -> tuple[str, ...]:
        return ("high", "low") if self.pair else ("high",)

    def expert_at(self, sigma: float) -> str:
        """Return the name of the expert for a sigma."""
        return "low" if self.pair and sigma < BOUNDARY else "high"


@dataclass(frozen=True, kw_only=True)
class FunInputs:
    """Sampler inputs, made by ComfyUI's nodes."""

    positive: list[Any]
    negative: list[Any]
    latent: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Positive conditioning values next to the text."""
        return dict(self.positive[0][1])

    def changed(self, **values: Any) -> FunInputs:
        """Return inputs with other values next to both texts."""
        sides = (
            [[text, {**given, **values}] for text, given in side]
            for side in (self.positive, self.negative)
        )
        return FunInputs(positive=next(sides), negative=next(sides), latent=self.latent)


class Vae:
    """A VAE whose latents depend on every pixel: averages over latent pixels, mixed and bent."""

    def __init__(self, latent_channels: int, pixels: int) -> None:
        self.latent_channels, self._pixels = latent_channels, pixels
        self._mix = _normal(latent_channels, 6, seed=60)

    def spacial_compression_encode(self) -> int:
        return self._pixels

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return latents for pictures [frames, height, width, 3].

        The first picture is a latent frame by itself.
        """
        frames, height, width, _ = pixels.shape
        first = pixels[:1].repeat(4, 1, 1, 1) if frames % 4 else pixels[:0]
        groups = torch.cat([first, pixels[frames % 4 :]])
        cells = groups.reshape(
            -1, 4, height // self._pixels, self._pixels, width // self._pixels, self._pixels, 3
        )
        halves = cells.unflatten(1, (2, 2)).mean(dim=(2, 4, 6))
        mixed = torch.einsum("tshwc,dsc->dthw", 6 * (halves - 0.5), self._mix.view(-1, 2, 3))
        return (2 * mixed.tanh() + 0.3 * mixed)[None]


def _family(name: str, channels: int, **settings: Any) -> Family:
    base = "WAN22" if settings.get("latent_channels") == 48 else "WAN21"
    return _wan_family(
        name, base, "model.WanModel", channels=channels, dim=256, layers=4, **settings
    )


FUN_CASES: Mapping[str, FunCase] = {
    case.name: case
    for case in (
        FunCase(
            family=_family("fun_control_22", 52, model_type="t2v", in_dim_ref_conv=16),
            node=nodes_wan.Wan22FunControlToVideo,
            optional=("ref_image", "start_image", "control_video"),
            pair=True,
            mask_index=16,
        ),
        FunCase(
            family=_family("fun_inp_22", 36, model_type="t2v"),
            node=nodes_wan.WanFunInpaintToVideo,
            optional=("start_image", "end_image"),
            pair=True,
        ),
        FunCase(
            family=_family("fun_control_21", 48, model_type="i2v"),
            node=nodes_wan.WanFunControlToVideo,
            optional=("clip_vision_output", "start_image", "control_video"),
        ),
        # Later Fun-Control 2.1 files have a reference, but ComfyUI's node has no input for it.
        FunCase(
            family=_family("fun_control_21_reference", 48, model_type="i2v", in_dim_ref_conv=16),
            node=nodes_wan.WanFunControlToVideo,
            optional=("reference", "clip_vision_output", "start_image", "control_video"),
        ),
        FunCase(
            family=_family("fun_inp_21", 36, model_type="i2v"),
            node=nodes_wan.WanFunInpaintToVideo,
            optional=("clip_vision_output", "start_image", "end_image"),
        ),
        FunCase(
            family=_family(
                "fun_control_5b", 148, model_type="t2v", latent_channels=48, in_dim_ref_conv=48
            ),
            node=nodes_wan.Wan22FunControlToVideo,
            optional=("ref_image", "start_image", "control_video"),
            latent_format=comfy.latent_formats.Wan22,
            mask_index=48,
        ),
        FunCase(
            family=_family("fun_inp_5b", 100, model_type="t2v", latent_channels=48),
            node=nodes_wan.WanFunInpaintToVideo,
            optional=("start_image", "end_image"),
            latent_format=comfy.latent_formats.Wan22,
        ),
    )
}


class FunFiles:
    """Case checkpoints in fp32, written once, and ComfyUI's models for them."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._models: dict[Path, Any] = {}
        self._forwards: dict[str, list[torch.Tensor]] = {}

    def paths(self, case: FunCase) -> dict[str, Path]:
        """Return the file for every expert: "high" and "low", or "high" alone."""
        found = {}
        for seed, expert in enumerate(case.experts, start=1):
            path = found[expert] = self.folder / f"{case.name}_{expert}.safetensors"
            if not path.exists():
                replace(case.family, seed=seed).write(path, "fp32")
        return found

    def model(self, case: FunCase, expert: str = "high") -> Any:
        """Return an expert's MODEL after Load Diffusion Model and ModelSamplingSD3.

        It is the same for each call.
        """
        path = self.paths(case)[expert]
        if path not in self._models:
            loaded = native(path, case.family)
            (self._models[path],) = node_results(
                nodes_model_advanced.ModelSamplingSD3, model=loaded, shift=SHIFT
            )
        return self._models[path]

    def forwards(self, case: FunCase) -> list[torch.Tensor]:
        """Return `native_forward` at each sigma in `SIGMAS` with the case inputs, computed once."""
        if case.name not in self._forwards:
            self._forwards[case.name] = [
                native_forward(self, case, sigma=sigma) for sigma in SIGMAS
            ]
        return self._forwards[case.name]


def _pictures(frames: int, height: int, width: int, *, seed: int) -> torch.Tensor:
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


def inputs_of(
    case: FunCase, *, without: Collection[str] = (), other: Collection[str] = (), batch: int = 1
) -> FunInputs:
    """Return the outputs of the case's node.

    Args:
        without: Optional case inputs to leave unconnected.
        other: Optional inputs that get other pictures.
        batch: Number of samples in the latent.
    """
    vae, height, width = (
        Vae(case.latent_channels, case.pixels),
        LATENT_HEIGHT * case.pixels,
        LATENT_WIDTH * case.pixels,
    )
    given: dict[str, Any] = {}
    for seed, name in enumerate(case.optional, start=70):
        frames, seed = FRAMES if name == "control_video" else 1, seed + 100 * (name in other)
        # Pictures are larger than the video, as users' pictures are, but not for ReferenceLatent.
        larger = 1 if name == "reference" else 2
        given[name] = _pictures(frames, larger * height, larger * width, seed=seed)
        if name == "clip_vision_output":
            given[name] = _clip(tokens=257, width=1280, seed=seed)
    given = {name: value for name, value in given.items() if name not in without}
    sides = [
        [[_normal(1, count, 4096, seed=20 + i), {"pooled_output": None}]]
        for i, count in enumerate(case.tokens)
    ]
    reference = given.pop("reference", None)
    size = {"width": width, "height": height, "length": FRAMES, "batch_size": batch}
    made = case.node.execute(positive=sides[0], negative=sides[1], vae=vae, **size, **given).args
    positive, negative, latent = made
    if reference is not None:
        node, encoded = nodes_edit_model.ReferenceLatent, {"samples": vae.encode(reference)}
        positive, negative = (node.execute(side, encoded).args[0] for side in (positive, negative))
    return FunInputs(positive=positive, negative=negative, latent=latent)


@torch.inference_mode()
def forward_by(guider: Any, inputs: FunInputs, sigma: float) -> torch.Tensor:
    """Return a guider's velocity in one model call, in normalised space: (x - denoised) / sigma.

    x is `SEED`'s noise at `sigma` over the input latent. Any ComfyUI guider will do, with any
    guidance.
    """
    seen: list[torch.Tensor] = []

    def once(
        model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        denoised = model(x, sigmas[0] * x.new_ones(len(x)), **extra_args)
        seen.append((x - denoised) / sigmas[0])
        return denoised

    latent = inputs.latent["samples"]
    sampler, noise = comfy.samplers.KSAMPLER(once), comfy.sample.prepare_noise(latent, SEED)
    guider.sample(noise, latent, sampler, torch.tensor([sigma, 0.0]), disable_pbar=True, seed=SEED)
    # A guider may have tried the sampler before, with a model of its own.
    return seen[-1].cpu()


def native_forward(
    files: FunFiles,
    case: FunCase,
    inputs: FunInputs | None = None,
    *,
    sigma: float = SIGMAS[0],
    cfg: float = 1.0,
) -> torch.Tensor:
    """Return `forward_by` for ComfyUI's CFGGuider over the expert at a sigma.

    With cfg 1, for the positive side alone.
    """
    inputs = inputs or inputs_of(case)
    guider = comfy.samplers.CFGGuider(files.model(case, case.expert_at(sigma)))
    guider.set_conds(inputs.positive, inputs.negative)
    guider.set_cfg(cfg)
    return forward_by(guider, inputs, sigma)


@torch.inference_mode()
def native_run(files: FunFiles, case: FunCase, inputs: FunInputs | None = None) -> torch.Tensor:
    """Return KSampler's raw latent (euler, simple, `STEPS` steps, `SEED`), with guidance.

    Pairs run in two KSampler (Advanced): the high-noise expert before step `SWITCH`, the low-noise
    one from it on.
    """
    inputs = inputs or inputs_of(case)
    sides, latent = {"positive": inputs.positive, "negative": inputs.negative}, inputs.latent
    common = {"steps": STEPS, "sampler_name": "euler", "scheduler": "simple", **sides}
    if not case.pair:
        given = {
            "model": files.model(case),
            "seed": SEED,
            "cfg": GUIDANCE[0],
            "latent_image": latent,
        }
        (result,) = node_results(nodes.KSampler, **common, **given)
        return result["samples"].cpu()
    stages = (("high", 0, SWITCH, "enable", "enable"), ("low", SWITCH, STEPS, "disable", "disable"))
    for (expert, start, end, add_noise, leftover), cfg in zip(stages, GUIDANCE, strict=True):
        given = {
            "model": files.model(case, expert),
            "noise_seed": SEED,
            "cfg": cfg,
            "latent_image": latent,
        }
        given |= {"start_at_step": start, "end_at_step": end, "add_noise": add_noise}
        (latent,) = node_results(
            nodes.KSamplerAdvanced, **common, **given, return_with_leftover_noise=leftover
        )
    return latent["samples"].cpu()


def _normalised(case: FunCase, raw: torch.Tensor) -> torch.Tensor:
    """Normalise several latents stacked in the channels."""
    return torch.cat(
        [case.latent_format().process_in(part) for part in raw.split(case.latent_channels, dim=1)],
        dim=1,
    )


def described_channels(case: FunCase, inputs: FunInputs) -> torch.Tensor:
    """Return the channels behind the noise, from the conditioning, by the models' description."""
    values = inputs.values
    image, index = _normalised(case, values["concat_latent_image"]), case.mask_index
    mask = [1 - values["concat_mask"]] if "concat_mask" in values else []
    return torch.cat([image[:, :index], *mask, image[:, index:]], dim=1)


class Seen:
    """Arguments and result of the last network call in a MODEL."""

    def __init__(self, model: Any) -> None:
        self.x = self.velocity = torch.empty(0)
        self.values: dict[str, Any] = {}
        self._hook = model.model.diffusion_model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(
        self, _: Any, args: tuple[Any, ...], values: dict[str, Any], result: torch.Tensor
    ) -> None:
        self.x, self.values, self.velocity = args[0].clone(), dict(values), result.clone()

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@torch.inference_mode()
def native_case(files: FunFiles, case: FunCase) -> dict[str, Any]:
    """Return a case's leftover keys, the network inputs, and whether results repeat."""
    with _warnings() as warnings:
        models = [files.model(case, expert) for expert in case.experts]
    network, inputs = models[0].model.diffusion_model, inputs_of(case)
    with Seen(models[0]) as seen:
        forward = native_forward(files, case, inputs)
    run, reference = native_run(files, case, inputs), inputs.values.get("reference_latents")
    again = native_forward(files, case), native_run(files, case)
    extra = seen.x[:, case.latent_channels :]
    found = {
        "warnings": warnings,
        "class": type(models[0].model).__name__,
        "channels": [network.patch_embedding.in_channels, seen.x.shape[1]],
        "described": float((extra - described_channels(case, inputs)).abs().max()),
        "keys": sorted(inputs.values.keys() - {"pooled_output"}),
        "reference": [
            getattr(network, "ref_conv", None) is not None,
            "reference_latent" in seen.values,
        ],
        "shapes": [list(forward.shape), list(run.shape)],
        "velocity": _difference(forward, seen.velocity),
        "finite": bool(forward.isfinite().all() and run.isfinite().all()),
        "std": float(forward.std()),
        "repeats": [
            torch.equal(result, first) for result, first in zip(again, (forward, run), strict=True)
        ],
        "experts": _difference(native_forward(files, case, inputs, sigma=SIGMAS[1]), forward),
        "guided": _difference(native_forward(files, case, inputs, cfg=GUIDANCE[0]), forward),
    }
    if reference is not None:
        wanted = _normalised(case, reference[-1])[:, :, 0]
        found["described reference"] = float((seen.values["reference_latent"] - wanted).abs().max())
    return found


@torch.inference_mode()
def effect_case(files: FunFiles, case: FunCase, changed: FunInputs) -> list[float]:
    """Return the distance between forward passes with changed inputs and plain ones, per expert."""
    results = [native_forward(files, case, changed, sigma=sigma) for sigma in SIGMAS]
    return [
        _difference(result, plain)
        for result, plain in zip(results, files.forwards(case), strict=True)
    ]


@torch.inference_mode()
def batch_case(files: FunFiles, case: FunCase) -> dict[str, Any]:
    """Return the shape of a two-sample run, and the distance between the samples."""
    both = native_run(files, case, inputs_of(case, batch=2))
    return {"shape": list(both.shape), "between": _difference(both[:1], both[1:])}


def changes_of(case: FunCase) -> dict[str, FunInputs]:
    """Return the case's inputs with one left out, with other pictures, and with another mask."""
    plain = inputs_of(case)
    changes = {f"other {name}": inputs_of(case, other=(name,)) for name in case.optional}
    # These models are not meant to run with a CLIP branch but no CLIP input.
    changes |= {
        f"no {name}": inputs_of(case, without=(name,))
        for name in case.optional
        if name != "clip_vision_output"
    }
    if "concat_mask" in plain.values:
        changes["mask"] = plain.changed(concat_mask=torch.ones_like(plain.values["concat_mask"]))
    return changes


def answers(folder: str) -> dict[str, Any]:
    """Return a value per case, and one per changed input."""
    torch.set_num_threads(1)
    files = FunFiles(folder)
    cases: dict[str, Callable[[], object]] = {"names": lambda: list(FUN_CASES)}
    for name, case in FUN_CASES.items():
        cases[name] = partial(native_case, files, case)
        cases[f"{name}, batch"] = partial(batch_case, files, case)
        for change, inputs in changes_of(case).items():
            cases[f"{name}, {change}"] = partial(effect_case, files, case, inputs)
    return results_of(cases)
