"""Runs in ComfyUI's Python: streamed native models against ComfyUI's own, sampler by sampler.

`answers(folder)` returns one JSON value per case. `test_native_models.py` checks the values. Both
models come from one file by `native_families`, and run with the same input.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import native_families
import torch
from comfy_extras import nodes_custom_sampler
from further_families import FURTHER
from installed_pack import load_pack
from native_families import FAMILIES, Family, results_of, sample
from native_patches import PATCHES, Patch, TinyControl, context_windows, node_results

import nodes

load_pack()
from native_loading import load_native  # noqa: E402

from wanstream.host import ShareVisits  # noqa: E402
from wanstream.offload.engine.run import EngineRun  # noqa: E402
from wanstream.schema import OffloadPolicy  # noqa: E402

ALL_FAMILIES = {**FAMILIES, **FURTHER}
LIMITS = {"smallest_block": 20_000, "smallest_model": 1_000}
"""Size limits for blocks in the tiny models."""

FORMATS = {
    "bf16": ("bf16", "default"),
    "fp16": ("fp16", "default"),
    "fp32": ("fp32", "default"),
    "fp8": ("fp8", "default"),
    "fp8 kept": ("fp8", "fp8_e4m3fn"),
}
"""A file's number format and the weight type to load it with: only the last keeps fp8 on the
device."""

POLICIES: dict[str, Callable[[int], OffloadPolicy]] = {
    "layerwise": lambda _: OffloadPolicy.layerwise(1),
    "block swap": lambda blocks: OffloadPolicy.block_swap(blocks // 2),
    "resident": lambda _: OffloadPolicy.resident(),
    "RAM": lambda _: replace(OffloadPolicy.layerwise(1), source="pinned"),
}
"""Policies by block count."""

Run = Callable[[Any], torch.Tensor]
"""Samples with a MODEL."""


class Traffic:
    """Visits and fetches in all engines."""

    def __init__(self) -> None:
        self.visits = self.nbytes = 0
        self.fetched: list[int] = []
        """Block indices."""

    def count(self, run: EngineRun) -> None:
        self.visits += run._next
        self.fetched += [fetch.block.block for fetch in run.fetched]
        self.nbytes += sum(run._pool.route.sizes[fetch.block.stored] for fetch in run.fetched)


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count in the `with` body."""
    counted, leave = Traffic(), EngineRun.__exit__

    def counting(self: EngineRun, *error: Any) -> None:
        try:
            leave(self, *error)
        finally:
            counted.count(self)

    with patch.object(EngineRun, "__exit__", counting):
        yield counted


def with_little_room(run: Run, model: Any) -> torch.Tensor:
    """Sample on a device with room for one condition at a time."""
    with patch.object(model.model, "memory_required", lambda *_, **__: 1e30):
        return run(model)


def recompiled(model: Any) -> int:
    """Return the recompilations in the last run of a streamed MODEL."""
    return int(model.model.runs.last.session.recompiled)


def block_bytes(model: Any) -> list[int]:
    """Return the bytes per block in a streamed MODEL's file, by block index."""
    stored = model.model.stored
    starts = [f"diffusion_model.{path}." for path in model.model.weights.blocks]
    return [
        sum(view.nbytes for key, view in stored.items() if key.startswith(start))
        for start in starts
    ]


