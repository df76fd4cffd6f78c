"""RAM that decoding a video takes in addition to the VAE weights, under a budget.

Each case decodes into an MP4 in a new process, with the tile size that fits the budget. The peak is
VmHWM, reset before the decode. All tiles take the same memory, so a decode may be ended early. The
result contains the decoded percentage. The case `difference` compares frames from tiles with whole
frames.

python benchmarks/vae_memory.py tiny|full|wan22|difference ... [--budget GB] [--seconds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wanstream.benchmarks.record import record
from wanstream.nodes.runs.video_file import write_video
from wanstream.testing.components import save_vae_file
from wanstream.testing.weights import make_vae, make_wan22_vae
from wanstream.wan.latents.space import WAN21, WAN22, LatentSpace
from wanstream.wan.vae.memory import HEAP_BYTES, choose_tiling
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import WanVae, open_vae

THREADS = 2
FPS = 16
CRF = 18


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """VAE with random weights, and the size of the video to decode."""

    base_dim: int
    width: int
    height: int
    frames: int
    space: LatentSpace = WAN21

    def latents(self) -> torch.Tensor:
        size = (
            (self.frames - 1) // 4 + 1,
            self.height // self.space.pixels,
            self.width // self.space.pixels,
        )
        return torch.randn(
            1, self.space.channels, *size, generator=torch.Generator().manual_seed(0)
        )

    def save(self, path: Path) -> None:
        """Write the VAE. In Wan2.2 5B the decoder is twice as wide as the encoder."""
        if self.space == WAN21:
            save_vae_file(make_vae(seed=0, base_dim=self.base_dim), path)
        else:
            save_vae_file(
                make_wan22_vae(seed=0, base_dim=self.base_dim, decoder_base_dim=2 * self.base_dim),
                path,
            )


CASES = {
    "tiny": DecodeCase(base_dim=2, width=1280, height=720, frames=81),
    "full": DecodeCase(base_dim=96, width=1280, height=720, frames=5),
    "wan22": DecodeCase(base_dim=16, width=640, height=352, frames=9, space=WAN22),
}
DIFFERENCE = DecodeCase(base_dim=8, width=832, height=480, frames=5)
TILES = (256, 512)


class TimeIsUpError(Exception):
    """Raised to end the decode when time is up."""


class FrameCounter:
    """Counter for decoded latent frames in tiles. Ends the decode after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds
        self.done = 0

    def check(self) -> None:
        if time.perf_counter() > self._until:
            raise TimeIsUpError
        self.done += 1


def status(name: str) -> int:
    """Return a memory line from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(kilobytes)


def measure(case: DecodeCase, budget: int, work: Path, seconds: float) -> dict[str, Any]:
    """Measure one decode in this process, ended after `seconds`."""
    torch.set_num_threads(THREADS)
    latents = case.latents()
    with open_vae(work / "vae.safetensors") as vae:
        needs = vae.decode_needs(latents, to_file=True)
        tiling = choose_tiling(needs, budget, shared=True)
        # Warm-up: read the weights and initialise the libraries.
        for _ in vae.stream(latents[:, :, :1, :2, :2], device="cpu"):
            pass

        def estimated_gb(tiling: Tiling | None) -> float:
            return (needs.device_bytes(tiling) + needs.host_bytes(tiling) + HEAP_BYTES) / 1e9

        before = status("VmRSS")
        # Writing 5 resets VmHWM to the present RSS.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        start = time.perf_counter()
        counter = FrameCounter(seconds)
        parts = vae.stream(latents, device="cpu", tiling=tiling, check=counter.check)
        # A decode that is cut short has reached the peak: all tiles take the same memory.
        with contextlib.suppress(TimeIsUpError):
            write_video(
                work / "video.mp4",
                (frame for part in parts for frame in part),
                fps=FPS,
                crf=CRF,
                metadata={},
            )
        tiles = 1 if tiling is None else len(tiling.tiles(needs.height, needs.width))
        return {
            "video_written": (work / "video.mp4").exists(),
            "percent_decoded": round(100 * counter.done / (tiles * (latents.shape[2] + 1)), 1),
            "budget_gb": budget / 1e9,
            "tile_pixels": None if tiling is None else tiling.pixels,
            "tiles": tiles,
            "computed_for_each_pixel": round(
                1
                if tiling is None
                else tiling.computed(needs.height, needs.width) / (needs.height * needs.width),
                2,
            ),
            "reckoned_gb": round(estimated_gb(tiling), 3),
            "whole_frames_would_take_gb": round(estimated_gb(None), 2),
            "weights_gb": round(vae.weight_bytes / 1e9, 3),
            "peak_beside_weights_gb": round((status("VmHWM") - before) / 1e9, 3),
            "peak_of_process_gb": round(status("VmHWM") / 1e9, 3),
            "wall_s": round(time.perf_counter() - start, 1),
        }


def difference(vae: WanVae, latents: torch.Tensor) -> dict[str, Any]:
    """Return the difference between tiled and whole frames, in 8-bit steps of 255."""
    whole = vae.decode(latents, device="cpu")
    figures = {}
    for pixels in TILES:
        change = (vae.decode(latents, device="cpu", tiling=Tiling.of(pixels)) - whole).abs() * 255
        figures[f"tiles_of_{pixels}"] = {
            "mean": round(change.mean().item(), 2),
            "largest": round(change.max().item(), 1),
            "relative_l2": round(((change / 255).norm() / whole.norm()).item(), 5),
        }
    return figures


def in_child(name: str, budget: int, work: Path, seconds: float) -> dict[str, Any]:
    """Run `measure` in a new process."""
    CASES[name].save(work / "vae.safetensors")
    command = [sys.executable, __file__, name, "--budget", str(budget / 1e9), "--child", str(work)]
    command += ["--seconds", str(seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Libraries may print other lines before the JSON.
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "difference"])
    parser.add_argument(
        "--budget", type=float, default=1.0, help="GB in addition to the weights (default 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="end a decode after this time (default: never)"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    budget = int(args.budget * 1e9)
    if args.child is not None:
        print(json.dumps(measure(CASES[args.cases[0]], budget, args.child, args.seconds)))
        return
    for name in args.cases:
        case = CASES.get(name, DIFFERENCE)
        with tempfile.TemporaryDirectory() as work:
            if name == "difference":
                case.save(Path(work) / "vae.safetensors")
                with open_vae(Path(work) / "vae.safetensors") as vae:
                    figures = difference(vae, case.latents())
                method = "whole frames against tiles that overlap by a quarter"
            else:
                figures = in_child(name, budget, Path(work), args.seconds)
                method = (
                    f"into an MP4, {THREADS} threads; peak: VmHWM of the decode, less VmRSS with "
                    "the weights read"
                )
        size = (
            f"{case.width}x{case.height}x{case.frames}, VAE of base_dim {case.base_dim}, random "
            "weights, 1 run"
        )
        print(
            record(f"vae-memory-{name}", method=f"{size}; {method}", figures=figures),
            json.dumps(figures),
            flush=True,
        )


if __name__ == "__main__":
    main()
