"""The process of one run: it imports, notes what that took, runs one variant and writes its report."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch

from wanstream.devices import compute_device

from .model_files import expert_folders
from .peers import PeerSetting, set_up
from .plain_loop import denoise_plain
from .predict import measure, predicted_timeline
from .process_figures import memory_bytes, spent
from .task import DTYPE, RunReport, Task
from .wanstream_run import run_wanstream


def run(task: Task) -> None:
    """Run the task and write its report; or measure the machine, or let the variant prepare its files."""
    if task.wanted == "machine":
        measure(task)
        return
    torch.set_num_threads(task.threads)
    device = _ready_device(task)
    folders = expert_folders(Path(task.work), task.case)
    if task.wanted == "files":
        set_up(task.way, _setting(task, folders, device))
        return
    report = _streamed(task, folders, device) if task.way.kind == "wanstream" else _plain(task, folders, device)
    Path(task.report).write_text(json.dumps(report.to_dict()), encoding="utf-8")


def _ready_device(task: Task) -> torch.device:
    """The device, awake and under its limit, so that no run pays for its start."""
    device = compute_device(task.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
        if task.vram_gb is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, task.vram_gb * 1e9 / total), device)
    return device


def _streamed(task: Task, folders: dict[str, Path], device: torch.device) -> RunReport:
    request = task.case.request()
    import_rss, before, began = memory_bytes("VmRSS"), spent(), time.perf_counter()
    run = run_wanstream(task, request, folders, device)
    total_s, used = time.perf_counter() - began, spent().since(before)
    steps = run.timeline.steps
    peaks = [step.device_bytes for step in steps if step.device_bytes is not None]
    return RunReport(
        import_rss_bytes=import_rss,
        load_s=run.loaded_s,
        step_s=[step.wall_s for step in steps],
        total_s=total_s,
        peak_rss_bytes=memory_bytes("VmHWM"),
        read_bytes=used.read_bytes,
        user_s=used.user_s,
        system_s=used.system_s,
        checksum=_keep(run.latents, task.latents),
        step_bytes=[step.bytes_moved for step in steps],
        device_peak_bytes=max(peaks, default=None),
        device_weight_bytes=run.device_weight_bytes,
        host_weight_bytes=run.host_weight_bytes,
        timeline=run.timeline.to_dict(),
        predicted=None if task.machine is None else predicted_timeline(task, Path(task.machine)).to_dict(),
    )


def _plain(task: Task, folders: dict[str, Path], device: torch.device) -> RunReport:
    request = task.case.request()
    import_rss, before, began = memory_bytes("VmRSS"), spent(), time.perf_counter()
    expert_of = set_up(task.way, _setting(task, folders, device))
    loaded_s = time.perf_counter() - began
    run = denoise_plain(expert_of, request, dtype=DTYPE, device=device)
    total_s, used = time.perf_counter() - began, spent().since(before)
    return RunReport(
        import_rss_bytes=import_rss,
        load_s=loaded_s,
        step_s=run.step_s,
        total_s=total_s,
        peak_rss_bytes=memory_bytes("VmHWM"),
        read_bytes=used.read_bytes,
        user_s=used.user_s,
        system_s=used.system_s,
        checksum=_keep(run.latents, task.latents),
        device_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def _setting(task: Task, folders: dict[str, Path], device: torch.device) -> PeerSetting:
    return PeerSetting(folders=folders, own_folder=task.own_folder, dtype=DTYPE, device=device)


def _keep(latents: torch.Tensor, file: Path) -> str:
    values = latents.float().numpy()
    np.save(file, values)
    return hashlib.sha256(values.tobytes()).hexdigest()
