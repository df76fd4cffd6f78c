"""Time from `open_experts` to the first block: two 1 GB experts in bf16 files, page cache dropped.

python benchmarks/open_to_first_block.py [folder for the files, 2 GB]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import record

from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import save_expert_file
from wanstream.testing.weights import TinyShape, make_expert
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_experts

SHAPE = TinyShape(layers=30, heads=8, ffn_dim=4096)  # 1.03 GB in bf16
REPEATS = 7


class FirstBlockReached(Exception):
    """Raised when the first block is about to compute, to end the run."""


def write_experts(folder: Path) -> list[Path]:
    """Write two files with random weights."""
    files = [folder / f"{name}_noise.safetensors" for name in ("high", "low")]
    for seed, file in enumerate(files):
        save_expert_file(make_expert(SHAPE, seed=seed), file, dtype=torch.bfloat16)
    return files


def drop_from_page_cache(file: Path) -> None:
    """Drop `file` from the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(high: str, low: str) -> dict[str, float]:
    """Return the seconds from calling `open_experts` to the first block, in total and by phase."""
    lane = Lane(latents=torch.randn(1, 16, 3, 8, 8), text=torch.randn(1, 512, 4096))

    def stop_run(*_: object) -> None:
        raise FirstBlockReached

    disk_before = bytes_from_disk()
    start = time.perf_counter()
    with open_experts(high, low) as pair:
        opened = time.perf_counter()
        engine = pair.engine(OffloadPolicy.layerwise(1), "cpu")
        ready = time.perf_counter()
        try:
            with (
                torch.inference_mode(),
                # The exception ends the run like a cancel, and joins the threads.
                engine.run(step_visits(["high", "low"], engine.block_counts)) as run,
            ):
                model = engine.models["high"]
                complete = time.perf_counter()
                model.blocks[0].register_forward_pre_hook(stop_run)
                forward_lanes(
                    model, [lane], torch.tensor([999.0]), lambda block: run.visit(0, "high", block)
                )
        except FirstBlockReached:
            ended = time.perf_counter()
        from_disk = bytes_from_disk() - disk_before
    return {
        "total_s": ended - start,
        "open_s": opened - start,
        "engine_s": ready - opened,
        "outer_weights_s": complete - ready,
        "first_block_s": ended - complete,
        "read_from_disk_mb": from_disk / 1e6,
    }


def bytes_from_disk() -> int:
    """Return the bytes that this process has read from the disk, without the page cache."""
    counters = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    )
    return int(counters["read_bytes"])


def run_once(files: list[Path], *, cold: bool) -> dict[str, float]:
    """Measure once in a new process."""
    for file in files:
        if cold:
            drop_from_page_cache(file)
        else:
            file.read_bytes()
    command = [sys.executable, __file__, "--measure", *map(str, files)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(output))


def main(folder: Path) -> None:
    files = write_experts(folder)
    figures = {}
    for name, cold in (("cache_dropped", True), ("cache_warm", False)):
        runs = [run_once(files, cold=cold) for _ in range(REPEATS)]
        figures[name] = {
            key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]
        }
        figures[name]["total_s_of_each_run"] = [round(run["total_s"], 3) for run in runs]
    method = (
        f"two bf16 files of {files[0].stat().st_size / 1e9:.2f} GB in ComfyUI's keys, "
        f"{SHAPE.layers} blocks; from the call of open_experts to the call of block 0, imports "
        f"done before, layerwise(1) on the CPU; a process per run, medians of {REPEATS} runs; the "
        "files are dropped from the page cache (posix_fadvise) or read into it before"
    )
    print(record("open-to-first-block", method=method, figures=figures).read_text(encoding="utf-8"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        with tempfile.TemporaryDirectory(
            dir=sys.argv[1] if len(sys.argv) > 1 else None
        ) as temporary:
            main(Path(temporary))
