"""The other ways to run two experts, set up as their own documentation says.

Files that a peer writes for itself lie in a folder per expert: diffusers' group offloading names them by module only
and never writes over them, so that in one folder the second expert would silently run with the weights of the first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import cpu_offload, disk_offload
from diffusers import WanTransformer3DModel
from diffusers.hooks import apply_group_offloading

from .plain_loop import ExpertOf
from .variants import CaseVariant


@dataclass(frozen=True, kw_only=True)
class PeerSetting:
    """Where a peer finds the experts, where it may write, and where it computes."""

    folders: dict[str, Path]
    own_folder: Path
    dtype: torch.dtype
    device: torch.device


def set_up(variant: CaseVariant, setting: PeerSetting) -> ExpertOf:
    """Load the experts as `variant` does, and return what gives the model of each step."""
    if variant.kind == "swap":
        return _Swapped(setting).expert
    set_up_one = _SETUPS[variant.kind]
    models = {name: set_up_one(variant, setting, name) for name in setting.folders}
    return models.__getitem__


def _load(setting: PeerSetting, expert: str, *, mapped: bool) -> WanTransformer3DModel:
    """On the CPU; `mapped` is the default of from_pretrained, where pages come from the file when they are touched."""
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
        # diffusers 0.39 looks for an accelerator also where it offloads on the CPU, and uses it for streams only.
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
        offload_to_disk_path=str(_own_folder(setting, expert)) if variant.to_disk else None,
    )
    return model


def _accelerated(variant: CaseVariant, setting: PeerSetting, expert: str) -> WanTransformer3DModel:
    model = _load(setting, expert, mapped=variant.to_disk)
    if variant.to_disk:
        return disk_offload(model, _own_folder(setting, expert), execution_device=setting.device)
    return cpu_offload(model, execution_device=setting.device)


_SETUPS: dict[str, Callable[[CaseVariant, PeerSetting, str], WanTransformer3DModel]] = {
    "resident": _resident,
    "mmap": _mapped,
    "group": _grouped,
    "accelerate": _accelerated,
}


class _Swapped:
    """One expert at a time: on a CPU the other one is not in memory, on a GPU it waits in RAM."""

    def __init__(self, setting: PeerSetting) -> None:
        self._setting = setting
        self._models: dict[str, WanTransformer3DModel] = {}
        self._present = ""
        if setting.device.type == "cuda":
            self._models = {name: _load(setting, name, mapped=False) for name in setting.folders}
        self.expert(next(iter(setting.folders)))

    def expert(self, name: str) -> WanTransformer3DModel:
        if name != self._present:
            self._leave(self._present)
            if self._setting.device.type == "cuda":
                self._models[name].to(self._setting.device)
            else:
                self._models[name] = _load(self._setting, name, mapped=False)
            self._present = name
        return self._models[name]

    def _leave(self, name: str) -> None:
        if name and self._setting.device.type == "cuda":
            self._models[name].to("cpu")
        elif name:
            del self._models[name]
            gc.collect()


def _cast(variant: CaseVariant, model: WanTransformer3DModel) -> WanTransformer3DModel:
    if variant.layerwise_fp8:
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    return model


def _own_folder(setting: PeerSetting, expert: str) -> Path:
    folder = setting.own_folder / expert
    folder.mkdir(parents=True, exist_ok=True)
    return folder
