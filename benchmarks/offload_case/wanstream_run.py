"""WanStream's part: the pair opened, run and simulated."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wanstream.sampling import DenoiseRequest, denoise
from wanstream.schema import Timeline
from wanstream.wan.experts.open import open_experts

from .task import DTYPE, Task


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedResult:
    """What a run of WanStream leaves."""

    latents: torch.Tensor
    timeline: Timeline
    loaded_s: float
    """Until the first step could begin."""
    device_weight_bytes: int
    host_weight_bytes: int


def run_wanstream(
    task: Task, request: DenoiseRequest, folders: dict[str, Path], device: torch.device
) -> StreamedResult:
    """One run under the variant's policy."""
    way = task.way
    assert way.policy is not None
    options: dict[str, Any] = {} if way.direct is None else {"direct": way.direct}
    if way.storage != "as stored":
        options["storage"] = way.storage
    began = time.perf_counter()
    with open_experts(folders["high"], folders["low"], compute_dtype=DTYPE, **options) as pair:
        engine = pair.engine(way.policy, device)
        _ = engine.models["high"]  # everything of the first expert that does not stream is there now
        loaded_s = time.perf_counter() - began
        result = denoise(pair, request, policy=way.policy, device=device)
        return StreamedResult(
            latents=result.latents,
            timeline=result.timeline,
            loaded_s=loaded_s,
            device_weight_bytes=engine.loaded_bytes,
            host_weight_bytes=engine.host_bytes,
        )
