"""Peers: diffusers and accelerate, set up as documented, and their denoising loop.

Each peer writes files to one folder per expert. diffusers' group offloading names files by module
only and does not overwrite them, so in a shared folder the second expert would silently run with
the first expert's weights.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import cpu_offload, disk_offload
from diffusers import WanTransformer3DModel
from diffusers.hooks import apply_group_offloading

from wanstream.devices import clock_for
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps.solvers import Solver

from .variants import CaseVariant

ModelOf = Callable[[str], WanTransformer3DModel]
"""Function from "high" or "low" to that expert's model, ready to be called. Used once per step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainResult:
    """Result of `denoise_plain`."""

    latents: torch.Tensor
    step_s: list[float]


def denoise_plain(
    model_of: ModelOf, request: DenoiseRequest, *, dtype: torch.dtype, device: torch.device
) -> PlainResult:
    """Denoise with two forward passes per step.

    Bit-equal to `wanstream.sampling.denoise` on exact weights.
    """
    step_plan = request.step_plan
    solver = Solver(request.solver, step_plan.schedule)
    clock = clock_for(device)
    texts = [
        text.to(device, dtype) for text in (request.positive, request.negative) if text is not None
    ]
    latents = request.noise.to(device)
    step_s = []
    with torch.inference_mode():
        for step, expert in enumerate(step_plan.experts):
            start = time.perf_counter()
            model = model_of(expert)
            timestep = torch.tensor([step_plan.schedule.timesteps[step]], device=device)
            hidden = latents.to(dtype)
            positive, negative = (
                model(
                    hidden_states=hidden,
                    timestep=timestep,
                    encoder_hidden_states=text,
                    return_dict=False,
                )[0].float()
                for text in texts
            )
            # WanStream computes in this order. Another one rounds to other bits.
            velocity = negative + step_plan.guidance[step] * (positive - negative)
            latents = solver.step(velocity, latents)
            clock.settle()
            step_s.append(time.perf_counter() - start)
    return PlainResult(latents=latents.to("cpu", copy=True), step_s=step_s)


@dataclass(frozen=True, kw_only=True)
class PeerSetting:
    """Folders, dtype and device for one peer."""

    folders: dict[str, Path]
    """Folder with weight files, by expert."""
    variant_folder: Path
    """Folder for files written by the peer."""
    dtype: torch.dtype
    device: torch.device


def set_up(variant: CaseVariant, setting: PeerSetting) -> ModelOf:
    """Load the experts as `variant` does, and return a function from expert name to model."""
    if variant.kind == "swap":
        return _Swapped(setting).expert
    set_up_one = _SETUPS[variant.kind]
    models = {name: set_up_one(variant, setting, name) for name in setting.folders}
    return models.__getitem__


def _load(setting: PeerSetting, expert: str, *, mapped: bool) -> WanTransformer3DModel:
    """Load on the CPU.

    `mapped`, from_pretrained's default, reads a page from the file on first access.
    """
    model = WanTransformer3DModel.from_pretrained(
        setting.folders[expert], torch_dtype=setting.dtype, disable_mmap=not mapped
    )
    return model.eval().requires_grad_(False)


def _resident(variant: CaseVariant, setting: PeerSetting, expert: str) -> WanTransformer3DModel:
    return _cast(variant, _load(setting, expert, mapped=False)).to(setting.device)


def _mapped(variant: CaseVariant, setting: PeerSetting, expert: str) -> WanTransformer3DModel:
    return _load(setting, expert, mapped=True).to(setting.device)


def _grouped(variant: CaseVariant, setting: PeerSetting, expert: str) -> WanTransformer3DModel:
    model = _cast(variant, _load(setting, expert, mapped=variant.to_disk))
    streams = variant.stream and setting.device.type == "cuda"
    if torch.accelerator.current_accelerator() is None:
        # diffusers 0.39 requires an accelerator even for offloading on the CPU, and uses it only
        # for streams.
        torch.accelerator.current_accelerator = lambda: torch.device("cpu")
    apply_group_offloading(
        model,
        onload_device=setting.device,
        offload_device=torch.device("cpu"),
        offload_type=variant.level,
        num_blocks_per_group=1 if variant.level == "block_level" else None,
        use_stream=streams,
        record_stream=streams and variant.record_stream,
        non_blocking=streams,
        offload_to_disk_path=str(_expert_folder(setting, expert)) if variant.to_disk else None,
    )
    return model


def _accelerated(variant: CaseVariant, setting: PeerSetting, expert: str) -> WanTransformer3DModel:
    model = _load(setting, expert, mapped=variant.to_disk)
    if variant.to_disk:
        return disk_offload(model, _expert_folder(setting, expert), execution_device=setting.device)
    return cpu_offload(model, execution_device=setting.device)


_SETUPS: dict[str, Callable[[CaseVariant, PeerSetting, str], WanTransformer3DModel]] = {
    "resident": _resident,
    "mmap": _mapped,
    "group": _grouped,
    "accelerate": _accelerated,
}


class _Swapped:
    """One expert at a time: on a GPU the other one is in RAM, on a CPU it is not in memory."""

    def __init__(self, setting: PeerSetting) -> None:
        self._setting = setting
        self._models: dict[str, WanTransformer3DModel] = {}
        self._loaded = ""
        if setting.device.type == "cuda":
            self._models = {name: _load(setting, name, mapped=False) for name in setting.folders}
        self.expert(next(iter(setting.folders)))

    def expert(self, name: str) -> WanTransformer3DModel:
        if name != self._loaded:
            self._unload(self._loaded)
            if self._setting.device.type == "cuda":
                self._models[name].to(self._setting.device)
            else:
                self._models[name] = _load(self._setting, name, mapped=False)
            self._loaded = name
        return self._models[name]

    def _unload(self, name: str) -> None:
        if name and self._setting.device.type == "cuda":
            self._models[name].to("cpu")
        elif name:
            del self._models[name]
            gc.collect()


def _cast(variant: CaseVariant, model: WanTransformer3DModel) -> WanTransformer3DModel:
    if variant.layerwise_fp8:
        model.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
        )
    return model


def _expert_folder(setting: PeerSetting, expert: str) -> Path:
    folder = setting.variant_folder / expert
    folder.mkdir(parents=True, exist_ok=True)
    return folder
