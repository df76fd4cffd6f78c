"""Input and report for one run in a separate process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from .shapes import SHAPES, CaseShape
from .variants import CaseVariant, all_variants

DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Task:
    """One variant on one shape, sent to the process as JSON."""

    variant: str
    shape: str
    work: str
    """Folder for the weights and for files written by peers."""
    report: str
    """Report path. The latents are written next to it."""
    device: str = "cpu"
    threads: int = 2
    machine: str | None = None
    """Path of the measured machine, for WanStream's prediction."""
    vram_gb: float | None = None
    wanted: Literal["run", "files", "machine"] = "run"
    """A whole run, or only a peer's files before its first run, or the measurements of this
    machine."""

    @property
    def case(self) -> CaseShape:
        return SHAPES[self.shape]

    @property
    def case_variant(self) -> CaseVariant:
        return all_variants(self.case.expert.layers)[self.variant]

    @property
    def experts_folder(self) -> Path:
        """Folder with the experts for this shape."""
        return Path(self.work) / "experts" / self.case.key

    @property
    def variant_folder(self) -> Path:
        """Folder for files written by the variant, for the experts with this shape."""
        # Variants with another heap setting read the same files.
        return Path(self.work) / "own" / self.case.key / self.variant.removesuffix("-heap")

    @property
    def latents(self) -> Path:
        return Path(self.report).with_suffix(".npy")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Measurements for one run.

    Times and disk bytes are counted from the end of the imports.
    """

    import_rss_bytes: int
    """RSS before the process loads weights."""
    load_s: float
    """Time until the first step can begin: models built, weights loaded and hooks attached."""
    step_s: list[float]
    total_s: float
    """Load, steps and the time between them."""
    peak_rss_bytes: int
    """Kernel-measured peak (VmHWM), including mapped files."""
    read_bytes: int
    """Bytes from the disk."""
    user_s: float
    system_s: float
    checksum: str
    """SHA-256 of the latents."""
    step_bytes: list[int] | None = None
    """Weight bytes copied by step. None if the variant does not report them."""
    device_peak_bytes: int | None = None
    device_weight_bytes: int | None = None
    host_weight_bytes: int | None = None
    timeline: dict[str, Any] | None = None
    predicted: dict[str, Any] | None = None
    """Timeline simulated by WanStream from the measured machine."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunReport:
        return cls(**{field.name: data[field.name] for field in fields(cls)})
