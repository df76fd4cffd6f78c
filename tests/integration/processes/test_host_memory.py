"""Host memory for four workers on one machine with whole weights: RAM holds the weights once.

The four take little more memory than one.
"""

import ctypes
import gc
import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.distributed.worker.worker import Worker
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.testing.weights import TinyShape, expert_config
from wanstream.tests.support.distributed.reports import latents_of
from wanstream.wan.checkpoint.open import open_expert

RANKS = 4
MOST = 1.15
SHAPE = TinyShape(layers=128, heads=4, ffn_dim=2048)
PINNED = OffloadPolicy.layerwise(1, source="pinned")
FILE = OffloadPolicy.layerwise(1)

NO_PSS = not Path("/proc/self/smaps_rollup").exists()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_PSS, reason="the system reports no PSS")]


def pss() -> int:
    """Bytes in this process, with a proportional share of shared pages and no freed heap."""
    gc.collect()
    with suppress(AttributeError):  # not in every libc
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def job_begin(here):
    """Note the bytes in a process that has imported everything."""
    here.worker = Worker("cpu", threads=1)
    pss()
    here.own = pss()


def job_run(here, task):
    return latents_of(here.worker, task)


def job_taken(here):
    return pss() - here.own


def job_close(here):
    here.worker.close()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertsRef:
    """Two experts with more than 1 GB each, all zeros: sparse files that take no disk space."""
    high, low = (_write_zeros(tmp_path_factory.mktemp("expert")) for _ in range(2))
    for folder in (high, low):
        weights = open_expert(folder).weights
        assert sum(tensor.nbytes for tensor in weights.values()) > 10**9
    # In fp32, each rank's private buffers would be twice as large.
    return ExpertsRef(high_noise=high, low_noise=low, compute_dtype="bfloat16")


@pytest.fixture(scope="module")
def begun(processes):
    """Fresh processes with everything imported and nothing opened."""
    processes.at_least(RANKS)
    for number in range(RANKS):
        processes.replace(number)
    processes.all(job_begin, count=RANKS)

    yield processes
    processes.all(job_close, count=RANKS)
    for number in range(RANKS):
        processes.replace(number)


@pytest.mark.parametrize("policy", [PINNED, FILE], ids=lambda policy: policy.source)
def test_ranks_of_one_machine_hold_one_copy(policy, begun, experts, make_task):
    request = {"steps": 2, "switch_step": 1, "guidance": (1.0, 1.0)}
    task = make_task(experts=experts, policy=policy, request=request)
    first = begun[0].start(job_run, task).result()
    # Weights streamed from files are in the page cache, and no process is charged.
    files = [*experts.high_noise.iterdir(), *experts.low_noise.iterdir()]
    cached = sum(file.stat().st_size for file in files) if policy is FILE else 0
    one = begun[0].start(job_taken).result() + cached
    others = [begun[number].start(job_run, task) for number in range(1, RANKS)]
    assert all(torch.equal(other.result(), first) for other in others)
    taken = begun.all(job_taken, count=RANKS)
    every = sum(taken) + cached
    figures = f"one rank {one / 1e6:.0f} MB, {RANKS} ranks {every / 1e6:.0f} MB, PSS {taken}"
    assert one > 2 * 10**9, figures
    assert every <= MOST * one, figures


def _write_zeros(folder: Path) -> Path:
    with torch.device("meta"):
        model = WanTransformer3DModel(**expert_config(SHAPE))
    model.save_config(folder)
    header = {}
    end = 0
    for name, tensor in model.state_dict().items():
        start = end
        end += 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
