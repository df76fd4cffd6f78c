"""Engine overhead per visit: 40 resident blocks that return their input.

python benchmarks/engine_overhead.py [cpu|cuda]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from record import record
from torch import nn

from wanstream.offload import StepCalls, StreamSession, attach_offload
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder

BLOCKS = 40
PASSES = 50


class Identity(nn.Module):
    """Block with as many streamed matrices as a Wan block, and no computation."""

    def __init__(self) -> None:
        super().__init__()
        # The matrices are small: the cost depends on how many parameters are bound.
        self.matrices = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(10))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def time_passes(session: StreamSession, blocks: nn.ModuleList, recorder: Recorder) -> list[float]:
    """Return the seconds per visit for every pass."""
    hidden = torch.ones(1)
    seconds = []
    for step in range(PASSES + 1):
        with recorder.step(step, "blocks"):
            session.begin_pass()
            began = time.perf_counter()
            for index, block in enumerate(blocks):
                with session.visit(index):
                    hidden = block(hidden)
            seconds.append((time.perf_counter() - began) / BLOCKS)
            session.end_pass()
    return seconds[1:]  # the first pass fetches the blocks


def main(device: str) -> None:
    blocks = nn.ModuleList(Identity() for _ in range(BLOCKS)).requires_grad_(False)
    with attach_offload(
        blocks, policy=OffloadPolicy.resident(), device=device, follow_forward=False
    ) as handle:
        recorder = Recorder(torch.device(device))
        calls = StepCalls(["blocks"] * (PASSES + 1), handle.block_counts)
        session = StreamSession(calls, lambda: handle, recorder=recorder)
        session.begin()
        seconds = time_passes(session, blocks, recorder)
        session.close()
    micro = [value * 1e6 for value in seconds]
    figures = {
        "microseconds_per_visit": {
            "median": round(statistics.median(micro), 2),
            "min": round(min(micro), 2),
            "max": round(max(micro), 2),
        }
    }
    method = (
        f"{BLOCKS} blocks that return their input, all resident, recorder on, {PASSES} passes "
        "after one that fetches"
    )
    print(
        record(f"engine-overhead-{device}", method=method, figures=figures).read_text(
            encoding="utf-8"
        )
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
