"""Each policy's memory as the operating system reports it, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# We configure glibc to keep freed blocks smaller than 32 MiB.
BLOCKS, WIDTH, MIB = 6, 3072, 36  # MiB per block, in fp32

RUN = """
import sys
import torch
from torch import nn
from wanstream.offload import attach_offload
from wanstream.offload.sources.file import FileSource
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy

path, policy = sys.argv[1], eval("OffloadPolicy." + sys.argv[2])
tensors = read_header(path).tensors
names = ("high", "low")
source = FileSource(
    {BlockKey(n, i): {"0.weight": tensors[f"{n}.{i}"]} for n in names for i in range(%(blocks)d)},
    computed_dtypes=torch.float32,
)
stacks = {
    n: [
        nn.Sequential(nn.Linear(%(width)d, %(width)d, bias=False, device="meta"))
        for _ in range(%(blocks)d)
    ]
    for n in names
}
hidden = torch.ones(1, %(width)d)
warm = nn.Linear(%(width)d, 8)(hidden)


def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak counts from here
before = status("VmRSS")
with attach_offload(
    stacks, policy=policy, device="cpu", source=source, follow_forward=False
) as handle:
    visits = step_visits(["high", "high", "low", "low"], handle.block_counts)
    with torch.inference_mode(), handle.run(visits) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                hidden = stacks[visit.expert][visit.block](hidden)
    peak, filled = status("VmHWM"), status("VmRSS")
    handle.release_memory(1 << 60)
    print(peak - before, filled - status("VmRSS"))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocks") / "blocks.safetensors"
    save_file(
        {
            f"{n}.{i}": torch.full((WIDTH, WIDTH), 1e-4)
            for n in ("high", "low")
            for i in range(BLOCKS)
        },
        path,
    )
    return path


def _peak_and_given_back_mib(checkpoint: Path, policy: str) -> tuple[float, float]:
    code = RUN % {"blocks": BLOCKS, "width": WIDTH}
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint), policy],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peak, given_back = (int(number) / 1024 for number in done.stdout.split())
    return peak, given_back


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_follows_the_policy_and_is_given_back(checkpoint: Path) -> None:
    policies = ["layerwise(1)", "layerwise(3)", f"block_swap({BLOCKS // 2})", "resident()"]
    seen = [_peak_and_given_back_mib(checkpoint, policy) for policy in policies]
    peaks = [peak for peak, _ in seen]
    assert peaks == sorted(peaks), dict(zip(policies, peaks, strict=True))
    blocks = [2, 4, 5, 12]
    for policy, (peak, given_back), count in zip(policies, seen, blocks, strict=True):
        # The buffers and little else: within half a block.
        assert abs(peak - MIB * count) < MIB / 2, (policy, peak)
        assert abs(given_back - MIB * count) < 1, (policy, given_back)
