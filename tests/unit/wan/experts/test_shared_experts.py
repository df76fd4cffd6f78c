"""Experts opened by several processes: only one reads the RAM-resident blocks."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from wanstream.host import auto_policy
from wanstream.offload.host_memory.shared_segment import PREFIX, SHM
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.wan.process_counters import io_bytes
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import open_experts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts what the system reads")
PINNED = OffloadPolicy.layerwise(1, source="pinned")
SOME = OffloadPolicy(
    kind="layerwise", prefetch_blocks=1, blocks_to_swap=0, source="pinned", ram_blocks=8
)


def run(pair: ExpertPair, policy: OffloadPolicy) -> tuple[list[torch.Tensor], int]:
    """Return one matrix per block during a run, and the bytes read."""
    engine = pair.engine(policy, "cpu")
    assert all(engine.models[name] for name in ("high", "low"))  # loads the resident parameters
    before = io_bytes("rchar")
    seen = []
    visits = step_visits(["high", "low"], engine.block_counts)
    with engine.run(visits) as engine_run:
        for visit in visits:
            with engine_run.visit(*visit):
                block = engine.models[visit.expert].blocks[visit.block]
                seen.append(block.ffn.net[2].weight.clone())
    return seen, io_bytes("rchar") - before


def _segments() -> set[str]:
    """Return this process's mapped files in shared memory."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    mapped = [line for line in lines if f"{SHM}/{PREFIX}" in line and "deleted" not in line]
    return {line.split()[-1] for line in mapped}


@pytest.mark.parametrize(("policy", "storage"), [(SOME, "as stored"), (PINNED, "fp8")])
def test_second_pair_finds_what_the_first_one_has_read(tiny_expert_file, policy, storage):
    files = [tiny_expert_file(seed=seed) for seed in (1, 2)]
    opened = partial(open_experts, *files, compute_dtype=torch.float32, storage=storage)
    with opened() as alone:
        expected, whole = run(alone, policy)
    with opened(shared=True) as first, opened(shared=True) as second:
        (one, read), (two, read_again) = run(first, policy), run(second, policy)
        assert all(map(torch.equal, one, expected))
        assert all(map(torch.equal, two, expected))
        assert read >= whole / 2 > 10**6
        if storage == "as stored":  # each process computes row scales from the file
            assert read_again < whole / 100
    assert not _segments()


def test_pair_that_streams_from_files_takes_no_shared_memory(tiny_expert_file):
    file = tiny_expert_file(seed=1)
    with open_experts(file, file, compute_dtype=torch.float32, shared=True) as pair:
        for policy, segments in ((OffloadPolicy.layerwise(1), 0), (PINNED, 1)):
            run(pair, policy)
            assert len(_segments()) == segments
        run(pair, OffloadPolicy.resident())
        assert not _segments()


def test_blocks_of_another_process_count_as_memory(tiny_expert_file, monkeypatch):
    file = tiny_expert_file(seed=1)
    cpu = torch.device("cpu")
    monkeypatch.setattr(auto_policy, "available_bytes", lambda: 0)
    opened = partial(open_experts, file, file, compute_dtype=torch.float32)
    with opened(shared=True) as first, opened(shared=True) as restarted, opened() as apart:
        assert first.shared_bytes == 0
        run(first, PINNED)
        blocks = restarted.shared_bytes
        assert blocks == sum(first.block_counts.values()) * first.block_bytes.stored
        assert auto_policy.free_memory(restarted, cpu, 0).ram_bytes == blocks
        assert auto_policy.free_memory(apart, cpu, 0).ram_bytes == 0
        assert first.engine(PINNED, "cpu").host_bytes == first.host_bytes > 0
    assert not _segments()
