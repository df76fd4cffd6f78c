"""Process memory over 40 cancelled runs, next to a process with uncancelled runs."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

RUNS = """
import json, sys
from pathlib import Path

import torch

from wanstream.sampling import DenoiseRequest, denoise
from wanstream.sampling.steps import SamplingCancelled
from wanstream.schema import OffloadPolicy
from wanstream.wan import open_experts

folder, cancelled = Path(sys.argv[1]), sys.argv[2] == "cancelled"
torch.set_num_threads(1)
generator, policy, rss = torch.Generator().manual_seed(0), OffloadPolicy.layerwise(1), []
settings = {"steps": 4, "flow_shift": 5.0, "guidance": (1.0, 1.0)}
with open_experts(folder / "high", folder / "low", compute_dtype=torch.float32) as pair:
    for number in range(40):
        polls = iter(range(10**6))
        noise = torch.randn(1, 16, 2, 8, 8, generator=generator)
        text = torch.randn(1, 8, 4096, generator=generator)
        request = DenoiseRequest(noise=noise, positive=text, **settings)

        def should_stop():
            return cancelled and next(polls) > number % 14

        try:
            denoise(pair, request, policy=policy, device="cpu", should_stop=should_stop)
        except SamplingCancelled:
            assert cancelled
        else:
            assert not cancelled
        rss.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
print(json.dumps(rss))
"""


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_cancelled_runs_keep_no_memory(tiny_expert_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("high", "low"):
        (tmp_path / name).symlink_to(tiny_expert_folder())
    grown = {}
    for kind in ("whole", "cancelled"):
        rss = json.loads(
            subprocess.check_output([sys.executable, "-c", RUNS, str(tmp_path), kind], text=True)
        )
        # By then a run has been cancelled at all 14 polls, with the code that it loads.
        grown[kind] = rss[-1] - rss[14]
    assert grown["cancelled"] < max(4_000_000, 2 * grown["whole"]), grown
