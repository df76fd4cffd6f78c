"""Case `gpu`: A14B block shapes, in parts below ten minutes, to run one by one.

    python benchmarks/offload.py gpu WORK smoke       one minute: a short video,
                                                      WanStream and two peers
    python benchmarks/offload.py gpu WORK 480p-12     2 x 8 blocks, 832x480x81, 12 GB: all peers
    python benchmarks/offload.py gpu WORK 480p-24     the same with 24 GB
    python benchmarks/offload.py gpu WORK 720p-12     2 x 8 blocks, 1280x720x81
    python benchmarks/offload.py gpu WORK 720p-24
    python benchmarks/offload.py gpu WORK 480p-8      8 GB: WanStream with 8192 tokens at once;
                                                      720p-8 likewise
    python benchmarks/offload.py gpu WORK 480p-fp8    weights in fp8
    python benchmarks/offload.py gpu WORK 480p-full   2 x 40 blocks, WanStream in 12 GB
                                                      and the resident model
    python benchmarks/offload.py gpu WORK 720p-full
    python benchmarks/offload.py gpu WORK merge       one result from all parts that have runs

WORK needs 13 GB of disk, and 29 GB for the parts with 40 blocks, where both experts are the same
files. Result lines go to WORK/sessions/gpu-<part>.jsonl. They may be measured on one machine and
and merged on another. The machine needs torch with CUDA, diffusers, accelerate, safetensors,
transformers, sentencepiece, psutil, platformdirs, ftfy, tqdm, and this checkout importable as
`wanstream` (a link of that name in a folder on PYTHONPATH).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..record import record
from .predict import longer_run
from .session import Planned, Session, Settings
from .shapes import SHAPES
from .summary import summarise
from .variants import DEVICE_PEERS, SWAP, chunked_variant, fp8_variants

OURS = ("layerwise", "half", "pinned")
PEERS = tuple(variant.name for variant in (*DEVICE_PEERS, SWAP))


@dataclass(frozen=True, kw_only=True)
class CasePart:
    """Runs in one call."""

    shape: str
    capped: tuple[str, ...]
    """Variants that run inside `vram_gb`."""
    free: tuple[str, ...] = ("resident",)
    """Variants that run without a limit, as reference for ratios."""
    vram_gb: float | None = None
    minutes: float = 8.0
    """No run begins after this time."""


def _parts() -> dict[str, CasePart]:
    fp8_names = tuple(variant.name for variant in fp8_variants() if variant.kind != "resident")
    parts = {
        "smoke": CasePart(
            shape="smoke",
            capped=("pinned", "group-block-record", "cpu-offload"),
            vram_gb=12,
            minutes=3,
        ),
        "480p-fp8": CasePart(
            shape="480p", capped=fp8_names, free=("resident", "resident-fp8"), vram_gb=12
        ),
    }
    for size in ("480p", "720p"):
        parts[f"{size}-8"] = CasePart(shape=size, capped=(chunked_variant().name,), vram_gb=8)
        for gigabytes in (12, 24):
            parts[f"{size}-{gigabytes}"] = CasePart(
                shape=size, capped=(*OURS, *PEERS), vram_gb=gigabytes
            )
        parts[f"{size}-full"] = CasePart(
            shape=f"{size}-40", capped=("layerwise", "pinned"), vram_gb=12
        )
    return parts


PARTS: Mapping[str, CasePart] = _parts()


def run_part(chosen: argparse.Namespace) -> None:
    """Make the runs in one part, or merge all parts with runs into one result."""
    sessions = chosen.work.resolve() / "sessions"
    if chosen.part == "merge":
        lines = [run for name in PARTS for run in runs_of(sessions, name)]
        if not lines:
            raise ValueError(f"{sessions} contains no runs of a part: run a part first")
        print(
            record(
                "offload-gpu",
                method=METHOD,
                figures=merged(sessions, chosen.device),
                folder=chosen.results,
                # The runs may be merged on another machine, so these come from the runs.
                hardware=lines[-1]["hardware"],
                versions=lines[-1]["versions"],
            )
        )
        return
    part = PARTS[chosen.part]
    shape = "tiny" if chosen.device == "cpu" else part.shape
    for vram_gb, names in ((None, part.free), (part.vram_gb, part.capped)):
        settings = Settings(
            shape=shape,
            work=chosen.work.resolve(),
            device=chosen.device,
            threads=chosen.threads,
            vram_gb=vram_gb if chosen.device != "cpu" else None,
            cold=False,
        )
        session = Session(sessions / f"gpu-{chosen.part}.jsonl", settings)
        session.write_experts()
        planned = [
            Planned(variant=name) for name in names if chosen.only is None or name in chosen.only
        ]
        session.make([planned], retries=0, minutes=part.minutes)


def merged(sessions: Path, device: str) -> dict[str, Any]:
    """Return the rows for every part, with simulated times for 40 blocks where 8 were measured."""
    parts: dict[str, Any] = {}
    for name, part in PARTS.items():
        runs = runs_of(sessions, name)
        if not runs:
            continue
        shape = SHAPES["tiny" if device == "cpu" else part.shape]
        rows = summarise(runs, switch_step=shape.switch_step)
        streamed = {
            run["variant"]: run["report"]
            for run in runs
            if run["report"] and run["report"]["timeline"]
        }
        parts[name] = {
            "tokens": shape.tokens,
            "blocks": shape.expert.layers,
            "vram_gb": part.vram_gb,
            "variants": rows,
            "simulated_40_blocks": {
                variant: longer_run(report["timeline"], blocks=shape.expert.layers, longer=40)
                for variant, report in streamed.items()
                if shape.expert.layers < 40 and variant in FULLY_STREAMED
            },
        }
    return {"parts": parts}


def runs_of(sessions: Path, part: str) -> list[dict[str, Any]]:
    """Return a part's runs so far."""
    shape = PARTS[part].shape
    return Session(
        sessions / f"gpu-{part}.jsonl", Settings(shape=shape, work=sessions.parent)
    ).runs()


FULLY_STREAMED = ("layerwise", "pinned", "chunked", "layerwise-fp8")

METHOD = (
    "two experts with A14B's block shapes (40 heads x 128, feed-forward 13824), random weights, 8 "
    "blocks each, or 40 where the part says so; 2 + 2 Euler steps with guidance (two lanes); every "
    "run in a process of its own; memory of the device limited with "
    "torch.cuda.set_per_process_memory_fraction for all but the resident model, whose runs of the "
    "same part the ratios are to; files may be in the page cache; device_peak is what torch "
    "allocated at most in the steps; figures for 40 blocks from runs of 8 are simulated"
)
