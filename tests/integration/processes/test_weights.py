"""Workers with one shard of each block, in real processes over gloo: bit-equal to one worker."""

import itertools
import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from wanstream.distributed.plan.weights import choose_weight_placement
from wanstream.distributed.worker.rendezvous import PeerLostError
from wanstream.distributed.worker.weights import measure, taken_bytes
from wanstream.distributed.worker.worker import Worker
from wanstream.offload.sharding.group import GatherBrokenError
from wanstream.sampling import working_bytes
from wanstream.sampling.steps import SamplingCancelled
from wanstream.schema import Mesh, OffloadPolicy, parse_step_strengths
from wanstream.schema.refs import ExpertsRef, LoraRef
from wanstream.testing import make_lora, save_expert_gguf, save_lora
from wanstream.tests.support.distributed.reports import Reports
from wanstream.tests.support.distributed.split_jobs import join_groups, rendezvous
from wanstream.tests.support.wan.quantised_files import matrices
from wanstream.wan.experts.open import open_pair

CELL = Mesh(cfg=2)
POLICIES = (
    *(OffloadPolicy.layerwise(1), OffloadPolicy.block_swap(2, 1)),
    *(OffloadPolicy.resident(), OffloadPolicy.layerwise(1, source="pinned")),
)
FORMS = ("plain with LoRA", "fp8 with LoRA", "GGUF with LoRA", "plain with a LoRA by steps")
CASES = (*(("plain", policy) for policy in POLICIES), *zip(FORMS, POLICIES, strict=True))
"""Every policy with blocks as stored, and every other storage format with one policy."""
SHORT_S = 20.0
"""Far below the rendezvous timeout, and far above any job's duration here."""


def job_join(here, every):
    if not hasattr(here, "worker"):
        here.worker = Worker("cpu", threads=1)
    here.worker.join(every[here.number])
    return os.getpid()


def job_leave(here):
    if hasattr(here, "worker"):
        here.worker.close()


def job_run(here, task):
    reports = Reports()
    ended = here.worker.run(task, reports)
    return {"latents": reports[-1].state and reports.latents, "gathered": ended.gathered_bytes}


def job_run_and_stop(here, task, after):
    """Request a stop on one worker after `after` steps. All workers stop."""
    reports = itertools.count(1)

    def record(_):
        if next(reports) == after and here.number == 1:
            here.worker.stop(task.run_id)

    try:
        here.worker.run(task, record)
    except SamplingCancelled as stopped:
        return str(stopped)
    raise AssertionError("the run was not stopped")


def job_run_and_fail(here, task, number, how):
    """Raise an error, or send a signal, on one worker as it reports the first step."""

    def record(_):
        if here.number == number:
            if how is not None:
                os.kill(os.getpid(), how)
            raise MemoryError("this rank has no room")

    here.worker.run(task, record)


def job_leave_meeting(here):
    here.worker.leave()


@pytest.fixture(scope="module")
def join(processes):
    """`join(placement, mesh=CELL)`: join with as many processes as the mesh has.

    Experts stay open.
    """

    def join(placement, mesh=CELL):
        every = [replace(each, weights=placement) for each in rendezvous(mesh)]
        return processes.all(job_join, every, count=mesh.size)

    yield join
    processes.all(job_leave, count=2)


@pytest.fixture(scope="module")
def forms(experts_ref, make_tiny_expert, tmp_path_factory):
    """Experts in every storage format, with a LoRA where blocks are decoded on arrival."""
    folder = tmp_path_factory.mktemp("forms")
    path = folder / "lora.safetensors"
    save_lora(make_lora(make_tiny_expert(), seed=1), path, dtype=torch.float32)
    lora = LoraRef(high_noise=path, low_noise=path)
    stages = replace(lora, steps=parse_step_strengths("0: 0, 3: 0.5"))
    high, low = (folder / f"{name}.gguf" for name in ("high", "low"))
    for seed, file in enumerate((high, low)):
        save_expert_gguf(make_tiny_expert(seed=seed), file, types=matrices("Q8_0"), seed=seed)
    gguf = ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32")
    return {
        "plain": experts_ref(),
        "plain with a LoRA by steps": replace(experts_ref(), loras=(stages,)),
        "plain with LoRA": replace(experts_ref(), loras=(lora,)),
        "fp8 with LoRA": replace(experts_ref(), storage="fp8", loras=(lora,)),
        "GGUF with LoRA": replace(gguf, loras=(lora,)),
    }


