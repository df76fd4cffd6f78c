"""Memory in a separate process over many runs, as the operating system reports it.

After other tests in the same process, a gap in the heap could take a buffer in one run and not in
the next.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

BLOCKS, WIDTH = 3, 3072
"""A block takes 38 MB, so glibc maps it separately and returns it. Freed blocks up to 32 MB may
stay with glibc."""
RUNS, POLICIES = 12, 4

RUN = """
import json
import os
import sys
from dataclasses import replace

import psutil
import torch
from safetensors.torch import load_file
from torch import nn

from wanstream.offload import attach_offload
from wanstream.offload.sources import FileSource
from wanstream.offload.formats import read_header
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy

path, blocks, width, runs = sys.argv[1], *map(int, sys.argv[2:])
places = read_header(path).tensors
source = FileSource(
    {
        BlockKey(n, i): {"weight": places[f"{n}.{i}"]}
        for n in ("high", "low")
        for i in range(blocks)
    },
    computed_dtypes=torch.float32,
)
stacks = {
    n: [nn.Linear(width, width, bias=False, device="meta") for _ in range(blocks)]
    for n in ("high", "low")
}
pinned = OffloadPolicy.layerwise(1, source="pinned")
policies = [
    OffloadPolicy.block_swap(2, 1, source="pinned"),
    replace(pinned, ram_blocks=2),
    OffloadPolicy.resident(),
    pinned,
]
process = psutil.Process(os.getpid())
stored, equal = load_file(path), True
with attach_offload(
    stacks, policy=policies[0], device="cpu", source=source, follow_forward=False
) as handle:
    for number in range(runs):
        handle.set_policy(policies[number % len(policies)])
        value = torch.randn(1, width, generator=torch.Generator().manual_seed(number))
        visits = step_visits(["high", "high", "low"], handle.block_counts)
        with torch.inference_mode(), handle.run(visits) as going:
            for visit in visits:
                with going.visit(*visit):
                    block = stacks[visit.expert][visit.block]
                    weight = stored[f"{visit.expert}.{visit.block}"]
                    equal = equal and torch.equal(block.weight, weight)
                    value = torch.nn.functional.normalize(block(value))
        rss = process.memory_info().rss
        print(json.dumps([rss, handle.host_bytes, handle.loaded_bytes, equal]))
"""


@pytest.mark.slow
def test_memory_stays_flat_over_many_runs_and_policies(tmp_path: Path) -> None:
    """226 MB in weights. Every run has another seed and policy than the run before."""
    path = tmp_path / "blocks.safetensors"
    generator = torch.Generator().manual_seed(0)
    names = [f"{name}.{block}" for name in ("high", "low") for block in range(BLOCKS)]
    save_file({name: torch.randn(WIDTH, WIDTH, generator=generator) for name in names}, path)
    given = [str(path), *(str(number) for number in (BLOCKS, WIDTH, RUNS))]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *given], capture_output=True, text=True, check=True, timeout=120
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == RUNS
    for number, (rss, host, loaded, equal) in enumerate(runs):
        assert equal, f"other weights in run {number}"
        assert (host, loaded) == tuple(runs[number % POLICIES][1:3])
        assert abs(rss - runs[number % POLICIES][0]) <= 0.02 * runs[number % POLICIES][0], (
            number,
            runs,
        )