class Files:
    """Checkpoints, written once, and the models loaded from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._natives: dict[tuple[str, str], Any] = {}
        self._unpatched: dict[str, torch.Tensor] = {}

    def path(self, family: Family, dtype: str) -> Path:
        path = self.folder / f"{family.name}_{dtype}.safetensors"
        if not path.exists():
            family.write(path, dtype)
        return path

    def native(self, family: Family, form: str = "fp32") -> Any:
        """Return ComfyUI's MODEL, the same one for each call."""
        dtype, weight_dtype = FORMATS[form]
        if (family.name, form) not in self._natives:
            loaded = native_families.native(
                self.path(family, dtype), family, weight_dtype=weight_dtype
            )
            self._natives[family.name, form] = loaded
        return self._natives[family.name, form]

    def unpatched(self, family: Family) -> torch.Tensor:
        """Return the result without patches, the same one for each call."""
        if family.name not in self._unpatched:
            self._unpatched[family.name] = sample(self.native(family), family, steps=STEPS)
        return self._unpatched[family.name]

    def forget(self) -> None:
        """Drop all native models."""
        self._natives.clear()
        gc.collect()

    def streamed(
        self, family: Family, form: str = "fp32", policy: str = "layerwise", **limits: int
    ) -> Any:
        """Return a new streamed MODEL."""
        dtype, weight_dtype = FORMATS[form]
        limits = {**LIMITS, **limits}
        with native_families.given_configuration(family):
            model = load_native(
                self.path(family, dtype), weight_dtype, OffloadPolicy.layerwise(1), **limits
            )
        model.policy = POLICIES[policy](len(model.model.weights.blocks))
        return model

    def compare(
        self,
        name: str,
        run: Run,
        *,
        form: str = "fp32",
        policy: str = "layerwise",
        shared: bool = False,
        plain: torch.Tensor | None = None,
        **limits: int,
    ) -> dict[str, Any]:
        """Return figures for two runs of a streamed model, compared with a native one.

        With `shared`, both have room for one condition at a time, and ours lets conditions share
        visits. "effect" is True if the native result is not `plain`.
        """
        family = ALL_FAMILIES[name]
        if shared:
            run = partial(with_little_room, run)
        expected = run(self.native(family, form))
        model = self.streamed(family, form, policy, **limits)
        chosen = ShareVisits.ON if shared else ShareVisits.OFF
        model.streaming = replace(model.streaming, share_visits=chosen)
        sizes = block_bytes(model)
        found: dict[str, Any] = {
            "equal": [],
            "recompiled": [],
            "fetches": [],
            "visits": [],
            "bytes": [],
        }
        for _ in range(2):
            with traffic() as counted:
                result = run(model)
            found["equal"].append(torch.equal(result, expected))
            found["recompiled"].append(recompiled(model))
            found["fetches"].append(len(counted.fetched))
            found["visits"].append(counted.visits)
            found["bytes"].append([counted.nbytes, sum(sizes[block] for block in counted.fetched)])
        model.detach()
        notes = model.model.runs.last.policy.notes
        differs = plain is not None and (
            plain.shape != expected.shape or not torch.equal(plain, expected)
        )
        finite = bool(expected.isfinite().all())
        return {**found, "blocks": len(sizes), "finite": finite, "notes": notes, "effect": differs}


def family_cases(files: Files) -> dict[str, Callable[[], Any]]:
    """Return a case per family and number format, under each policy by turns.

    Only Wan and Flux have all pairs of format and policy.
    """
    cases = {}
    for start, (name, family) in enumerate(FAMILIES.items()):
        for number, form in enumerate(FORMATS, start):
            policies = ("layerwise", "block swap")
            if name not in ("wan_t2v", "flux"):
                policies = (policies[number % 2],)
            for policy in policies:
                run = partial(sample, family=family, steps=2)
                cases[f"family {name}, {form}, {policy}"] = partial(
                    files.compare, name, run, form=form, policy=policy
                )
    run = partial(sample, family=FAMILIES["flux"])
    cases["family flux, fp16, resident"] = partial(
        files.compare, "flux", run, form="fp16", policy="resident"
    )
    for name, family in FURTHER.items():
        runs = {cfg: partial(sample, family=family, steps=3, cfg=cfg) for cfg in (1.0, 3.0)}
        cases |= {
            f"further {name}, layerwise": partial(files.compare, name, runs[1.0]),
            f"further {name}, block swap": partial(
                files.compare, name, runs[3.0], form="bf16", policy="block swap"
            ),
            f"further {name}, shared": partial(files.compare, name, runs[3.0], shared=True),
        }
        cases[f"layers {name}"] = partial(
            files.compare, name, runs[3.0], policy="block swap", smallest_layer=20_000
        )
    return cases


SAMPLERS = ("euler", "dpm_adaptive", "heun", "uni_pc", "dpmpp_2m_sde", "dpm_fast", "dpm_2", "lcm")


