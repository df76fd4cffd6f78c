"""The settings of a run that a list of runs shows next to its figures, and the memory of the machine that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..metrics.device import total_bytes
from ..plan import AutoOffload, ExpertsRef, OffloadPolicy, WorkersRef
from ..plan.shapes import FRAMES_PER_LATENT
from ..plan.trial_matrix import policy_name
from ..wan.latent_space import space_of

if TYPE_CHECKING:
    import torch

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings by which runs differ, in a few words each, as JSON carries them."""

    size: str
    """Width, height and frames, and the number of videos where it is not 1: `832x480x81, 2 videos`."""
    dtype: str
    policy: str
    lora: str
    """Name and strength of each LoRA; empty without one."""
    workers: int | None = None
    """The number requested; None: this process computes."""
    device_total: int | None = None
    """Bytes of the device; None on a CPU, and for workers, whose devices may be of several sizes."""
    ram_total: int | None = None
    """Bytes of the RAM of this machine; None for workers."""

    def plain(self) -> dict[str, str | int | None]:
        """The same as JSON."""
        return asdict(self)


def run_settings(
    ref: ExpertsRef,
    asked: OffloadPolicy | AutoOffload,
    policy: OffloadPolicy,
    shape: Sequence[int],
    device: torch.device,
    *,
    workers: WorkersRef | None = None,
) -> RunSettings:
    """The settings of a run on latents of `shape` [B, C, T, h, w], which was `asked` for and begins with `policy`."""
    totals = (None, None) if workers is not None else total_bytes(device)
    chosen = policy_name(policy) + (", RAM" if policy.source == "pinned" else "")
    return RunSettings(
        size=_size(shape),
        dtype=SHORT_DTYPES.get(ref.compute_dtype, ref.compute_dtype),
        policy=f"auto: {chosen}" if isinstance(asked, AutoOffload) else chosen,
        lora=", ".join(_lora_names(ref)),
        workers=None if workers is None else workers.count,
        device_total=totals[0],
        ram_total=totals[1],
    )


def _size(shape: Sequence[int]) -> str:
    videos, channels, frames, height, width = shape
    pixels = space_of(channels).pixels
    size = f"{width * pixels}x{height * pixels}x{(frames - 1) * FRAMES_PER_LATENT + 1}"
    return size if videos == 1 else f"{size}, {videos} videos"


def _lora_names(ref: ExpertsRef) -> list[str]:
    """Each file once, though both experts may take it."""
    found: dict[str, None] = {}
    for lora in ref.loras:
        for file, strength in ((lora.high_noise, lora.strength_high), (lora.low_noise, lora.strength_low)):
            if file is not None:
                found[f"{file.stem} {strength:g}"] = None
    return list(found)
