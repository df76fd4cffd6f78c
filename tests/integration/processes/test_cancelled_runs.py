"""Process memory over 40 cancelled runs, next to a process with uncancelled runs."""

import sys
from pathlib import Path

import pytest
import torch

from wanstream.sampling import DenoiseRequest
from wanstream.sampling.steps import SamplingCancelled
from wanstream.tests.support.sampling.runs import normal, run
from wanstream.wan import ExpertsRegistry

pytestmark = [
    *(pytest.mark.slow, pytest.mark.timeout(900)),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def job_grow(here, experts, cancelled):
    """Return the bytes by which the process grows in the last 25 of 40 runs."""
    torch.set_num_threads(1)
    rss = []
    pair = ExpertsRegistry().get(experts)
    settings = {"steps": 4, "flow_shift": 5.0, "guidance": (1.0, 1.0)}
    for number in range(40):
        polls = iter(range(number % 14 + 1))
        noise = normal(1, 16, 2, 8, 8, seed=number)
        text = normal(1, 8, 4096, seed=number)
        request = DenoiseRequest(noise=noise, positive=text, **settings)
        try:
            run(pair, request, should_stop=lambda left=polls: cancelled and next(left, -1) < 0)
        except SamplingCancelled:
            assert cancelled
        else:
            assert not cancelled
        rss.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    # By the 15th a run has been cancelled at all 14 polls, and all code is loaded.
    return rss[-1] - rss[14]


def test_cancelled_runs_keep_no_memory(processes, experts_ref):
    processes.at_least(2)
    jobs = [processes.replace(at).start(job_grow, experts_ref(), bool(at)) for at in (0, 1)]
    whole, cancelled = (job.result() for job in jobs)
    assert cancelled < max(4_000_000, 2 * whole)
