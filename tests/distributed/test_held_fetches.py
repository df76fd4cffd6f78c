"""Fetches that are held back while workers exchange tokens: the gate is closed in self-attention and nowhere else."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanstream.distributed.driver import Driver
from wanstream.distributed.peer_errors import HungError, PeerLostError
from wanstream.distributed.tasks import Meeting, RunTask
from wanstream.distributed.worker import Worker
from wanstream.plan import ExpertsRef, Mesh, OffloadPolicy, WorkersRef
from wanstream.sampling import DenoiseRequest
from wanstream.wan.registry import ExpertsRegistry

LAYERWISE, PINNED = OffloadPolicy.layerwise(1), OffloadPolicy.layerwise(2, source="pinned")
CHUNKED = replace(LAYERWISE, chunk_tokens=8)
CPU = torch.device("cpu")
SAME = 1e-6
"""Relative: the largest difference by the largest value."""
STATES = {("attn1.to_q", "closed"), ("attn2.to_q", "open"), ("ffn.net.0", "open")}
LANES, VISITS = 2, 4 * 4
"""Of the request: steps x blocks."""

MakeTask = Callable[..., RunTask]


def job_watch(here: SimpleNamespace, file: str, *given: Any) -> dict[str, Any]:
    """A run whose fetches are held back: its latents, and how the gate was found in which part of a block."""
    experts, _, policy = given
    jobs = here.load(file)
    here.experts = getattr(here, "experts", None) or ExpertsRegistry()
    pair = here.experts.get(experts)
    pair.hold_fetches(True)
    engine = pair.engine(policy, CPU)
    found: Counter[tuple[str, str]] = Counter()
    hooks = [
        block.get_submodule(part).register_forward_pre_hook(look_at(engine, part, found))
        for model in engine.models.bare.values()
        for block in model.blocks
        for part in ("attn1.to_q", "attn2.to_q", "ffn.net.0")
    ]
    try:
        latents = jobs.job_run(here, *given)["latents"]
    finally:
        for hook in hooks:
            hook.remove()
        pair.hold_fetches(False)
    return {"latents": latents, "found": dict(found), "at the end": engine.gate.state.value}


def look_at(engine: Any, part: str, found: Counter[tuple[str, str]]) -> Callable[..., None]:
    def look(module: object, given: object) -> None:
        found[part, engine.gate.state.value] += 1

    return look


def job_attach_with_gate(here: SimpleNamespace, file: str, experts: ExpertsRef) -> tuple[list[str], list[str]]:
    here.experts = getattr(here, "experts", None) or ExpertsRegistry()
    here.experts.get(experts).hold_fetches(True)
    try:
        return here.load(file).job_attach_and_detach(here, experts, LAYERWISE)
    finally:
        here.experts.get(experts).hold_fetches(False)


def job_lose(here: SimpleNamespace, file: str, given: Sequence[Any], wishes: dict[int, int], sent: int) -> None:
    here.experts = getattr(here, "experts", None) or ExpertsRegistry()
    here.experts.get(given[0]).hold_fetches(True)
    here.load(file).job_run_until(here, *given, wishes, sent)


def job_join(here: SimpleNamespace, every: Sequence[Meeting]) -> None:
    if not hasattr(here, "gated"):
        here.gated = ExpertsRegistry()
        here.gated_worker = Worker("cpu", threads=1, experts=here.gated)
    here.gated_worker.join(every[here.number])


def job_run_task(here: SimpleNamespace, task: RunTask) -> tuple[torch.Tensor | None, bool]:
    """Latents, and whether there was a gate."""
    ended = here.gated_worker.run(task, lambda told: None)
    engine = here.gated.get(task.experts).present_engine(task.policy, CPU)
    return ended.latents, engine.gate is not None


def job_close(here: SimpleNamespace) -> None:
    if hasattr(here, "gated_worker"):
        here.gated_worker.close()


@pytest.fixture
def meet(processes: Any, split_jobs: Any) -> Iterator[Any]:
    """`meet(mesh, **changes)`: as many processes as it takes have met; they leave after the test."""
    count = 0

    def make(mesh: Mesh, **changes: Any) -> None:
        nonlocal count
        count = mesh.size
        processes.all(split_jobs.job_meet, split_jobs.meetings(mesh, **changes), count=count)

    yield make
    if count:
        processes.all(split_jobs.job_leave, count=count)


@pytest.fixture(scope="session")
def wide(tiny_expert_folder: Callable[..., Path]) -> ExpertsRef:
    """Experts with four heads."""
    high, low = (tiny_expert_folder(seed=seed, heads=4) for seed in (1, 2))
    return ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32")


@pytest.fixture(scope="session")
def request_of_48(make_task: MakeTask) -> DenoiseRequest:
    """4 steps, 2 of them high-noise, of lanes of 48 tokens."""
    noise = torch.randn(1, 16, 2, 8, 12, generator=torch.Generator().manual_seed(20))
    return make_task(request={"noise": noise}).request


@pytest.mark.parametrize("policy", [LAYERWISE, PINNED, CHUNKED], ids=["layerwise", "pinned", "chunked"])
def test_nothing_is_fetched_in_a_self_attention_that_is_shared(
    policy: OffloadPolicy, processes: Any, split_jobs: Any, meet: Any, wide: ExpertsRef, request_of_48: DenoiseRequest
) -> None:
    meet(Mesh(ulysses=2))
    given = wide, request_of_48, policy
    free = processes.all(split_jobs.job_run, *given, count=2)
    held = processes.all(job_watch, split_jobs.__file__, *given, count=2)
    for worker, before in zip(held, free, strict=True):
        assert torch.equal(worker["latents"], before["latents"])
        assert worker["at the end"] == "open"
        assert worker["found"].keys() == STATES
        assert worker["found"]["attn1.to_q", "closed"] >= LANES * VISITS


def test_nothing_is_fetched_in_a_ring_either(
    processes: Any, split_jobs: Any, meet: Any, wide: ExpertsRef, request_of_48: DenoiseRequest
) -> None:
    meet(Mesh(ring=2))
    given = wide, request_of_48, LAYERWISE
    processes.all(split_jobs.job_use_attention_with_lse, count=2)
    try:
        free = processes.all(split_jobs.job_run, *given, count=2)
        held = processes.all(job_watch, split_jobs.__file__, *given, count=2)
    finally:
        processes.all(split_jobs.job_use_own_attention, count=2)
    for worker, before in zip(held, free, strict=True):
        assert torch.equal(worker["latents"], before["latents"])
        assert worker["found"].keys() == STATES


def test_the_models_are_as_they_were(processes: Any, split_jobs: Any, meet: Any, wide: ExpertsRef) -> None:
    meet(Mesh(ulysses=2))
    for inside, after in processes.all(job_attach_with_gate, split_jobs.__file__, wide, count=2):
        assert after == []
        assert "high blocks.3.attn1: _forward_hooks" in inside


def test_a_worker_that_is_lost_behind_a_closed_gate_leaves_no_run_hanging(
    processes: Any, split_jobs: Any, meet: Any, wide: ExpertsRef, request_of_48: DenoiseRequest
) -> None:
    """The other one waits in its self-attention, where its gate is closed."""
    meet(Mesh(ulysses=2), timeout_s=5.0)
    given = wide, request_of_48, LAYERWISE
    answers = [process.start(job_lose, split_jobs.__file__, given, {1: 9}, signal.SIGKILL) for process in processes[:2]]
    try:
        with pytest.raises((PeerLostError, HungError)):
            answers[0].result()
    finally:
        processes.replace(1)
    processes.all(split_jobs.job_leave, count=2)
    meet(Mesh(ulysses=2))
    alone = processes[0].start(split_jobs.job_run_alone, *given).result()
    for worker in processes.all(split_jobs.job_run, *given, count=2):
        assert float((worker["latents"] - alone).abs().max() / alone.abs().max()) <= SAME


@pytest.mark.parametrize("home", ["full", "sharded"])
def test_a_task_says_whether_fetches_are_held_back(
    home: str, processes: Any, split_jobs: Any, wide: ExpertsRef, make_task: MakeTask, request_of_48: DenoiseRequest
) -> None:
    task = replace(make_task(experts=wide), request=request_of_48)
    alone = processes.at_least(2)[0].start(split_jobs.job_run_alone, wide, request_of_48, LAYERWISE).result()
    try:
        for mesh, asked, there in (
            (Mesh(ulysses=2), True, True),
            (Mesh(ulysses=2), False, False),
            (Mesh(cfg=2), True, False),
        ):
            every = [replace(meeting, weights=home) for meeting in split_jobs.meetings(mesh)]
            processes.all(job_join, every, count=2)
            held = replace(task, hold_fetches=asked, generation=every[0].generation)
            told = processes.all(job_run_task, held, count=2)
            assert [gate for _, gate in told] == [there, there]
            assert float((told[0][0] - alone).abs().max() / alone.abs().max()) <= SAME
    finally:
        processes.all(job_close, count=2)


@pytest.mark.parametrize("asked", [False, True])
def test_every_worker_is_told_what_the_reference_says(
    asked: bool, fakes: Any, experts_ref: Callable[..., ExpertsRef], make_task: MakeTask
) -> None:
    pool = fakes.FakePool(4)
    driver = Driver(pool, WorkersRef(count=4, timeout_s=20.0, hold_fetches=asked), Mesh(data=2, ulysses=2))
    driver.denoise(experts_ref(), make_task().request, LAYERWISE)
    assert [task.hold_fetches for _, task in pool.sent] == [asked] * 2
