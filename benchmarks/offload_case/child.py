"""One run in a separate process: set up one variant, denoise, write the report."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wanstream.devices import compute_device
from wanstream.sampling import denoise
from wanstream.wan.experts.open import open_experts

from .linux import memory_bytes, process_usage
from .model_files import expert_folders
from .peers import PeerSetting, denoise_plain, set_up
from .predict import measure, predicted_timeline
from .task import DTYPE, RunReport, Task


def run(task: Task) -> None:
    """Run the task and write its report, measure the machine, or write a peer's files.

    See `Task.wanted`.
    """
    if task.wanted == "machine":
        measure(task)
        return
    torch.set_num_threads(task.threads)
    device = _ready_device(task)
    folders = expert_folders(Path(task.work), task.case)
    if task.wanted == "files":
        set_up(task.case_variant, _setting(task, folders, device))
        return
    is_ours = task.case_variant.kind == "wanstream"
    report = _run_wanstream(task, folders, device) if is_ours else _run_peer(task, folders, device)
    Path(task.report).write_text(json.dumps(report.to_dict()), encoding="utf-8")


def _ready_device(task: Task) -> torch.device:
    """Return the device, initialised and limited in memory, so that no run pays for the start."""
    device = compute_device(task.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
        if task.vram_gb is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, task.vram_gb * 1e9 / total), device)
    return device


def _run_wanstream(task: Task, folders: dict[str, Path], device: torch.device) -> RunReport:
    variant = task.case_variant
    request = task.case.request()
    assert variant.policy is not None
    options: dict[str, Any] = {} if variant.direct is None else {"direct": variant.direct}
    if variant.storage != "as stored":
        options["storage"] = variant.storage
    import_rss = memory_bytes("VmRSS")
    before = process_usage()
    # The clock starts after the imports, so variants are compared without them.
    start = time.perf_counter()
    with open_experts(folders["high"], folders["low"], compute_dtype=DTYPE, **options) as pair:
        engine = pair.engine(variant.policy, device)
        _ = engine.models["high"]  # loads everything of the first expert that does not stream
        load_s = time.perf_counter() - start
        result = denoise(pair, request, policy=variant.policy, device=device)
        # Closing the pair frees the weights, so they are counted before that.
        device_weight_bytes = engine.loaded_bytes
        host_weight_bytes = engine.host_bytes
    total_s = time.perf_counter() - start
    used = process_usage().since(before)
    steps = result.timeline.steps
    peaks = [step.memory.device_bytes for step in steps if step.memory.device_bytes is not None]
    return RunReport(
        import_rss_bytes=import_rss,
        load_s=load_s,
        step_s=[step.wall_s for step in steps],
        total_s=total_s,
        peak_rss_bytes=memory_bytes("VmHWM"),
        read_bytes=used.read_bytes,
        user_s=used.user_s,
        system_s=used.system_s,
        checksum=_save(result.latents, task.latents),
        step_bytes=[step.bytes_moved for step in steps],
        device_peak_bytes=max(peaks, default=None),
        device_weight_bytes=device_weight_bytes,
        host_weight_bytes=host_weight_bytes,
        timeline=result.timeline.to_dict(),
        predicted=None
        if task.machine is None
        else predicted_timeline(task, Path(task.machine)).to_dict(),
    )


def _run_peer(task: Task, folders: dict[str, Path], device: torch.device) -> RunReport:
    request = task.case.request()
    import_rss = memory_bytes("VmRSS")
    before = process_usage()
    start = time.perf_counter()
    model_of = set_up(task.case_variant, _setting(task, folders, device))
    load_s = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the peak in the steps, as for our runs
    result = denoise_plain(model_of, request, dtype=DTYPE, device=device)
    total_s = time.perf_counter() - start
    used = process_usage().since(before)
    return RunReport(
        import_rss_bytes=import_rss,
        load_s=load_s,
        step_s=result.step_s,
        total_s=total_s,
        peak_rss_bytes=memory_bytes("VmHWM"),
        read_bytes=used.read_bytes,
        user_s=used.user_s,
        system_s=used.system_s,
        checksum=_save(result.latents, task.latents),
        device_peak_bytes=torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else None,
    )


def _setting(task: Task, folders: dict[str, Path], device: torch.device) -> PeerSetting:
    return PeerSetting(
        folders=folders, variant_folder=task.variant_folder, dtype=DTYPE, device=device
    )


def _save(latents: torch.Tensor, file: Path) -> str:
    """Save the latents as fp32, and return the SHA-256 of their bytes."""
    values = latents.float().numpy()
    np.save(file, values)
    return hashlib.sha256(values.tobytes()).hexdigest()
