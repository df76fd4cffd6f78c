"""What a process of its own is asked to run, and what it reports."""

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
    """One variant on one shape; travels to the process as JSON."""

    variant: str
    shape: str
    work: str
    """Folder of the weights and of the files that peers write."""
    report: str
    """File that the report is written to; the latents lie beside it."""
    device: str = "cpu"
    threads: int = 2
    machine: str | None = None
    """File of the measured machine that WanStream's own prediction starts from."""
    vram_gb: float | None = None
    wanted: Literal["run", "files", "machine"] = "run"
    """A run; or only the files that a peer writes before its first run, or the figures of this machine."""

    @property
    def case(self) -> CaseShape:
        return SHAPES[self.shape]

    @property
    def way(self) -> CaseVariant:
        return all_variants(self.case.expert.layers)[self.variant]

    @property
    def experts_folder(self) -> Path:
        """Where the experts of this shape lie."""
        return Path(self.work) / "experts" / self.case.key

    @property
    def own_folder(self) -> Path:
        """Where the variant writes files of its own, for the experts of this shape."""
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
    """What one run took. Times start after the imports, bytes from the disk too."""

    import_rss_bytes: int
    """RAM of the process before anything is loaded."""
    load_s: float
    """Until the first step can begin: models made, weights and hooks in place as the variant has them."""
    step_s: list[float]
    total_s: float
    """Load, steps and what lies between them."""
    peak_rss_bytes: int
    """The kernel's own peak (VmHWM), mapped files included."""
    read_bytes: int
    """From the disk."""
    user_s: float
    system_s: float
    checksum: str
    """SHA-256 of the latents."""
    step_bytes: list[int] | None = None
    """Weights that each step moved; None where the way does not say."""
    device_peak_bytes: int | None = None
    device_weight_bytes: int | None = None
    host_weight_bytes: int | None = None
    timeline: dict[str, Any] | None = None
    predicted: dict[str, Any] | None = None
    """WanStream's simulation of the run, from the machine as it was measured."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunReport:
        return cls(**{field.name: data[field.name] for field in fields(cls)})