@pytest.fixture
def check_run(processes, alone):
    """`check_run(task)`: run on two workers as on one, and return the gathered bytes."""

    def check(task):
        first, second = processes.all(job_run, task, count=2)
        assert torch.equal(first["latents"], alone(task)), task
        assert first["gathered"] == second["gathered"]
        return first["gathered"]

    return check


@pytest.mark.parametrize(
    ("placement", "cases"), [("sharded", CASES), ("sharded in VRAM", CASES[1::2])]
)
def test_shards_give_what_one_worker_gives(join, forms, make_task, check_run, placement, cases):
    pids = join(placement)
    assert len({*pids, os.getpid()}) == 3
    for form, policy in cases:
        task = make_task(experts=forms[form], policy=policy)
        assert check_run(task) > 10**6, (form, policy)


def test_four_ranks_gather_too(processes, join, make_task, alone):
    join("sharded", Mesh(cfg=2, ulysses=2))
    task = make_task()
    reports = processes.all(job_run, task, count=4)
    torch.testing.assert_close(reports[0]["latents"], alone(task), rtol=0, atol=1e-5)
    processes.all(job_leave, count=4)


def test_whole_weights_gather_none_and_shards_follow_the_meeting(join, make_task, check_run):
    gathered = []
    for placement in ("full", "sharded", "full"):
        join(placement)
        gathered.append(check_run(make_task(policy=POLICIES[3])))
    assert gathered[0] == gathered[2] < 10**5 < gathered[1]


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[2]])
def test_a_stop_leaves_ranks_that_run_again_without_meeting_anew(
    processes, join, make_task, check_run, policy
):
    join("sharded")
    for after in (1, 2, 3):
        given = make_task(policy=policy), after
        first, second = processes.all(job_run_and_stop, *given, count=2, timeout=SHORT_S)
        assert first == second
    check_run(make_task(policy=policy))


def test_a_rank_that_fails_alone_holds_nobody_up(processes, join, make_task, check_run):
    join("sharded")
    task = make_task()
    failed, other = (processes[number].start(job_run_and_fail, task, 1, None) for number in (1, 0))
    with pytest.raises(MemoryError):
        failed.result(SHORT_S)
    with pytest.raises(GatherBrokenError, match="restart the worker group"):
        processes[1].start(job_run, task).result(SHORT_S)
    processes[1].start(job_leave_meeting).result(SHORT_S)
    with pytest.raises(PeerLostError):
        other.result(SHORT_S)
    join("sharded")
    check_run(task)


def test_a_rank_that_is_killed_is_missed_at_once(processes, join, make_task, check_run):
    join("sharded")
    given = make_task(), 1, signal.SIGKILL
    first, second = (processes[number].start(job_run_and_fail, *given) for number in (0, 1))
    with pytest.raises(PeerLostError):
        first.result(SHORT_S)
    with pytest.raises(RuntimeError, match="ended in the middle of a job"):
        second.result(SHORT_S)
    processes.replace(1)
    join("sharded")
    check_run(make_task())


@contextmanager
def opened(here, task, every):
    """Yield what measures take: groups, experts, a request and a policy."""
    groups = join_groups(every[here.number])
    try:
        with open_pair(task.experts) as pair:
            yield groups, pair, task.request, task.policy
    finally:
        groups.leave()


def job_measure(here, *given):
    with opened(here, *given) as each:
        return measure(*each), taken_bytes(*each)


def job_told(here, task):
    return here.worker.run(task, lambda _: None).timeline.changes


@pytest.mark.parametrize("mesh", [Mesh(cfg=2), Mesh(ulysses=2)], ids=str)
def test_a_worker_estimates_its_share_of_a_step(mesh, processes, make_task):
    """Memory needs in addition to the weights decide whether shards fit into the same memory."""
    task = make_task()
    processes.at_least(2).all(job_leave, count=2)
    found = processes.all(job_measure, task, rendezvous(mesh), count=2, timeout=SHORT_S)
    assert found[0] == found[1]
    figures, taken = found[0]
    assert (figures.workers, figures.blocks) == (2, 8)
    assert choose_weight_placement(figures).reason
    with open_pair(task.experts) as pair:
        weights = pair.device_bytes(task.policy, device=torch.device("cpu"))
        own = working_bytes(pair, task.request.noise.shape, sides=(0, 0), share=mesh)
        whole = working_bytes(pair, task.request.noise.shape, sides=(0, 0))
    assert taken == weights + own
    assert own < whole


def test_cpus_that_decide_keep_whole_weights(processes, join, make_task, check_run):
    join("auto")
    assert check_run(make_task()) < 10**5
    assert processes.all(job_told, make_task(), count=2) == [(), ()]