def sampler_cases(files: Files) -> dict[str, Callable[[], Any]]:
    """Return a case per sampler, with each family and under each policy by turns."""
    cases = {}
    for number, sampler in enumerate(SAMPLERS):
        name = ("wan_t2v", "flux")[number // 2 % 2]
        run = partial(sample, family=FAMILIES[name], sampler=sampler, steps=4)
        policy = ("layerwise", "block swap")[number % 2]
        cases[f"sampler {sampler}"] = partial(files.compare, name, run, policy=policy)
    return cases


STEPS = 4
TEXT_TO_VIDEO, FLUX = FAMILIES["wan_t2v"], FAMILIES["flux"]


def _advanced(model: Any, family: Family, latent: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return KSampler (Advanced)'s result."""
    positive, negative = family.conditioning()
    common = {
        "noise_seed": 7,
        "steps": 6,
        "cfg": 3.0,
        "sampler_name": "dpmpp_2m",
        "scheduler": "simple",
    }
    given = {"positive": positive, "negative": negative, "latent_image": {"samples": latent}}
    (result,) = node_results(nodes.KSamplerAdvanced, model=model, **common, **given, **settings)
    samples: torch.Tensor = result["samples"]
    return samples


def halves(high: Any, low: Any, family: Family) -> torch.Tensor:
    """Sample the first steps with one model and the rest with another, as Wan2.2 graphs do."""
    start = {
        "add_noise": "enable",
        "start_at_step": 0,
        "end_at_step": 3,
        "return_with_leftover_noise": "enable",
    }
    rest = {
        "add_noise": "disable",
        "start_at_step": 3,
        "end_at_step": 99,
        "return_with_leftover_noise": "disable",
    }
    return _advanced(
        low, family, _advanced(high, family, torch.zeros(family.sizes[0]), **start), **rest
    )


def halves_case(files: Files) -> dict[str, Any]:
    """Two models, each loaded once, running by turns."""
    family = TEXT_TO_VIDEO
    expected = halves(files.native(family, "fp32"), files.native(family, "fp8"), family)
    high, low = files.streamed(family, "fp32", "block swap"), files.streamed(family, "fp8")
    found: dict[str, Any] = {"equal": [], "recompiled": [], "loaded": []}
    for _ in range(2):
        found["equal"].append(torch.equal(halves(high, low, family), expected))
        found["recompiled"].append(recompiled(high) + recompiled(low))
        found["loaded"].append(
            [high.model.weights.loaded_bytes > 0, low.model.weights.loaded_bytes > 0]
        )
    return found


def custom(model: Any, family: Family, guider: str) -> torch.Tensor:
    """Return SamplerCustomAdvanced's result with a guider."""
    custom_sampler = nodes_custom_sampler
    positive, negative = family.conditioning()
    middle = [[positive[0][0] * 0.5, positive[0][1]]]
    inputs = {
        "BasicGuider": {"conditioning": positive},
        "CFGGuider": {"positive": positive, "negative": negative, "cfg": 3.0},
        "DualCFGGuider": {
            "cond1": positive, "cond2": middle, "negative": negative, "cfg_conds": 3.0,
            "cfg_cond2_negative": 2.0,
        },
    }  # fmt: skip
    (guide,) = node_results(
        getattr(custom_sampler, guider), model=model, style="regular", **inputs[guider]
    )
    (noise,) = node_results(custom_sampler.RandomNoise, noise_seed=7)
    (sampler,) = node_results(custom_sampler.KSamplerSelect, sampler_name="dpmpp_2m")
    (sigmas,) = node_results(
        custom_sampler.BasicScheduler, model=model, scheduler="simple", steps=STEPS, denoise=1.0
    )
    latent = {"samples": torch.zeros(family.sizes[0])}
    given = {
        "noise": noise,
        "guider": guide,
        "sampler": sampler,
        "sigmas": sigmas,
        "latent_image": latent,
    }
    result: torch.Tensor = node_results(custom_sampler.SamplerCustomAdvanced, **given)[0]["samples"]
    return result


def run_cases(files: Files) -> dict[str, Callable[[], Any]]:
    """Return cases for other sampling nodes and other settings."""
    runs: dict[str, tuple[Family, Run]] = {}
    for family in (TEXT_TO_VIDEO, FLUX):
        run = partial(sample, family=family)
        runs[f"denoise 0.5, {family.name}"] = family, partial(run, denoise=0.5, steps=STEPS)
        runs[f"cfg 1, {family.name}"] = family, partial(run, cfg=1.0)
        runs[f"two passes per step, {family.name}"] = family, partial(with_little_room, run)
        heun = partial(with_little_room, partial(run, sampler="heun"))
        runs[f"two passes per step with heun, {family.name}"] = family, heun
        for guider in ("BasicGuider", "CFGGuider", "DualCFGGuider"):
            runs[f"{guider}, {family.name}"] = family, partial(custom, family=family, guider=guider)
    cases = {}
    for number, (name, (family, run)) in enumerate(runs.items()):
        policy = ("layerwise", "block swap")[number % 2]
        cases[f"run {name}"] = partial(files.compare, family.name, run, policy=policy)
        cases[f"shared run {name}"] = partial(
            files.compare, family.name, run, policy=policy, shared=True
        )
    return {**cases, "two models by turns": partial(halves_case, files)}


class Regions(Family):
    """A family whose positive conditioning has an area, a mask and a part for the whole picture."""

    def conditioning(self) -> tuple[list[Any], list[Any]]:
        (positive, negative), (_, _, height, width) = super().conditioning(), self.sizes[0]
        ((text, values),) = positive
        mask = torch.zeros(1, height, width)
        mask[..., : width // 2] = 1
        area = {
            "area": (height // 2, width, height // 2, 0),
            "strength": 0.8,
            "set_area_to_bounds": False,
        }
        return [
            [text, values],
            [text * 0.7, {**values, **area}],
            [
                text * 0.4,
                {**values, "mask": mask, "mask_strength": 0.6, "set_area_to_bounds": False},
            ],
        ], negative


class Controlled(Family):
    """A family with a control net."""

    def conditioning(self) -> tuple[list[Any], list[Any]]:
        control = TinyControl(self.settings["hidden_size"])
        return tuple(
            [
                [text, {**values, "control": control, "control_apply_to_uncond": False}]
                for text, values in conditioning
            ]
            for conditioning in super().conditioning()
        )


def _as(kind: type[Family], family: Family) -> Family:
    return kind(**{field.name: getattr(family, field.name) for field in fields(family)})


def patch_cases(files: Files) -> dict[str, Callable[[], Any]]:
    """Return cases for patched models and other inputs."""

    def case(
        family: Family, changed: Patch, given: Family, policy: str, shared: bool
    ) -> dict[str, Any]:
        def run(model: Any) -> torch.Tensor:
            return sample(changed(model), given, steps=STEPS)

        return files.compare(
            family.name, run, policy=policy, shared=shared, plain=files.unpatched(family)
        )

    tried = [
        (name, patch, FAMILIES[family], FAMILIES[family])
        for name, (patch, on) in PATCHES.items()
        for family in on
    ]

    def same(model: Any) -> Any:
        return model

    long = replace(TEXT_TO_VIDEO, sizes=((1, 16, 7, *TEXT_TO_VIDEO.sizes[0][3:]),))
    tried.append(("context windows", context_windows, TEXT_TO_VIDEO, long))
    tried.append(("regions", same, FLUX, _as(Regions, FLUX)))
    tried.append(("control net", same, FLUX, _as(Controlled, FLUX)))
    for family in (TEXT_TO_VIDEO, FLUX, FAMILIES["wan_vace"]):
        size = 2, *family.sizes[0][1:]
        tried.append(("batch of two", same, family, replace(family, sizes=(size,))))
    cases = {}
    for number, (name, changed, family, given) in enumerate(tried):
        policy = ("layerwise", "block swap")[number % 2]
        cases[f"patch {name}, {family.name}"] = partial(case, family, changed, given, policy, False)
        cases[f"shared patch {name}, {family.name}"] = partial(
            case, family, changed, given, policy, True
        )
    return cases


def all_cases(files: Files) -> dict[str, Callable[[], Any]]:
    return {**family_cases(files), **sampler_cases(files), **run_cases(files), **patch_cases(files)}


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """Return one value per case. ComfyUI runs nodes in inference mode as well."""
    torch.set_num_threads(1)
    return results_of(all_cases(Files(Path(folder))))
