"""Memory of a separate process under each policy, as the operating system reports it.

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

BLOCKS = 6
WIDTH = 3072
MIB = 36
"""A block takes 36 MiB in fp32, so glibc maps it separately and returns it. Freed blocks up to
32 MiB stay with glibc, as we configure it."""

RUN = """
import json
import sys
from dataclasses import replace
import torch
from torch import nn
from wanstream.offload.formats import read_header
from wanstream.offload.sources import FileSource
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.streaming import IN_RAM, LAYERWISE, attach, stream

path, blocks, width, runs, *policies = sys.argv[1:]
blocks, width, policies = int(blocks), int(width), [eval(policy) for policy in policies]
places, names = read_header(path).tensors, ("high", "low")
keys = [BlockKey(name, index) for name in names for index in range(blocks)]
source = FileSource(
    {key: {"weight": places[f"{key.expert}.{key.block}"]} for key in keys},
    computed_dtypes=torch.float32,
)
stacks = {
    name: [nn.Linear(width, width, bias=False, device="meta") for _ in range(blocks)]
    for name in names
}
steps, hidden = ["high", "high", "low", "low"], torch.ones(1, width)
nn.Linear(width, 8)(hidden)


def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak counts from here
before = status("VmRSS")
with attach(stacks, policies[0], source=source) as engine:
    for number in range(int(runs)):
        engine.set_policy(policies[number % len(policies)])
        with torch.inference_mode():
            stream(engine, stacks, steps, hidden)
        print(json.dumps([engine.host_bytes, engine.loaded_bytes, status("VmRSS")]))
    peak, filled = status("VmHWM"), status("VmRSS")
    engine.release_memory(1 << 60)
    print(json.dumps([peak - before, filled - status("VmRSS")]))
"""

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
pytestmark = [pytest.mark.slow, LINUX]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("blocks") / "blocks.safetensors"
    names = [f"{name}.{block}" for name in ("high", "low") for block in range(BLOCKS)]
    save_file({name: torch.full((WIDTH, WIDTH), 1e-4 * at) for at, name in enumerate(names)}, path)
    return path


def run(checkpoint: Path, runs: int, *policies: str) -> list[list[int]]:
    """Return a line for each run, and one with the peak and the bytes released in the end."""
    given = [str(checkpoint), *map(str, (BLOCKS, WIDTH, runs)), *policies]
    command = [sys.executable, "-c", RUN, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_memory_stays_flat_over_many_runs_and_policies(checkpoint):
    """Every run has another policy than the run before."""
    policies = [
        'OffloadPolicy.block_swap(2, 1, source="pinned")',
        "replace(IN_RAM, ram_blocks=2)",
        "OffloadPolicy.resident()",
        "IN_RAM",
    ]
    runs = run(checkpoint, 12, *policies)[:-1]
    assert len(runs) == 12
    for number, (*sizes, rss) in enumerate(runs):
        *first_sizes, first_rss = runs[number % len(policies)]
        assert sizes == first_sizes
        assert abs(rss - first_rss) <= 0.02 * first_rss, (number, runs)


def test_peak_memory_follows_the_policy_and_is_released(checkpoint):
    for policy, blocks in {
        "LAYERWISE": 2,
        "OffloadPolicy.layerwise(3)": 4,
        f"OffloadPolicy.block_swap({BLOCKS // 2})": 5,
        "OffloadPolicy.resident()": 2 * BLOCKS,
    }.items():
        peak, released = (each / 2**20 for each in run(checkpoint, 1, policy)[-1])
        # The buffers and little else: within half a block.
        assert abs(peak - MIB * blocks) < MIB / 2, (policy, peak)
        assert abs(released - MIB * blocks) < 1, (policy, released)
